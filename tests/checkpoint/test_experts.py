"""A run with experts continues on other meshes as one that never stopped: its losses, loads and biases, in
fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import tests.models.moe_family  # noqa: F401  registers the family
from tests.curves import few_tokens
from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.weights.open import open_weights

# Steps 1 and 2, 3 and 4, and so on. The last two have no expert parallelism.
MESHES: list[dict[str, int]] = [
    {"expert_parallel_degree": 4},
    {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2},
    {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2},
    {},
    {"tensor_parallel_degree": 2},
]
STEPS = 2 * len(MESHES)
SIZES: dict[str, Any] = {"flavor": "debugmodel", "dim": 32, "n_layers": 3, "ffn_dim": 48, "vocab_size": 516}
BIAS_STEP = 1e-3  # smaller than the differences between scores: with larger steps biases swing around 0
KEYS = ("loss", "grad_norm", "moe/load_balance_loss", "moe/router_z_loss", "moe/max_load", "moe/load_entropy")
Found = tuple[list[list[float]], dict[str, Tensor]]


def _train(folder: str, name: str, steps: int, parallelism: dict[str, int]) -> Found:
    dtype = "float64"
    trainer = small_trainer(
        small_config(
            Path(folder, name),
            model=few_tokens(Path(folder)) | SIZES | {"name": "experts"},
            training={
                "steps": steps,
                "seq_len": 32,
                "local_batch_size": 8 // dist.get_world_size(),
                "dtype": dtype,
                "mixed_precision_param": dtype,
                "mixed_precision_reduce": dtype,
            },
            moe={"aux_loss_coeff": 0.01, "z_loss_coeff": 0.001, "load_balance_coeff": BIAS_STEP},
            lr_scheduler={"warmup_steps": 2, "decay_type": "constant"},
            checkpoint={"enable": True, "interval": 2},
            parallelism=parallelism,
        )
    )
    trainer.train()
    lines = [[line[key] for key in KEYS] for line in trainer.history if "grad_norm" in line]
    return lines, {name: buffer.clone() for name, buffer in trainer.model_parts.named_buffers()}


def _moved(folder: str) -> Found:
    lines: list[list[float]] = []
    buffers: dict[str, Tensor] = {}
    for index, parallelism in enumerate(MESHES):
        new, buffers = _train(folder, "moved", 2 * index + 2, parallelism)
        lines += new[-2:]
    return lines, buffers


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    folder = str(tmp_path_factory.mktemp("experts"))
    [alone] = run_world(_train, 1, folder, "alone", STEPS, {}, timeout=120)
    return alone, run_world(_moved, 4, folder, timeout=240)[0]


def test_losses_and_loads_are_those_of_a_run_that_never_stopped(runs: tuple[Found, Found]) -> None:
    (alone, _), (moved, _) = runs
    assert len(alone) == len(moved) == STEPS
    for ours, other in zip(moved, alone, strict=True):
        assert ours == pytest.approx(other, rel=1e-9)  # rounding of other orders of sums


def test_biases_have_moved_and_are_the_same(runs: tuple[Found, Found]) -> None:
    (_, alone), (_, moved) = runs
    assert alone.keys() == moved.keys() == {f"layers.{layer}.moe.expert_bias" for layer in (1, 2)}
    for name, bias in alone.items():
        assert bias.abs().max() >= BIAS_STEP
        assert (moved[name] - bias).abs().max() < 1e-12


def _in_bf16(folder: str) -> list[dict[str, Tensor]]:
    """Biases of a run in bf16 of three steps, in the model, a weights-only save and an export; and of the
    same run resumed after its second step."""
    saves = {"enable": True, "interval": 2, "export_dtype": "bfloat16"}
    ends = {"last_save_model_only": True, "last_save_in_hf": True}
    found = []
    for steps, options in ((3, ends), (2, {}), (3, ends)):
        trainer = small_trainer(
            small_config(
                Path(folder, "resumed" if found else "run"),
                model=few_tokens(folder) | SIZES | {"name": "deepseek_v3", "n_kv_heads": 8},
                training={
                    "steps": steps, "seq_len": 32, "dtype": "bfloat16", "mixed_precision_param": "bfloat16"
                },
                checkpoint=saves | options,
                metrics={"enable_tensorboard": not found},
                lr_scheduler={"warmup_steps": 2, "decay_type": "constant"},
            )
        )  # fmt: skip
        trainer.train()
        found.append({name: buffer.clone() for name, buffer in trainer.model_parts.named_buffers()})
    for place in ("checkpoint/step-3", "hf/step-3"):
        weights = open_weights(Path(folder, "run", place))
        assert weights.tensors["tok_embeddings.weight"].dtype == torch.bfloat16
        found.append({name: weights.read(name) for name in found[0]})
    events = EventAccumulator(str(Path(folder, "run", "tb")))
    events.Reload()
    [load] = events.Images("train/moe/load")
    assert (load.step, load.height, load.width) == (3, 8 * 2, 8 * 8)  # of layers and experts
    return found


def test_biases_stay_in_fp32_beside_parameters_in_bf16(tmp_path: Path) -> None:
    [[run, _, resumed, saved, exported]] = run_world(_in_bf16, 1, str(tmp_path), timeout=120)
    assert run.keys() == {f"layers.{layer}.moe.expert_bias" for layer in (1, 2)}
    for name, bias in run.items():
        # Three steps of ±0.001, less the mean of each over 8 experts; bf16 would keep 8 bits.
        steps = bias.double() / (BIAS_STEP / 8)
        assert bias.dtype == torch.float32 and bias.any()
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
        for other in (resumed, saved, exported):
            assert other[name].dtype == torch.float32 and torch.equal(other[name], bias)
