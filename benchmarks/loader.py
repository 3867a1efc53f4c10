"""Tokens/s that the data loader hands to a rank, beside what the fastest model here takes.

    python -m benchmarks.loader --output benchmarks/results/loader.md

The loader is built from a configuration and its micro-batches are taken, as the trainer does both, by the
first of two data-parallel ranks, on one thread. Padding is not counted. Forms take turns of SECONDS each,
after one turn that is not counted. The model's tokens/s are those of ``--model-tokens-per-second``, or else
those of the fastest case of benchmarks/results/peers_pretrain.json; of all its ranks together, although a
loader feeds one of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from benchmarks.machine import describe
from benchmarks.peer_models import Case
from toolkit.config.load import load_config
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.data.build import open_data
from toolkit.data.build_loader import training_loader
from toolkit.data.dataloader import Batch, Loader
from toolkit.data.packing import PADDING

MODELS = Path(__file__).parent / "results" / "peers_pretrain.json"
RANKS, TURNS, SECONDS, TARGET = 2, 7, 0.5, 20
FORMS = {
    "packed text": ["train_configs/debug_model.toml"],
    "packed conversations": ["train_configs/chat_debug.toml"],
    "a mixture of two texts": [
        "train_configs/debug_model.toml",
        "--data.mixture.books.weight=0.7",
        "--data.mixture.books.dataset=embedded",
        "--data.mixture.others.weight=0.3",
        "--data.mixture.others.dataset=embedded_validation",
    ],
}

Measured = dict[str, tuple[str, list[tuple[int, int, float]]]]
"""Rows × tokens of a micro-batch of each form, and its turns."""


def fastest_model(results: Path) -> float:
    """The most tokens/s, by the median step, that this toolkit takes in a file of benchmarks.peers."""
    return max(
        Case(**result["case"]).tokens / statistics.median(result["seconds"]["ours"])
        for result in json.loads(results.read_text())
    )


def open_loader(flags: list[str], cache: str) -> tuple[Loader, BatchShape]:
    """The loader of the first rank of RANKS, and the batch that they share."""
    file, *changes = flags
    config = load_config(
        ["--job.config_file", file, "--validation.enable=false", f"--data.cache_folder={cache}", *changes]
    )
    training = config.training
    shape = batch_shape(training, dp=RANKS)
    assert shape is not None
    data = open_data(config, progress=False)
    return training_loader(config, data, shape, dp_rank=0, dp_size=RANKS, seed=0), shape


def tokens(batch: Batch) -> int:
    """Places of a micro-batch that are no padding."""
    documents = batch["documents"]
    assert documents is not None, "without a document mask padding is not told from text"
    return int((documents != PADDING).sum())


def turn(
    batches: Iterator[Batch],
    accumulation: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, int, float]:
    """Micro-batches and tokens handed out in about ``seconds``, and the seconds of the loader alone."""
    micro_batches = handed = 0
    taken = 0.0
    while taken < seconds:
        start = clock()
        step = list(islice(batches, accumulation))
        taken += clock() - start
        micro_batches += len(step)
        handed += sum(map(tokens, step))
    return micro_batches, handed, taken


def report(measured: Measured, model: float, lead: Iterable[str]) -> str:
    """The page, which begins with ``lead``."""
    lines = [
        *lead,
        "| | rows × tokens | padding | µs a micro-batch | tokens/s | in the slowest turn | times the model |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (size, turns) in measured.items():
        rows, length = map(int, size.split(" × "))
        micro_batches, handed, _ = map(sum, zip(*turns, strict=True))
        rates = [count / taken for _, count, taken in turns]
        cells = [
            size,
            f"{1 - handed / (micro_batches * rows * length):.1%}",
            f"{statistics.median(taken / count for count, _, taken in turns) * 1e6:,.0f}",
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{statistics.median(rates) / model:,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-tokens-per-second", type=float, help=f"default: from {MODELS.name}")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    model, source = options.model_tokens_per_second, "as given"
    if model is None:
        if not MODELS.exists():
            parser.error(f"{MODELS} is not there: run benchmarks.peers, or give --model-tokens-per-second")
        model, source = fastest_model(MODELS), f"of {MODELS.name}"
    machine = describe()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        loaders = {name: open_loader(flags, cache) for name, flags in FORMS.items()}
        given = {name: (iter(loader), shape.accumulation) for name, (loader, shape) in loaders.items()}
        measured: Measured = {}
        for name, (batches, accumulation) in given.items():
            first = next(batches)["tokens"]
            assert first is not None
            measured[name] = (" × ".join(map(str, first.shape)), [])
            turn(batches, accumulation, SECONDS)
        for _ in range(TURNS):
            for name, (batches, accumulation) in given.items():
                measured[name][1].append(turn(batches, accumulation, SECONDS))
    command = f"python -m benchmarks.loader {shlex.join(sys.argv[1:])}"
    lead = [
        "# The data loader",
        "",
        f"`{command}`: what the loader hands to one of {RANKS} ranks, medians of {TURNS} turns, beside the "
        f"{model:,.0f} tokens/s that the fastest model here takes ({source}, all ranks together). The aim is "
        f"{TARGET} times that. {machine}",
        "",
    ]
    text = report(measured, model, lead)
    print(text, end="")
    if options.output:
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
