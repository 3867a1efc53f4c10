"""Teach a small model whose answer wins by each preference objective, on pairs that a rule decides.

    python -m benchmarks.preferences [--folder FOLDER] [--output benchmarks/results/preferences.md]

``./run_train.sh`` trains the debug model on the embedded books. Made questions then name two frequent words
of the books and ask which comes first in a dictionary ("Which comes first, night or house?"): the right word
is preferred to the other one. Each objective trains the whole model on such pairs. It is judged by the share
of 500 other pairs, of words that no training pair has together, whose preferred answer is more probable. The
model of the books must be below 60%, and each objective must get above 90%. Runs are kept in FOLDER as they
end, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from benchmarks.finetune_task import BASE, CONFIG, load, run
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.sources import EMBEDDED_FOLDER
from toolkit.generation.load import LoadedModel, require_tokenizer

WORDS, LETTERS, APART = 100, 4, 3
"""Number of words, their fewest letters, and the least distance of two first letters in the alphabet."""
TRAINED_ON, HELD_OUT = 2500, 500
BASE_STEPS = 100
UNTUNED, TUNED = 0.6, 0.9
"""Bounds of the share before and after training."""
OBJECTIVES = {
    "DPO": (100, "--finetune.objective=dpo", "--optimizer.lr=1e-3"),
    "KTO": (300, "--finetune.objective=kto", "--optimizer.lr=7e-4"),
    "ORPO": (100, "--finetune.objective=orpo", "--finetune.orpo.beta=1", "--optimizer.lr=1e-3"),
    "SimPO": (100, "--finetune.objective=simpo", "--optimizer.lr=1e-3"),
}
"""Steps and flags of each objective."""


@dataclass(frozen=True)
class Pair:
    """A question with the word that is right and the other one."""

    prompt: str
    chosen: str
    rejected: str


def words() -> list[str]:
    """Return the most frequent words of the embedded books that have at least LETTERS letters."""
    with gzip.open(EMBEDDED_FOLDER / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    found = Counter(re.findall(rf"\b[a-z]{{{LETTERS},}}\b", " ".join(texts)))
    return [word for word, _ in found.most_common(WORDS)]


def pairs(trained_on: int = TRAINED_ON, held_out: int = HELD_OUT) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to train on, and those by which the models are judged."""
    rng = random.Random(0)
    both = [pair for pair in combinations(sorted(words()), 2) if ord(pair[1][0]) - ord(pair[0][0]) >= APART]
    rng.shuffle(both)
    made = []
    for first, second in both[: trained_on + held_out]:
        shown = rng.sample([first, second], 2)
        made.append(Pair(f"Which comes first, {shown[0]} or {shown[1]}?", first, second))
    return made[held_out:], made[:held_out]


def share(loaded: LoadedModel, judged: Sequence[Pair], *, batch_size: int = 100) -> float:
    """Return the share of pairs whose preferred answer is more probable."""
    tokenizer = require_tokenizer(loaded)
    form = chat_format(tokenizer)
    sums = []
    turns = [
        form.encode_turns(
            [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": answer}]
        )
        for pair in judged
        for answer in (pair.chosen, pair.rejected)
    ]
    for begin in range(0, len(turns), batch_size):
        batch = turns[begin : begin + batch_size]
        tokens = torch.zeros(len(batch), max(len(turn.ids) for turn in batch), dtype=torch.int64)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, turn in enumerate(batch):
            tokens[row, : len(turn.ids)] = torch.tensor(turn.ids)
            for first, last in turn.answers:
                mask[row, first:last] = True
        with torch.no_grad():
            log_probs = loaded.model(tokens[:, :-1]).log_softmax(-1)
        picked = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        sums += (picked * mask[:, 1:]).sum(-1).tolist()
    return sum(chosen > rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)) / len(
        judged
    )


def flags_of(objective: str, folder: Path) -> list[str]:
    """Return the flags of the run of ``objective`` in ``folder``."""
    steps, *flags = OBJECTIVES[objective]
    return [
        "--data.format=preference",
        "--training.global_batch_size=4",
        f"--training.dataset_path={folder / 'train.jsonl'}",
        f"--validation.dataset_path={folder / 'held_out.jsonl'}",
        f"--training.steps={steps}",
        f"--validation.freq={steps}",
        f"--checkpoint.initial_load_path={folder / 'base/checkpoint' / f'step-{BASE_STEPS}'}",
        *map(str, flags),
    ]


def report(untuned: float, shares: dict[str, float]) -> str:
    """Return the table in Markdown."""
    lines = [
        "# Preferences learned by each objective",
        "",
        f"`python -m benchmarks.preferences`: the whole debug model, trained for {BASE_STEPS} steps on "
        "the embedded books, learns which of two words comes first in a dictionary, in steps of about 20 "
        f"of {TRAINED_ON:,} pairs. The share of {HELD_OUT} other pairs whose preferred answer is more "
        "probable:",
        "",
        "| objective | steps | preferred |",
        "|---|---|---|",
        f"| before | 0 | {untuned:.1%} |",
        *(f"| {name} | {OBJECTIVES[name][0]} | {value:.1%} |" for name, value in shares.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "preferences"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    to_learn, held_out = pairs()
    for name, rows in (("train", to_learn), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    run(folder / "base", BASE, [f"--training.steps={BASE_STEPS}"])
    untuned = share(load(folder / "base"), held_out)
    print(f"before: {untuned:.1%}", flush=True)
    if untuned >= UNTUNED:
        raise SystemExit(f"the model of the books is at {untuned:.1%}, so that the pairs show nothing")
    shares = {}
    for name in OBJECTIVES:
        run(folder / name, CONFIG, flags_of(name, folder))
        shares[name] = share(load(folder / name), held_out)
        print(f"{name}: {shares[name]:.1%}", flush=True)
    text = report(untuned, shares)
    print(text)
    if low := [name for name, value in shares.items() if value <= TUNED]:
        raise SystemExit(f"not above {TUNED:.0%}: {', '.join(low)}")
    if asked.output:
        asked.output.write_text(text)


if __name__ == "__main__":
    main()
