"""Arguments shared by several programs of ``tools/``, and the models and options that they select."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from toolkit.config.local_paths import expand_user
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed import process_group
from toolkit.distributed.process_group import native_dtype
from toolkit.errors import ConfigError, Problem
from toolkit.generation.load import LoadedModel, load_model
from toolkit.generation.sampling import Sampling
from toolkit.launcher.environment import is_reporting_rank, rank_environment
from toolkit.models.common.args import ModelArgs
from tools.arguments import add_custom_import, count, flags_named, local_path_text

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of programs that use a model, for :func:`load_as_asked`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=local_path_text,
        help="a Hugging Face folder, a Meta folder, a run's folder or step-N of this toolkit, or an adapter",
    )
    parser.add_argument(
        "--adapter",
        metavar="[NAME=]FOLDER",
        action="append",
        default=[],
        help="on MODEL: a PEFT folder, or a run's folder or step-N of an adapter",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=local_path_text,
        help="its folder or file (default: the model's)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of the weights and all computation; auto: bfloat16 on devices with native support",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="under torchrun: shard each weight over N ranks, and use FSDP over the rest",
    )
    add_custom_import(parser)


def add_bos_argument(parser: argparse.ArgumentParser) -> None:
    """Add --add-bos-token, for programs that process plain text rather than a chat format."""
    parser.add_argument(
        "--add-bos-token",
        action=argparse.BooleanOptionalAction,
        help="whether texts begin with BOS (default: as in the run, else as the tokenizer's files say)",
    )


def load_as_asked(
    arguments: argparse.Namespace,
    *,
    add_bos: bool | None = None,
    check: Callable[[Tokenizer | None, ModelArgs], object] | None = None,
) -> LoadedModel:
    """Load the model of :func:`add_model_arguments` on this process's device, sharded over the ranks of
    torchrun, whose process group is created here. ``add_bos`` comes from :func:`add_bos_argument`; ``check``
    is passed to :func:`load_model`.

    Raises:
        ConfigError, DataError, CheckpointError: as :func:`load_model`.
    """
    device = process_group.local_device()
    if rank_environment(os.environ).world_size > 1:
        process_group.start(device, timeout_seconds=_PATIENCE)
    dtype = native_dtype(device) if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    with flags_named({"tp": "--tp"}):
        loaded = load_model(
            arguments.model,
            device=device,
            dtype=dtype,
            tp=arguments.tp,
            tokenizer_path=arguments.tokenizer,
            add_bos=add_bos,
            adapters=adapters_as_asked(arguments),
            check=check,
        )
    if loaded.note and is_reporting_rank(os.environ):
        print(loaded.note, file=sys.stderr)
    return loaded


def adapters_as_asked(arguments: argparse.Namespace) -> dict[str, Path]:
    """Folders of --adapter by name, by default the folder's name.

    Raises:
        ConfigError: two have the same name.
    """
    found: dict[str, Path] = {}
    for text in arguments.adapter:
        name, equals, folder = text.partition("=")
        path = expand_user(folder if equals and "/" not in name else text)
        name = name if equals and "/" not in name else path.resolve().name
        if name in found:
            rule = f"{found[name]} is called {name} too"
            raise ConfigError(Problem(rule, "name it: --adapter NAME=FOLDER", "--adapter", text))
        found[name] = path
    return found


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """Add the sampling arguments with these defaults, for :func:`sampling_as_asked`."""
    add = parser.add_argument
    add(
        "--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help=f"default: {max_new_tokens}"
    )
    add(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0: the most likely token (default: {temperature})",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help=f"sample from the most likely tokens with total probability P (default: {top_p})",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens with at least P times the highest probability",
    )
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less")
    add("--seed", type=int, default=0)


def sampling_as_asked(arguments: argparse.Namespace) -> Sampling:
    """Build the sampling options of :func:`add_sampling_arguments`.

    Raises:
        ConfigError: values out of range.
    """
    with flags_named({name: f"--{name.replace('_', '-')}" for name in _SAMPLING}):
        return Sampling(**{name: getattr(arguments, name) for name in _SAMPLING})


_PATIENCE = 3600
"""Timeout of collectives in seconds, for example while one rank reads weights slowly."""
