"""Generate text from a prompt.

    python -m tools.generate MODEL --prompt "Once upon a time"
    python -m tools.generate MODEL --prompt-file prompts.txt --batch-size 8 --json
    echo "Once upon a time" | python -m tools.generate MODEL
    torchrun --nproc-per-node 2 -m tools.generate MODEL --tp 2 --prompt "Once upon a time"

MODEL is a Hugging Face folder, a Meta folder, a step-N checkpoint, or a run's folder (its newest checkpoint).
An adapter (a checkpoint or PEFT folder) loads its base; --adapter adds one to MODEL, or several to be used in
turn. Prompts come from --prompt, or from the lines of a file or of standard input; in a .jsonl file each line
has a "prompt". Each begins with BOS as configured in the tokenizer's files, or by --add-bos-token. Special
tokens in a prompt, such as "</s>", are plain text. The text depends on --seed and the index of the prompt,
not on batch or mesh.

The text goes to standard output, streamed for a single prompt. Exit codes: 0 done, 2 invalid arguments,
3 unusable model, tokenizer or prompts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from toolkit import cpu
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed import process_group
from toolkit.distributed.agreement import Ranks
from toolkit.errors import EXIT_FINISHED, ConfigError, DataError, Problem, ToolkitError, report
from toolkit.generation.generator import Generator
from toolkit.generation.load import check_tokenizer, require_tokenizer
from toolkit.generation.sampling import Sampling
from toolkit.generation.text import TextStream
from toolkit.io import standard_streams
from toolkit.io.json_fields import parse_json
from toolkit.launcher.environment import is_reporting_rank, rank_environment
from toolkit.models.common.args import ModelArgs
from tools.arguments import count, local_path
from tools.cli import (
    add_bos_argument,
    add_model_arguments,
    add_sampling_arguments,
    load_as_asked,
    sampling_as_asked,
)

_UTF_8 = "utf-8-sig"
"""UTF-8, with a byte order mark or without."""
_JSON_FIX = 'write {"prompt": "a text"}, one object a line'


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    add_bos_argument(parser)
    add = parser.add_argument
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--prompt-file",
        type=local_path,
        metavar="FILE",
        help="prompts, one a line; - is standard input",
    )
    add_sampling_arguments(parser, max_new_tokens=200, temperature=0.8, top_p=1.0)
    add(
        "--stop-token",
        action="append",
        default=[],
        metavar="NAME",
        help="a special token, or an id, at which text also ends, besides those of the model; repeatable",
    )
    add("--batch-size", type=count, default=8, metavar="N", help="prompts at a time (default: 8)")
    add("--compile", action="store_true", help="the step of a token, for long texts; one process")
    add("--no-cpu-fast-paths", action="store_true", help="on a CPU, compute by torch's operators alone")
    add("--json", action="store_true", help="a line for each prompt: prompt, text, tokens")
    add("--debug", action="store_true", help="show tracebacks")
    return parser


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """Read the prompts from the flags, the file or standard input.

    Raises:
        DataError: there is no prompt, or the file cannot be read.
    """
    if arguments.prompt:
        return arguments.prompt
    file: Path | None = None if str(arguments.prompt_file) == "-" else arguments.prompt_file
    where = file or "standard input"
    try:
        if file is None and isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding=_UTF_8, errors="strict", newline=None)
        text = sys.stdin.read() if file is None else file.read_text(encoding=_UTF_8)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts cannot be read from {where}: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{where} has no prompt; give --prompt TEXT, or one prompt per line")
    if file is not None and file.suffix == ".jsonl":
        return [_prompt(line, f"{where}, line {number}") for number, line in lines]
    return [line for _, line in lines]


def _prompt(line: str, where: str) -> str:
    """Return the prompt of a line of JSON."""
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}\n  fix:  {_JSON_FIX}") from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{where} is not an object with a text as its "prompt"\n  fix:  {_JSON_FIX}')
    return prompt


def _token_ids(tokenizer: Tokenizer, names: Sequence[str]) -> set[int]:
    """Ids of --stop-token.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    ids = set()
    for name in names:
        token = tokenizer.special_tokens.get(name, int(name) if name.isdecimal() else None)
        if token is None or token >= tokenizer.n_words:
            known = ", ".join(list(tokenizer.special_tokens)[:8])
            fix = f"name one of {known} …, or give an id below {tokenizer.n_words}"
            raise ConfigError(Problem("the tokenizer has no such special token", fix, "--stop-token", name))
        ids.add(token)
    return ids


