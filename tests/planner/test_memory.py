"""A rank that does not run is said to have what one that runs has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from tests import mesh_runs, meshes
from tests.helpers import run_world
from tests.parallel.sharded import gathered_bytes, groups
from tests.training import small_config, small_trainer
from toolkit.hardware import detect
from toolkit.models.parameters import parameter_count
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.dims import degrees
from toolkit.planner.memory import rank_state
from toolkit.planner.traffic import step_traffic
from toolkit.preflight.planned_run import PlannedRun

PIPELINE = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}

# Of 4 ranks.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "tp and replicas": {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2},
        "model": {"ffn_dim": 172},
    },
    "tp and cp, in units of attention": {
        "parallelism": {
            "tensor_parallel_degree": 2,
            "context_parallel_degree": 2,
            "fsdp_wrap_policy": "class",
            "fsdp_wrap_classes": ["TransformerBlock", "Attention", "OutputHead"],
        },
    },
    "a tied head, uneven shards": {
        "model": {"name": "llama3.2", "vocab_size": 4361},
        "training": {"dtype": "bfloat16"},
        "compile": {"enable": True, "backend": "eager"},
    },
    "a tied head on another stage": {
        "parallelism": {**PIPELINE, "tensor_parallel_degree": 2},
        "model": {"name": "llama3.2", "n_layers": 3},
        "activation_checkpoint": {"mode": "full"},
    },
    "moments in 8 bits": {
        "parallelism": {"tensor_parallel_degree": 2},
        "model": {"dim": 256, "head_dim": 64, "ffn_dim": 512},
        "optimizer": {"name": "AdamW8bit"},
    },
    "momentum of matrices": {
        "parallelism": {"tensor_parallel_degree": 2},
        "model": {"ffn_dim": 172},
        "optimizer": {"name": "Muon"},
    },
    "momentum of experts": {
        "parallelism": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
        "model": {"name": "experts"},
        "optimizer": {"name": "Muon"},
    },
    "experts that tp splits": {
        "parallelism": {
            "tensor_parallel_degree": 2,
            "expert_parallel_degree": 2,
            "expert_tensor_parallel_degree": 2,
        },
        "model": {"name": "experts"},
    },
    "a base in 4 bits": {
        "parallelism": {**PIPELINE, "data_parallel_shard_degree": 2},
        "model": {"ffn_dim": 192},
        "finetune": {"adapter": "lora", "lora": {"quantize_base": "nf4"}},
    },
    "stages in a V": {
        "parallelism": {
            **PIPELINE,
            "pipeline_parallel_schedule": "ZBVZeroBubble" if meshes.SINCE_2_13 else "Interleaved1F1B",
            "fsdp_reshard_after_forward": "never",
        },
        "model": {"n_layers": 5, "name": "llama3.2"},
    },
}
if not meshes.SINCE_2_12:
    del RUNS["a base in 4 bits"]


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@contextmanager
def _watched() -> Iterator[list[tuple[int, int]]]:
    """Bytes of whole gradients, and of whole parameters, as each stage is about to reduce its gradients."""
    found = []
    reduce = PipelineStage.perform_reduce_grad

    def watching(stage: PipelineStage, *arguments: Any) -> Any:
        parameters = [each for record in groups(stage.submod) for each in record.fsdp_params]
        found.append(
            (
                sum(_bytes(it.unsharded_param.grad) for it in parameters if it.sharded_param.requires_grad),
                gathered_bytes(stage.submod),
            )
        )
        return reduce(stage, *arguments)

    with mock.patch.object(PipelineStage, "perform_reduce_grad", watching):
        yield found


def _run(folder: Path, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a step and say what this rank then holds."""
    trainer = small_trainer(
        small_config(folder, **{**tables, "training": {**tables.get("training", {}), "steps": 1}})
    )
    with _watched() as whole:
        trainer.train()
    named = [*trainer.model_parts.named_parameters(), *trainer.model_parts.tied_copies()]
    records = [record for model in trainer.model_parts.models for record in groups(model)]
    return {
        "layout": degrees(trainer.config.parallelism, dist.get_world_size()),
        "args": trainer.args,
        "parts": [
            (name, tuple(parameter.shape), tuple(parameter.to_local().shape), _bytes(parameter))
            for name, parameter in named
        ],
        "optimizer": sum(map(_bytes, optimizer_tensors(named, trainer.optimizer).values())),
        "whole": whole,
        "units": [
            sum(
                it._orig_size.numel() * (it.param_dtype or it.orig_dtype).itemsize
                for it in record.fsdp_params
            )
            for record in records
        ],
    }


