"""Show the first samples of a run as the model sees them.

    llama-toolkit inspect-data FILE [--table.key VALUE ...]
    llama-toolkit inspect-data FILE --samples 8 --html samples.html
    llama-toolkit inspect-data FILE --validation

Samples have the order of the run and are built in the same way: tokenized corpora are read from
data.cache_folder, or written there. For streamed text with training.global_batch_size = -1, they are the
samples of a run on one rank; more ranks change batch and order. Each line shows the position of its first
token, the text of its tokens, and their ids. Tokens with a loss are green, or between ⟦ and ⟧ without color.
Each document (conversation) of a row begins on a new line, and with data.document_mask its positions start at
0. A token that is predicted but not an input, such as the last of a conversation, is underlined, or followed
by ⁎; so is the class of a text (finetune.classification), with name and number. Loss weights other than 1
follow their tokens, as ×0.5.

--html writes one self-contained file. Takes every flag of toolkit.train; only data and tokenizer settings are
checked. Exit codes are those of toolkit.train: 0 done, 2 invalid config or flags, 3 unusable corpus or
tokenizer, 1 any other error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from toolkit import preflight
from toolkit.commands.arguments import command_parser, count, local_path, writes
from toolkit.commands.prepare_data import check
from toolkit.errors import EXIT_FINISHED


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = command_parser(
        "inspect-data",
        __doc__,
        usage="%(prog)s CONFIG [--table.key VALUE ...] [--samples N] [--html FILE] …",
        allow_abbrev=False,
    )
    parser.add_argument("--samples", type=count, default=3, metavar="N", help="default: 3")
    parser.add_argument("--validation", action="store_true", help="those of the validation")
    parser.add_argument("--html", type=local_path, metavar="FILE", help="write a page, print nothing")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="auto: where it is a terminal"
    )
    own, words = parser.parse_known_args(argv)
    config = preflight.load(words, check)
    check(config)
    from toolkit.commands.sample_view import as_html, in_terminal, samples  # help needs no torch
    from toolkit.data.build import run_tokenizer

    found = samples(config, run_tokenizer(config), own.samples, validation=own.validation)
    if own.html:
        page = as_html(list(found), f"{config.job.config_file or 'samples'}")
        with writes("--html", own.html):
            own.html.write_text(page, encoding="utf-8")
        print(f"wrote {own.html}")
    else:
        color = own.color == "always" or (
            own.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        )
        for sample in found:
            print("\n".join([*in_terminal(sample, color=color), ""]), flush=True)
    return EXIT_FINISHED
