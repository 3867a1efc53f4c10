"""Chat with a model.

    llama-toolkit chat MODEL
    llama-toolkit chat MODEL --system "You are a pirate." --temperature 0
    llama-toolkit chat MODEL --format llama2
    llama-toolkit chat MODEL --chat-template-kwargs enable_thinking=false
    torchrun --nproc-per-node 2 -m toolkit chat MODEL --tp 2

MODEL is a Hugging Face folder, a Meta folder, a step-N checkpoint, or a run's folder (its newest checkpoint).
An adapter (a checkpoint or PEFT folder) loads its base; --adapter adds adapters to MODEL. The first one
answers until /adapter NAME switches to another, or /adapter to the base; the dialog continues. Each line is a
message; /reset clears the dialog except the system prompt; /quit, /exit or the end of the input exits. Ctrl-C
stops an answer. Without a terminal, a message that cannot be answered is an error. Dialogs that exceed the
model's context lose their oldest turns.

The format is the template next to the tokenizer, else that of Llama 3, Mistral or Llama 2, by the tokenizer;
--format selects another. Template variables are those of the run's training, or --chat-template-kwargs.
Special tokens in messages, such as "<|eot_id|>", are plain text. Answers go to standard output.
Exit codes: 0 done, 2 invalid arguments, 3 unusable model, tokenizer or template.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from toolkit.commands.arguments import add_model_arguments, add_sampling_arguments, command_parser
from toolkit.config.values import parse
from toolkit.errors import EXIT_FINISHED
from toolkit.models.registry import chat_formats


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("chat", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="the system prompt")
    add("--format", metavar="NAME", help=f"{', '.join(chat_formats())} or the file of a jinja template")
    add("--chat-template-kwargs", metavar="NAME=VALUE,…", type=_variables, help="variables for the template")
    add_sampling_arguments(parser, max_new_tokens=512, temperature=0.6, top_p=0.9)
    return parser


def _variables(text: str) -> dict[str, bool | str]:
    """Parse a flag like data.chat_template_kwargs."""
    found = parse(text, dict[str, bool | str])
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,…")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    asked = _parser().parse_args(argv)
    from toolkit.commands.dialog import run  # after the help, which needs no torch

    run(asked)
    return EXIT_FINISHED
