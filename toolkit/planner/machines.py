"""Rates of machines for step time estimates; machines.toml contains the GPUs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.compat import tomllib
from toolkit.errors import ConfigError, Problem, closest, join_or
from toolkit.metrics.flops import OTHERS

FILE = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True)
class Machine:
    """A kind of device and its interconnect, in bytes, FLOP/s and seconds.

    Attributes:
        peak: FLOP/s by dtype, such as "bfloat16"; missing dtypes are not supported.
        matmul, matmul_float8, attention: achieved fractions of the peak.
        bandwidth: bytes per second read and written by elementwise operations.
        node: ranks connected by ``link``; ``network`` connects nodes.
        link, network: bytes per second sent by one rank.
        link_latency, network_latency: seconds per hop.
        launch: host seconds per operation, overlapped with the device.
    """

    name: str
    memory: float
    peak: Mapping[str, float]
    matmul: float
    attention: float
    bandwidth: float
    node: int
    link: float
    network: float
    link_latency: float
    network_latency: float
    launch: float
    matmul_float8: float = 0.0


@functools.cache
def machines() -> dict[str, Machine]:
    """Return the GPUs of machines.toml by name."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))
    defaults = rows.pop("defaults")
    return {name: _machine(name, defaults | row) for name, row in rows.items()}


def find_machine(name: str) -> Machine:
    """Find a GPU by name, in any spelling.

    Raises:
        ConfigError: it is unknown; the message suggests the closest.
    """
    known = machines()
    plain = "".join(it for it in name.lower() if it.isalnum()).removeprefix("nvidia").removesuffix("gb")
    for kind, machine in known.items():
        if plain in (kind.replace("-", ""), kind.replace("-", "") + "sxm"):
            return machine
    near = [kind for kind in known if plain and kind.replace("-", "").startswith(plain)]
    near = near or [kind for kind in (closest(name.lower(), known),) if kind]
    fix = f"{f'did you mean {join_or(near)}? ' if near else ''}known GPUs: {', '.join(known)}"
    raise ConfigError(Problem(f"unknown GPU {name!r}: {FILE.name} does not have it", fix, "--gpu", name))


def machine_from_device(device: str) -> Machine | None:
    """Find the GPU that best matches the driver's name; None for MIG slices and for variants with different
    rates (NVL, laptop, Ti, D).

    >>> machine_from_device("NVIDIA A100-SXM4-80GB").name, machine_from_device("NVIDIA H100 80GB HBM3").name
    ('a100-80', 'h100')
    """
    plain = device.lower().replace("-", " ").replace("rtx ", "rtx")
    if re.search(rf"{OTHERS.pattern}|\bnvl\b", device, re.IGNORECASE):
        return None
    words = {word.removesuffix("gb") for word in plain.split()}
    known = (kind for kind in machines() if ("pcie" in kind) == ("pcie" in words))
    matches = [kind for kind in known if words.issuperset(kind.split("-"))]
    return machines()[max(matches, key=lambda kind: kind.count("-"))] if matches else None


def _machine(name: str, row: Mapping[str, float]) -> Machine:
    return Machine(
        name=name,
        memory=row["memory_gib"] * 2**30,
        peak={it: row[it] * 1e12 for it in ("bfloat16", "float32", "float8") if it in row},
        matmul=row["matmul"],
        matmul_float8=row.get("matmul_float8", row["matmul"]),
        attention=row["attention"],
        bandwidth=row["bandwidth"] * 1e9 * row["streaming"],
        node=int(row["node"]),
        link=row["link"] * 1e9,
        network=row["network"] * 1e9,
        link_latency=row["link_latency"] * 1e-6,
        network_latency=row["network_latency"] * 1e-6,
        launch=row["launch"] * 1e-6,
    )
