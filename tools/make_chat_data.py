"""Generate a small dataset of conversations: questions about sums, and their answers.

    python -m tools.make_chat_data --output FILE.jsonl [--conversations N] [--held-out N] [--seed N]

Each line is {"messages": [...]} with one to three questions, some after a system message. Held-out
conversations, in FILE.held_out.jsonl, ask for other sums. The same arguments give the same bytes. The output
is in the public domain.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.commands.arguments import count, local_path
from toolkit.errors import EXIT_FINISHED

QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b}?", "Please tell me {a} + {b}.")
ANSWERS = ("{a} + {b} = {sum}.", "That is {sum}.", "{sum}")
SYSTEM = ("You add numbers.", "Answer in one line.")
HIGHEST = 99


def conversations(n: int, sums: Sequence[tuple[int, int]], rng: random.Random) -> Iterator[dict]:
    """``n`` conversations whose questions are about ``sums``."""
    for number in range(n):
        messages = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.3 else []
        for turn in range(rng.randint(1, 3)):
            a, b = sums[number % len(sums)] if turn == 0 else rng.choice(sums)
            values = {"a": a, "b": b, "sum": a + b}
            messages += [
                {"role": "user", "content": rng.choice(QUESTIONS).format(**values)},
                {"role": "assistant", "content": rng.choice(ANSWERS).format(**values)},
            ]
        yield {"messages": messages}


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_chat_data",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE")
    parser.add_argument("--conversations", type=count, default=500, metavar="N", help="default: 500")
    parser.add_argument("--held-out", type=count, default=50, metavar="N", help="default: 50")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    if asked.output.suffix != ".jsonl":
        parser.error(f"--output {asked.output}: its name must end with .jsonl")
    rng = random.Random(asked.seed)
    sums = [(a, b) for a in range(HIGHEST + 1) for b in range(HIGHEST + 1)]
    rng.shuffle(sums)
    cut = len(sums) // 10
    try:
        _write(asked.output, conversations(asked.conversations, sums[cut:], rng))
        _write(asked.output.with_suffix(".held_out.jsonl"), conversations(asked.held_out, sums[:cut], rng))
    except OSError as error:
        parser.error(f"--output {asked.output}: it cannot be written: {error.strerror}")
    return EXIT_FINISHED


def _write(path: Path, rows: Iterator[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