def _world(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: _run(folder / name, tables) for name, tables in RUNS.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Holdings of each of 4 ranks after each of ``RUNS``."""
    return run_world(_world, 4, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_holds_what_it_holds_in_a_real_run(name, ran, tmp_path):
    config = small_config(tmp_path, **RUNS[name])
    for rank, real in enumerate(found[name] for found in ran):
        said = rank_state(config, real["args"], real["layout"], rank, param_dtype=torch.float32)
        assert [(part.name, part.whole, part.local, part.bytes) for part in said.parts] == real["parts"]
        assert said.optimizer_bytes == real["optimizer"]
        # FSDP's own records come in the order of the modules, in which the root is the first.
        assert sorted(unit.bytes for unit in said.units) == sorted(real["units"])
        if real["whole"]:
            gradients = sum(unit.gradients for unit in said.units) * 4
            gathered = sum(unit.bytes for unit in said.units)
            assert [sum(held) for held in zip(*real["whole"], strict=True)] == [gradients, gathered]
        assert sum(unit.stored_gradients for unit in said.units) == sum(
            math.prod(part.local) for part in said.parts if part.trained
        )
    assert not dist.is_initialized()


def test_a_ring_within_documents_is_planned_as_its_device_runs_it(tmp_path: Path) -> None:
    config = mesh_runs.configure(tmp_path, "cp2 ring")
    run = PlannedRun(config, 2, detect())
    assert run.mesh and run.model
    for target, operations in (("cpu", {"send"}), ("cuda", {"all_gather", "reduce_scatter"})):
        found = step_traffic(config, run.model, run.mesh, 0, param_dtype=torch.float64, target=target)
        assert {each.operation for each in found if each.dimension == "cp"} == operations


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout in meshes.FAST[::6] else pytest.mark.exhaustive)
        for layout in meshes.LAYOUTS
    ],
)
def test_the_ranks_of_a_world_hold_the_model(layout: str, tmp_path: Path) -> None:
    """Each parameter once a replica; norms on all ranks of a tp group, a tied embedding on two stages."""
    config = mesh_runs.configure(tmp_path, layout)
    run = PlannedRun(config, meshes.ranks(layout), detect())
    assert run.mesh and run.model
    held, whole = Counter[str](), {}
    for rank in range(run.world_size):
        for part in rank_state(config, run.model, run.mesh, rank, param_dtype=torch.float64).parts:
            if part.name.startswith("teacher."):
                continue
            held[part.name] += math.prod(part.local)
            whole[part.name] = math.prod(part.whole)
    assert sum(whole.values()) == parameter_count(run.model)
    for name, numbers in whole.items():
        shared = name.endswith(("norm.weight", "router.gate.weight", "router.gate.bias", "expert_bias"))
        copies = run.mesh.dp_replicate * (run.mesh.tp if shared else 1)
        tied = run.model.tie_embeddings and run.mesh.pp > 1 and name == "tok_embeddings.weight"
        assert held[name] == numbers * copies * (2 if tied else 1), name


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_one_gpu_gathers_nothing(tmp_path: Path, target: str) -> None:
    """There FSDP is skipped; a CPU copies each unit."""
    config = small_config(tmp_path, training={"dtype": "bfloat16", "mixed_precision_param": "bfloat16"})
    run = PlannedRun(config, 1, detect())
    assert run.mesh and run.model
    state = rank_state(config, run.model, run.mesh, 0, param_dtype=torch.bfloat16, target=target)
    assert (sum(unit.bytes for unit in state.units) == 0) == (target == "cuda")
    assert state.gradient_bytes == state.parameter_bytes == 2 * parameter_count(run.model)
