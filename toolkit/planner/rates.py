"""Estimate the time of work and communication on a machine with a mesh, tp and ep innermost."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import Config
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.machines import Machine
from toolkit.planner.work import Work


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass: computation, and exposed communication by mesh dimension."""

    compute: float
    exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.compute + sum(self.exposed.values())


_CASTS = 5 / 3
"""Bytes to cast both operands to 8 bits, relative to the bytes of a matmul of three equal matrices."""


class Rates:
    """Rates of a layout on a machine; ``dtype`` names the compute dtype in machines.toml."""

    def __init__(self, config: Config, layout: ParallelDims, machine: Machine, dtype: str):
        self.machine, self.dtype = machine, dtype
        self._async_tp = config.parallelism.enable_async_tensor_parallel
        tp, cp, stride = layout.tp, layout.cp, layout.tp * layout.cp
        self.groups = {  # (size, stride) of each group
            "tp": (tp, 1),
            "cp": (cp, tp),
            "dp_shard": (layout.dp_shard * cp, tp),
            "ep": (layout.ep, layout.etp),
            "expert_fsdp": (layout.expert_fsdp, layout.ep * layout.etp),
            "dp_replicate": (layout.dp_replicate, stride * layout.dp_shard),
            "pp": (layout.pp, stride * layout.dp),
        }
        # Unsupported dtypes are assumed to run in fp32.
        self.peak = machine.peak.get(dtype, machine.peak["float32"])
        in_8_bits = machine.peak.get("float8", 0.0) * machine.matmul_float8
        self.peak_float8 = in_8_bits or machine.matmul * self.peak
        self.float8 = any("float8" in it for it in config.model.converters)  # of the blocks

    def run(self, work: Work, *, fused: bool = False, float8: bool = False) -> Pass:
        """Return the time of ``work``. ``fused`` means that a compiler fuses chains of operations;
        ``float8``, that matmuls are in float8."""
        machine = self.machine
        reached = {
            "matmul": self.peak_float8 if float8 else machine.matmul * self.peak,
            "attention": machine.attention * self.peak,
        }
        matmuls = memory_bound = 0.0
        launches = 0
        for it in work.operations:
            if it.kind in reached:
                matmuls += it.count * max(it.flops / reached[it.kind], it.bytes / machine.bandwidth)
                if float8 and it.kind == "matmul":  # casting reads each operand twice and writes it once
                    memory_bound += it.count * _CASTS * it.bytes / machine.bandwidth
            elif fused:
                continue
            else:
                memory_bound += it.count * it.bytes / machine.bandwidth
            launches += it.count
        if fused:
            memory_bound += sum(work.fused) / machine.bandwidth
            launches += len(work.fused)
        host, device = launches * machine.launch, matmuls + memory_bound
        exposed: dict[str, float] = {}
        overlapped: dict[str, float] = {}
        for each in work.collectives:
            overlaps = not each.waits or (each.dimension == "tp" and self._async_tp)
            into = overlapped if overlaps else exposed
            seconds = each.count * self.send(each.dimension, each.operation, each.bytes)
            into[each.dimension] = into.get(each.dimension, 0.0) + seconds
        for dimension, seconds in overlapped.items():
            exposed[dimension] = exposed.get(dimension, 0.0) + max(0.0, seconds - matmuls)
        return Pass(max(host, device), exposed)

    def send(self, dimension: str, operation: str, size: float) -> float:
        """Return the time of a ring collective or all-to-all of ``size`` bytes (of the full tensor), or of a
        transfer."""
        ranks, stride = self.groups.get(dimension, (1, 1))
        if ranks == 1:
            return 0.0
        machine = self.machine
        local = min(ranks, max(1, machine.node // stride))  # ranks of the group on one node
        if local == ranks:
            bandwidth, latency = machine.link, machine.link_latency
        else:  # each network adapter of a node carries a ring
            bandwidth = min(machine.link, local * machine.network)
            latency = (machine.network_latency + (local - 1) * machine.link_latency) / local
        if operation == "all_to_all":  # at once to this node's ranks and, by the rank's adapter, to others
            inside = size * (local - 1) / ranks / machine.link + (local > 1) * machine.link_latency
            outside = size * (ranks - local) / ranks / machine.network + machine.network_latency
            return max(inside, outside if ranks > local else 0.0)
        if operation == "send":
            return size / (machine.link if local == ranks else machine.network) + latency
        turns = 2 if operation == "all_reduce" else 1
        return turns * (size * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency)

    def copy(self, size: float) -> float:
        """Return the time to read or write ``size`` bytes."""
        return size / self.machine.bandwidth
