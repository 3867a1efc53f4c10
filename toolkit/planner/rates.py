"""The time of work and of communication on a machine whose ranks a mesh lays out, tp innermost."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import Config
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.machines import Machine
from toolkit.planner.work import Work


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass: computation, and communication that it waits for, by dimension."""

    compute: float
    exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.compute + sum(self.exposed.values())


_CASTS = 5 / 3
"""Bytes to make 8 bits of both factors, by those of a product of three matrices of one size: 2½ of two."""


class Rates:
    """``dtype`` is what is computed in, as machines name it."""

    def __init__(self, config: Config, layout: ParallelDims, machine: Machine, dtype: str):
        self.machine, self.dtype = machine, dtype
        self._async_tp = config.parallelism.enable_async_tensor_parallel
        tp, cp, apart = layout.tp, layout.cp, layout.tp * layout.cp
        self.groups = {  # ranks, and how far apart in rank they are
            "tp": (tp, 1),
            "cp": (cp, tp),
            "dp_shard": (layout.dp_shard * cp, tp),
            "dp_replicate": (layout.dp_replicate, apart * layout.dp_shard),
            "pp": (layout.pp, apart * layout.dp),
        }
        # What a device does not multiply in, it multiplies in fp32.
        self.peak = machine.peak.get(dtype, machine.peak["float32"])
        in_8_bits = machine.peak.get("float8", 0.0) * machine.matmul_float8
        self.peak_float8 = in_8_bits or machine.matmul * self.peak
        self.float8 = any("float8" in it for it in config.model.converters)  # in blocks

    def run(self, work: Work, *, fused: bool = False, float8: bool = False) -> Pass:
        """The time of ``work``, of which a compiler has ``fused`` what it can, and whose products are in
        ``float8``."""
        machine = self.machine
        reached = {
            "matmul": self.peak_float8 if float8 else machine.matmul * self.peak,
            "attention": machine.attention * self.peak,
        }
        products = simple = 0.0
        launches = 0
        for it in work.operations:
            if it.kind in reached:
                products += it.count * max(it.flops / reached[it.kind], it.bytes / machine.bandwidth)
                if float8 and it.kind == "matmul":  # reads each factor twice, writes it once
                    simple += it.count * _CASTS * it.bytes / machine.bandwidth
            elif fused:
                continue
            else:
                simple += it.count * it.bytes / machine.bandwidth
            launches += it.count
        if fused:
            simple += sum(work.fused) / machine.bandwidth
            launches += len(work.fused)
        host, device = launches * machine.launch, products + simple
        waited: dict[str, float] = {}
        beside: dict[str, float] = {}
        for each in work.collectives:
            overlaps = not each.waits or (each.dimension == "tp" and self._async_tp)
            into = beside if overlaps else waited
            seconds = each.count * self.send(each.dimension, each.operation, each.bytes)
            into[each.dimension] = into.get(each.dimension, 0.0) + seconds
        for dimension, seconds in beside.items():
            waited[dimension] = waited.get(dimension, 0.0) + max(0.0, seconds - products)
        return Pass(max(host, device), waited)

    def send(self, dimension: str, operation: str, size: float) -> float:
        """The time of a collective of a whole tensor of ``size`` bytes in a ring, or of a transfer."""
        ranks, apart = self.groups.get(dimension, (1, 1))
        if ranks == 1:
            return 0.0
        machine = self.machine
        here = min(ranks, max(1, machine.node // apart))  # ranks of the group on one machine
        if here == ranks:
            bandwidth, latency = machine.link, machine.link_latency
        else:  # each adapter of a machine carries a ring
            bandwidth = min(machine.link, here * machine.network)
            latency = (machine.network_latency + (here - 1) * machine.link_latency) / here
        if operation == "send":
            return size / (machine.link if here == ranks else machine.network) + latency
        turns = 2 if operation == "all_reduce" else 1
        return turns * (size * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency)

    def copy(self, size: float) -> float:
        """The time to read or write so many bytes of parameters, gradients or optimizer state."""
        return size / self.machine.bandwidth