class _Printer:
    """Prints the texts of a batch on rank 0: streamed for a single prompt, else when complete."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[str], *, as_json: bool, adapters: Sequence[str]
    ):
        self.as_json = as_json
        self.streams = len(prompts) == 1 and len(adapters) <= 1 and not as_json
        self.adapter = ""  # in use, where there are several
        self.several = len(prompts) > 1
        self.shown = not dist.is_initialized() or dist.get_rank() == 0
        self.tokenizer = tokenizer
        self.prompts = prompts

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True)

    def say(self, text: str) -> None:
        if self.shown:
            print(text, end="", flush=True)

    def batch(self, first: int, encoded: Sequence[list[int]], generated: Sequence[list[int]]) -> None:
        """Print the texts of the prompts from ``first`` on."""
        for number, (ids, tokens) in enumerate(zip(encoded, generated, strict=True), start=first):
            stream = TextStream(self.decode, ids)
            text = "".join(map(stream.add, tokens)) + stream.rest()
            prompt = self.prompts[number]
            if self.as_json:
                told = {"prompt": prompt, "text": text, "tokens": tokens}
                told |= {"adapter": self.adapter} if self.adapter else {}
                self.say(json.dumps(told, ensure_ascii=False) + "\n")
            elif not self.streams:
                place = f"{number + 1}/{len(self.prompts)} {self.adapter}".rstrip()
                self.say(f"[{place}] {prompt}{text}\n")


def _run(arguments: argparse.Namespace) -> None:
    sampling = sampling_as_asked(arguments)
    # Standard input is rank 0's.
    of_rank_0 = _prompts(arguments) if rank_environment(os.environ).rank == 0 else []
    named: set[int] = set()

    def check(tokenizer: Tokenizer | None, args: ModelArgs) -> None:
        named.update(_token_ids(check_tokenizer(tokenizer, args), arguments.stop_token))

    cpu.enable(not arguments.no_cpu_fast_paths)
    loaded = load_as_asked(arguments, add_bos=arguments.add_bos_token, check=check)
    tokenizer = require_tokenizer(loaded)
    prompts = Ranks().on_rank_0(lambda: of_rank_0)
    stop_ids = named.union(tokenizer.stop_ids, loaded.eos_ids)
    encoded = [tokenizer.encode(prompt, bos=tokenizer.adds_bos) for prompt in prompts]
    adapters = list(loaded.adapters.adapters) if loaded.adapters else []
    printer = _Printer(tokenizer, prompts, as_json=arguments.json, adapters=adapters)
    start, made = time.monotonic(), 0
    for number, name in enumerate(adapters or [""]):
        if number:
            loaded.select(name)
        printer.adapter = name if len(adapters) > 1 else ""
        generator = loaded.generator(compiled=arguments.compile)
        made += _generate(arguments, generator, printer, encoded, sampling, stop_ids)
    seconds = time.monotonic() - start
    if printer.shown:
        print(f"{made:,} tokens in {seconds:.1f} s, {made / seconds:,.1f} tokens/s", file=sys.stderr)


def _generate(
    arguments: argparse.Namespace,
    generator: Generator,
    printer: _Printer,
    encoded: Sequence[list[int]],
    sampling: Sampling,
    stop_ids: set[int],
) -> int:
    """Generate the texts of all prompts and return their number of tokens."""
    generator.check(encoded)
    made = 0
    for first in range(0, len(encoded), arguments.batch_size):
        rows = encoded[first : first + arguments.batch_size]
        generated: list[list[int]] = [[] for _ in rows]
        stream = TextStream(printer.decode, rows[0])
        if printer.streams:
            printer.say(printer.prompts[0])
        for tokens in generator.stream(
            rows,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            number=first,
        ):
            for row, token in enumerate(tokens):
                if token is not None:
                    generated[row].append(token)
            if printer.streams and tokens[0] is not None:
                printer.say(stream.add(tokens[0]))
        if printer.streams:
            printer.say(stream.rest() + "\n")
        printer.batch(first, rows, generated)
        made += sum(map(len, generated))
    return made


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except ToolkitError as error:  # the same on every rank, or of rank 0 before they have met
        return report(error, show=is_reporting_rank(os.environ), debug=arguments.debug)
    process_group.stop()
    return EXIT_FINISHED


if __name__ == "__main__":
    standard_streams.protect(end_with_reader=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, between two words or in one
    sys.exit(standard_streams.exit_code(main(sys.argv[1:])))
