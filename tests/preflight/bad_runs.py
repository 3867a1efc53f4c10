"""A run that breaks a rule of the preflight, as a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import MANIFEST, build_manifest
from toolkit.config import Config, load_config
from toolkit.hardware import Hardware

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests" / "assets" / "tokenizer"
CPU = Hardware("cpu", "CPU", 2, native_bf16=True)
OLD_CPU = Hardware("cpu", "CPU", 2, native_bf16=False)
V100 = Hardware("cuda", "Tesla V100", 8, native_bf16=False, capability=7.0)
H100 = Hardware("cuda", "NVIDIA H100", 8, native_bf16=True, capability=9.0)
SMALL = ["--model.vocab_size=4352", "--training.seq_len=256", "--training.global_batch_size=16"]


def configure(flags: list[str]) -> Config:
    """The shipped books by their own name, since a note tells of torchtitan's; unless the flags name text."""
    named = any(flag.startswith(("--data.mixture.", "--job.config_file")) for flag in flags)
    corpus = [] if named else ["--training.dataset=embedded"]
    assets = [f"--model.hf_assets_path={TOKENIZER}", "--data.cache_folder=cache"]
    return load_config([*assets, *SMALL, *corpus, *flags])


@dataclass(frozen=True)
class Bad:
    """A run that breaks ``rule`` (and ``also``); ``says`` are parts of the message about ``key``. It finds
    torch of version ``torch``."""

    rule: str
    flags: list[str]
    key: str
    says: tuple[str, ...]
    world: int
    hardware: Hardware
    also: set[str]
    prepare: Callable[[Path], Any]
    torch: tuple[int, int]


def bad(
    rule: str,
    flags: str,
    *says: str,
    key: str = "",
    world: int = 1,
    hardware: Hardware = CPU,
    also: str = "",
    prepare: Callable[[Path], Any] = lambda folder: None,
    torch: tuple[int, int] = (2, 13),
) -> Bad:
    """A case whose key, if not given, is the first of the flags, which stand without their dashes."""
    words = flags.split()
    key = key or words[0].partition("=")[0]
    dashed = [f"--{word}" for word in words]
    return Bad(rule, dashed, key, says, world, hardware, set(also.split()), prepare, torch)


def save(folder: Path, step: int, *, model: dict[str, Any] | None = None, **run: Any) -> Path:
    """A committed checkpoint as the trainer writes it, of one byte. None leaves an entry out."""
    path = folder / "outputs" / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x")
    about = {
        "model": model or {},
        "model_only": False,
        "data_parallel_degree": 1,
        "global_batch_size": 8,
        "loader": {},
    } | run
    about = {name: value for name, value in about.items() if value is not None}
    files = {"__0_0.distcp": {"bytes": 1, "blake3": "0"}}
    manifest = build_manifest(step=step, files=files, tensor_count=1, tensor_bytes=1, run=about)
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


def write_protect(folder: Path) -> None:
    (folder / "a").mkdir(mode=0o500)


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


TP, CP, PP, REPLICATE, SHARD = (
    f"parallelism.{name}_degree"
    for name in (
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "data_parallel_replicate",
        "data_parallel_shard",
    )
)
