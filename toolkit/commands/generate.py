"""Generate text from a prompt.

    llama-toolkit generate MODEL --prompt "Once upon a time"
    llama-toolkit generate MODEL --prompt-file prompts.txt --batch-size 8 --json
    echo "Once upon a time" | llama-toolkit generate MODEL
    torchrun --nproc-per-node 2 -m toolkit generate MODEL --tp 2 --prompt "Once upon a time"

MODEL is a Hugging Face folder, a Meta folder, a step-N checkpoint, or a run's folder (its newest checkpoint).
An adapter (a checkpoint or PEFT folder) loads its base; --adapter adds one to MODEL, or several to be used in
turn. Prompts come from --prompt, or from the lines of a file or of standard input; in a .jsonl file each line
has a "prompt". Each prompt begins with BOS as configured in the tokenizer's files, or by --add-bos-token.
Special tokens in a prompt, such as "</s>", are plain text. The text depends on --seed and the index of the
prompt, not on batch or mesh.

The text goes to standard output, streamed for a single prompt. Exit codes: 0 done, 2 invalid arguments,
3 unusable model, tokenizer or prompts.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.arguments import (
    add_bos_argument,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
    count,
    local_path,
)
from toolkit.errors import EXIT_FINISHED, DataError
from toolkit.io.json_fields import parse_json
from toolkit.launcher.environment import rank_environment

_UTF_8 = "utf-8-sig"
"""UTF-8, with a byte order mark or without."""
_JSON_FIX = 'write {"prompt": "a text"}, one object a line'


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    add_model_arguments(parser)
    add_bos_argument(parser)
    add = parser.add_argument
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--prompt-file", type=local_path, metavar="FILE", help="prompts, one a line; - is standard input"
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


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    arguments = _parser().parse_args(argv)
    from toolkit.commands.generate_texts import run  # after the help, which needs no torch

    # Standard input is rank 0's.
    run(arguments, _prompts(arguments) if rank_environment(os.environ).rank == 0 else [])
    return EXIT_FINISHED
