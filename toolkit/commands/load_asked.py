"""Load the model, and build the sampling options, that the arguments of a command select."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from toolkit.commands.arguments import flags_named
from toolkit.config.local_paths import expand_user
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed import process_group
from toolkit.distributed.process_group import native_dtype
from toolkit.errors import ConfigError, Problem
from toolkit.generation.load import LoadedModel, load_model
from toolkit.generation.sampling import Sampling
from toolkit.launcher.environment import is_reporting_rank, rank_environment
from toolkit.models.common.args import ModelArgs

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def load_as_asked(
    arguments: argparse.Namespace,
    *,
    add_bos: bool | None = None,
    check: Callable[[Tokenizer | None, ModelArgs], object] | None = None,
) -> LoadedModel:
    """Load the model selected by :func:`add_model_arguments` on this process's device, sharded over the ranks
    of torchrun, whose process group is created here. ``add_bos`` comes from :func:`add_bos_argument`;
    ``check`` is passed to :func:`load_model`.

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
            ema=arguments.ema,
            adapters=adapters_as_asked(arguments),
            check=check,
        )
    if loaded.note and is_reporting_rank(os.environ):
        print(loaded.note, file=sys.stderr)
    return loaded


def adapters_as_asked(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of --adapter by name, by default the folder's name.

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


def sampling_as_asked(arguments: argparse.Namespace) -> Sampling:
    """Build the sampling options of :func:`add_sampling_arguments`.

    Raises:
        ConfigError: values out of range.
    """
    with flags_named({name: f"--{name.replace('_', '-')}" for name in _SAMPLING}):
        return Sampling(**{name: getattr(arguments, name) for name in _SAMPLING})


_PATIENCE = 3600
"""Timeout of collectives in seconds, for example while one rank reads weights slowly."""
