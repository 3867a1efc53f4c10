"""Tokenize the corpora of a config ahead of time, on all cores.

    llama-toolkit prepare-data FILE [--table.key VALUE ...] [--processes N] [--verify]

Builds the token caches of the training corpus, or of each corpus of its mixture, and of the validation corpus
if validation is enabled, in data.cache_folder. Runs with the same config, on any number of nodes with access
to that folder, then start without tokenizing. Existing caches are kept; an interrupted build starts again;
several of these programs can run at once. data.max_inline_gb does not apply.

By default some blocks of a cache are compared with their hashes, as at the start of a run. --verify compares
all of them, and damaged caches are reported and rebuilt.

The command needs no GPU and no terminal, and can run as a batch job:

    sbatch --cpus-per-task=64 --wrap "llama-toolkit prepare-data FILE"

Takes every flag of toolkit.train (``python -m toolkit.train --help`` lists them); only data and tokenizer
settings are checked. Exit codes are those of toolkit.train: 0 done, 2 invalid config or flags, 3 unusable
corpus or tokenizer, 1 any other error.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from toolkit import preflight
from toolkit.commands.arguments import command_parser, count
from toolkit.config import Config
from toolkit.data.build import open_corpora, run_tokenizer
from toolkit.errors import EXIT_FINISHED, one_line

RULES = (
    "tokenizer_readable",
    "mixture_or_dataset",
    "mixture_weights_fit",
    "mixture_parts_differ",
    "streams_one_text",
    "corpus_readable",
    "dataset_choices_act",
    "text_column_acts",
    "template_has_no_escapes",
    "formats_act",
    "columns_known",
    "chat_template_readable",
    "empty_thinking_is_masked",
    "new_tokens_have_rows",
)
"""Problems with data and tokenizer."""


def check(config: Config) -> None:
    """Check the data and tokenizer settings, and print notes about the corpora to stderr.

    Raises:
        ConfigError, DataError: as :func:`toolkit.preflight.raise_problems`.
    """
    hardware = preflight.hardware_of(config)
    preflight.raise_problems(config, world_size=1, hardware=hardware, only=RULES)
    for note in preflight.notes(config, world_size=1, hardware=hardware, only=("corpora_notes",)):
        print(f"note   {one_line(note)}", file=sys.stderr, flush=True)


def prepare(config: Config, processes: int, *, verify: bool) -> None:
    """Build the token caches of ``config`` with ``processes`` (0: one per core), and print a line for each.

    With ``verify``, existing caches are checked completely.
    """
    tokenizer = run_tokenizer(config)
    if config.data.streaming:
        print("[training] streams: nothing to prepare", flush=True)
    start = time.monotonic()
    caches = open_corpora(
        config, tokenizer, progress=True, max_inline_gb=math.inf, processes=processes, verify=verify
    )
    for table, cache in caches:
        n_bytes = cache.tokens.nbytes + cache.offsets.nbytes
        print(
            f"[{table}] {cache.n_documents:,} documents, {cache.n_tokens:,} tokens, {n_bytes:,} bytes, "
            f"{time.monotonic() - start:.1f} s{', verified' if verify else ''}, in {cache.folder}",
            flush=True,
        )
        if cache.mask is not None:
            from toolkit.data.conversation_rows import statistics
            from toolkit.data.preference_rows import conversation_rows

            of = config.validation if table == "validation" else config.training
            print(
                statistics(cache, conversation_rows(cache, of.seq_len, packing=config.data.packing)),
                flush=True,
            )
        start = time.monotonic()


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = command_parser(
        "prepare-data",
        __doc__,
        usage="%(prog)s CONFIG [--table.key VALUE ...] [--processes N] [--verify]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=count, default=0, help="processes that tokenize (default: one a core)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all of what is built, and build again what is damaged"
    )
    own, words = parser.parse_known_args(argv)
    config = preflight.load(words, check)
    check(config)
    prepare(config, own.processes, verify=own.verify)
    return EXIT_FINISHED
