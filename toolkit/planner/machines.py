"""Rates of a machine, that a step's time is reckoned from; machines.toml has those of GPUs."""

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
    """A kind of device, in bytes, FLOP/s and seconds, and how its ranks are joined.

    Attributes:
        peak: FLOP/s by dtype, such as "bfloat16"; one that is not there it does not multiply.
        matmul, matmul_float8, attention: parts of the peak that are reached.
        bandwidth: bytes a second that simple operations read and write.
        node: ranks that ``link`` joins; ``network`` joins the others.
        link, network: bytes a second that one rank sends.
        link_latency, network_latency: seconds of a hop.
        launch: seconds of the host for one operation, which pass beside the device's.
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
    """The kinds of GPUs of machines.toml, by name."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))
    alike = rows.pop("defaults")
    return {name: _machine(name, alike | row) for name, row in rows.items()}


def machine_named(name: str) -> Machine:
    """The GPU kind of that name, however it is spelled.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    known = machines()
    plain = "".join(it for it in name.lower() if it.isalnum()).removeprefix("nvidia").removesuffix("gb")
    for kind, machine in known.items():
        if plain in (kind.replace("-", ""), kind.replace("-", "") + "sxm"):
            return machine
    near = [kind for kind in known if plain and kind.replace("-", "").startswith(plain)]
    near = near or [kind for kind in (closest(name.lower(), known),) if kind]
    fix = f"{f'did you mean {join_or(near)}? ' if near else ''}the kinds are {', '.join(known)}"
    raise ConfigError(Problem(f"there is no kind of GPU {name!r} in {FILE.name}", fix, "--gpu", name))


def machine_of(device: str) -> Machine | None:
    """The GPU kind whose name has the most words of what its driver calls it, if one is there: none of a
    relative with other numbers (NVL, laptop, Ti, D), nor of a slice.

    >>> machine_of("NVIDIA A100-SXM4-80GB").name, machine_of("NVIDIA H100 80GB HBM3").name
    ('a100-80', 'h100')
    """
    plain = device.lower().replace("-", " ").replace("rtx ", "rtx")
    if re.search(rf"{OTHERS.pattern}|\bnvl\b", device, re.IGNORECASE):
        return None
    words = {word.removesuffix("gb") for word in plain.split()}
    known = (kind for kind in machines() if ("pcie" in kind) == ("pcie" in words))
    named = [kind for kind in known if words.issuperset(kind.split("-"))]
    return machines()[max(named, key=lambda kind: kind.count("-"))] if named else None


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
