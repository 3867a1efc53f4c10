"""Time the host for AdamW's update of sharded parameters: torch's own on DTensors, and ours on their parts.

    python -m benchmarks.adamw_update [--steps 20] [--output benchmarks/results/adamw_update.md]

Parameters of 16 × 64 numbers on ranks of which one is real, so that next to nothing is computed: what is
left is what the host pays for each parameter. Weights after the last step must be the same to the bit.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.machine import describe
from toolkit.distributed.dtensor import local
from toolkit.optim.optimizer import AdamW

MESHES = {(2,): (39, 111, 291), (2, 8): (291,), (2, 4, 8): (291,)}
"""Numbers of parameters by shape of the mesh; 291 are those of Llama 3 8B."""


def update(
    kind: type[torch.optim.AdamW], mesh: DeviceMesh, count: int, steps: int
) -> tuple[list[float], Tensor]:
    """Milliseconds of each of ``steps``, and the weights after them."""
    torch.manual_seed(0)
    parameters = []
    for _ in range(count):
        weight, gradient = (
            DTensor.from_local(torch.randn(16, 64), mesh, [Shard(0)] * mesh.ndim, run_check=False)
            for _ in range(2)
        )
        parameters.append(nn.Parameter(weight))
        parameters[-1].grad = gradient
    optimizer, milliseconds = kind(parameters, lr=1e-3, fused=True), []
    for _ in range(steps):
        begun = time.process_time()
        optimizer.step()
        milliseconds.append(1e3 * (time.process_time() - begun))
    return milliseconds, torch.stack([local(it) for it in parameters]).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape, counts in MESHES.items():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")[: len(shape)])
        for count in counts:
            theirs, expected = update(torch.optim.AdamW, mesh, count, arguments.steps)
            ours, found = update(AdamW, mesh, count, arguments.steps)
            assert torch.equal(found, expected), "other weights"
            told = [f"{it[0]:,.0f} | {statistics.median(it[1:]):.1f}" for it in (theirs, ours)]
            rows.append(f"| {' × '.join(map(str, shape))} | {count} | {' | '.join(told)} |")
        dist.destroy_process_group()
    text = "\n".join(
        [
            "# AdamW's update on the host", "",
            f"`python -m benchmarks.adamw_update --steps {arguments.steps}`, {describe()}", "",
            "Processor time of one thread in ms; of later steps the median.", "",
            "| mesh | parameters | DTensors, first step | later | ours, first step | later |",
            "|---|---|---|---|---|---|", *rows,
        ]
    )  # fmt: skip
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
