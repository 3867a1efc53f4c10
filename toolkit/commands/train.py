"""Train the model that a config describes, on the GPUs of this machine or on its CPU.

    llama-toolkit train                                   a small model on text that is included
    llama-toolkit train llama3_8b --training.dataset_path 'corpus/*.jsonl'
    NGPU=4 llama-toolkit train mine.toml --training.steps 100

The first word is a TOML file or a preset (`llama-toolkit configs` lists them). Any key can be overridden.
Environment variables describe the launch, as for run_train.sh. NGPU is the number of ranks (default: one per
GPU, or 2 on a CPU); NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT describe several nodes; LOG_RANK,
MAX_RESTARTS, SHUTDOWN_TIMEOUT, JOIN_TIMEOUT, NODE_TIMEOUT and LAST_CALL_TIMEOUT are in docs/cluster.md. With
SAMPLE=TEXT the trained model continues that text. `--comm.mode fake_backend` describes a run of any number of
ranks without training.

Exit codes: 0 finished, 2 invalid config, 3 unusable data or checkpoint, 75 stopped by a signal after saving
(start again to resume), 1 any other error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolkit import launch

DEBUG_MODEL = "debug_model"
_SAMPLE = "It was"


def main(argv: Sequence[str]) -> int:
    """Launch the run and return its exit code; without a config, launch the debug model."""
    words = [*argv]
    if {"-h", "--help"} & {*words}:
        print(__doc__)
    elif not _names_config(words):
        words = [DEBUG_MODEL, *words]
        os.environ.setdefault("SAMPLE", _SAMPLE)
    return launch.main(words)


def _names_config(words: Sequence[str]) -> bool:
    flags = (word.partition("=")[0].replace("-", "_") for word in words)
    return bool(words) and not words[0].startswith("-") or "__job.config_file" in flags
