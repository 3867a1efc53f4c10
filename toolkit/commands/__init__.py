"""The subcommands of ``llama-toolkit``; ``main`` of each file takes the arguments. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

NAME = "llama-toolkit"


class Command(NamedTuple):
    """A subcommand: its line of help, and whether it only prints, and so ends when the reader of its output
    does."""

    help: str
    only_prints: bool = True
    module: str = ""

    def main(self, name: str) -> Callable[[Sequence[str]], int]:
        """Import the module, ``toolkit.commands.NAME`` unless it is given, and return its ``main``."""
        return import_module(self.module or f"toolkit.commands.{name.replace('-', '_')}").main


COMMANDS = {
    "train": Command("train a model on this machine's GPUs or CPU", only_prints=False),
    "configs": Command("list, show and copy the presets"),
    "preflight": Command("check a config without training", module="toolkit.preflight.__main__"),
    "plan": Command("find the fastest layouts of a run on a number of GPUs"),
    "draw-plan": Command("draw the memory and the schedule of a layout", only_prints=False),
    "inspect-data": Command("show the samples of a run, token by token"),
    "prepare-data": Command("tokenize the corpora of a config ahead of time", only_prints=False),
    "train-tokenizer": Command("train a tokenizer", only_prints=False),
    "generate": Command("generate text from a prompt"),
    "chat": Command("chat with a model"),
    "evaluate": Command("perplexity, validation loss and lm-eval tasks"),
    "convert": Command("convert weights between formats, merge adapters", only_prints=False),
    "checkpoint": Command("list, inspect, verify, compare and prune checkpoints"),
    "plot": Command("plot the curves of runs", only_prints=False),
    "compare-runs": Command("find the first step at which two runs differ in a bit"),
    "report": Command("write a one-page report of a run", only_prints=False),
    "import-accelerate": Command("convert an accelerate config to TOML", only_prints=False),
    "check-cluster": Command("check the machines, links and clocks of a cluster", only_prints=False),
    "completion": Command("print the completion script of a shell: bash, zsh or fish"),
}
