"""Weights in 4 bits: numbers are bitsandbytes', alike on any mesh, and few are there at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.meshes import SINCE_2_12
from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.training import small_config, small_trainer
from toolkit import build
from toolkit.finetune import nf4
from toolkit.models.from_config import model_args
from toolkit.models.parameters import init_rule, parameter_shapes
from toolkit.parallel.dims import degrees
from toolkit.parallel.init_weights import initial_rows
from toolkit.parallel.mesh import build_mesh
from toolkit.weights import load
from toolkit.weights.pretrained import load_base_weights
from toolkit.weights.source import Region, StoredTensor


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_scales_and_numbers_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    original = weight(96, 320, dtype)
    original[3] = 0
    original[4, 64:128] = 7.5  # the scale is no power of two
    # Between two levels: a product with 1 / 0.7 and a quotient by 0.7 fall on two sides.
    original[5, :3] = torch.tensor([0.7, -0.23777557909488678, -0.09653820842504501])
    theirs, state = functional.quantize_4bit(original, blocksize=nf4.BLOCK, quant_type="nf4")
    blocks = nf4.quantize(original).unflatten(-1, (-1, nf4.BLOCK_BYTES))
    assert torch.equal(blocks[..., :32].reshape(-1, 1), theirs)
    assert torch.equal(blocks[..., 32:].contiguous().view(torch.float32).flatten(), state.absmax)
    ours = nf4.dequantize(blocks.flatten(1), dtype)
    assert torch.equal(ours, functional.dequantize_4bit(theirs, state))
    assert torch.equal(ours[3], original[3]) and torch.equal(ours[4, 64:128], original[4, 64:128])


def test_what_is_quantized_again_stays_and_parts_are_those_of_the_whole() -> None:
    original = weight(128, 256)
    packed = nf4.quantize(original)
    assert packed.numel() * 8 == original.numel() * 4.5
    assert torch.equal(nf4.quantize(nf4.dequantize(packed, torch.float32)), packed)
    assert torch.equal(nf4.quantize(original[5:70, 64:192]), packed[5:70, 36:108])
    with patch.object(nf4, "_CHUNK", 1000):  # rows in several parts
        part = nf4.dequantize(packed[5:70], torch.float64)
    assert torch.equal(nf4.dequantize(packed, torch.float64)[5:70], part)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_keeps_bytes_for_backward_and_nothing_else_of_its_weight(backend: str) -> None:
    """Compiled too, where forward and backward could share the numbers."""
    packed = [nf4.quantize(weight(64 * n, 128)) for n in (1, 2)]
    x = torch.randn(3, 5, 128, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return nf4.linear(x.sin(), first).sum() + nf4.linear(x, second, x[0, 0]).square().sum()

    run = torch.compile(layers, backend=backend, fullgraph=True) if backend != "eager" else layers
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it):
        run(x, *packed).backward()
    assert {it.dtype for it in kept if it.shape[0] in (64, 128)} <= {torch.uint8, torch.int64}
    again = x.detach().requires_grad_()
    first, second = (nf4.dequantize(it, torch.float64) for it in packed)
    ((again.sin() @ first.T).sum() + (again @ second.T + again[0, 0]).square().sum()).backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-12, atol=1e-12)


def test_the_operators_are_sound_for_torch() -> None:
    x = torch.randn(2, 3, 64, requires_grad=True)
    torch.library.opcheck(nf4.nf4_linear, (x, nf4.quantize(weight(8, 64))))


# Filling


class Whole:
    """Weights in memory, a source of which regions are read."""

    place = Path("memory")

    def __init__(self, tensors: dict[str, Tensor]):
        self.whole = tensors
        self.tensors = {name: StoredTensor(tuple(it.shape), it.dtype) for name, it in tensors.items()}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        part = self.whole[name] if region is None else self.whole[name][region]
        return part if out is None else out.copy_(part)


BLOCK_BYTES = 8192
sharded = pytest.mark.skipif(not SINCE_2_12, reason="fully_shard takes no parameters of integers")
LAYOUTS: dict[str, dict[str, int]] = {
    "hybrid": {"data_parallel_replicate_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "experts tp": {"tensor_parallel_degree": 2},
    "experts ep": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "pp": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    },
}


EXPERTS = {"name": "experts", "flavor": "wide"}


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _differing(folder: str, layout: str, broadcast: bool) -> dict[str, Any]:
    """Names of weights in 4 bits that differ from those quantized whole, as they are drawn and as they are
    loaded; of DoRA's magnitudes that are no lengths of their rows; and all names that were compared. With the
    most numbers that were quantized at once to load them."""
    config = small_config(
        folder,
        model=(EXPERTS if "experts" in layout else {})
        | {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256, "vocab_size": 96},
        parallelism=LAYOUTS[layout],
        finetune={"adapter": "lora", "lora": {"quantize_base": "nf4", "use_dora": True}},
    )
    args, cpu = model_args(config, tokenizer_vocab=96), torch.device("cpu")
    mesh = build_mesh(cpu, **vars(degrees(config.parallelism, dist.get_world_size())))
    parts = build.build_model(config, args, mesh, cpu, param_dtype=torch.bfloat16, seed=3)
    named = dict(parts.named_parameters())
    packed = {name: it for name, it in named.items() if it.dtype == torch.uint8}
    shapes = parameter_shapes(args)

    def drawn(name: str) -> Tensor:
        return initial_rows(name, 3, init_rule(name, args), shapes[name], slice(0, shapes[name][0]))

    def differing(expected: Callable[[str], Tensor]) -> list[str]:
        return [
            name for name, it in packed.items() if not torch.equal(_whole(it), nf4.quantize(expected(name)))
        ]

    found = {
        "names": list(packed),
        "drawn": differing(drawn),
        "magnitudes": [
            name
            for name, it in named.items()
            if name.endswith("magnitude")
            and not torch.equal(_whole(it), lengths(_whole(named[name.replace("magnitude", "weight")])))
        ],
    }
    sizes_of_rows = {name: (*shape, 1)[1 if len(shape) < 3 else 2] for name, shape in shapes.items()}
    flat = {
        name: weight(math.prod(shapes[name]) // it, it, torch.bfloat16) for name, it in sizes_of_rows.items()
    }
    source = Whole({name: it.reshape(shapes[name]) for name, it in flat.items()})
    sizes = []
    quantize = nf4.quantize

    def watched(rows: Tensor) -> Tensor:
        sizes.append(rows.numel())
        return quantize(rows)

    with patch.object(nf4, "quantize", watched), patch.object(load, "BLOCK_BYTES", BLOCK_BYTES):
        alone = broadcast and dist.get_rank() > 0
        load_base_weights(parts, None if alone else source, broadcast=broadcast, group=dist.group.WORLD)  # type: ignore
    return found | {"loaded": differing(source.whole.__getitem__), "at once": max(sizes)}


def lengths(packed: Tensor) -> Tensor:
    return torch.linalg.vector_norm(nf4.dequantize(packed, torch.float32), dim=1)


def _all_layouts(folder: str) -> list[dict[str, Any]]:
    return [_differing(folder, layout, broadcast) for layout in LAYOUTS for broadcast in (False, True)]


@sharded
def test_weights_are_quantized_block_by_block_to_the_same_bits_on_any_mesh(tmp_path: Path) -> None:
    for rank in run_world(_all_layouts, 4, str(tmp_path)):
        for found in rank:
            assert len(found["names"]) in (7, 14, 17)  # of a stage, of the model, of that with experts
            assert found["drawn"] == found["magnitudes"] == found["loaded"] == []
            expert = 128 * 128 if len(found["names"]) == 17 else 0
            assert found["at once"] <= max(BLOCK_BYTES // 2, expert)


TABLES: dict[str, Any] = {
    "model": {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
    "training": {"steps": 1, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2},
}


def _from_a_checkpoint(folder: str) -> list[str]:
    """Weights in 4 bits that differ from those of the checkpoint that they are read from."""
    whole = small_trainer(small_config(Path(folder, "whole"), checkpoint={"enable": True}, **TABLES))
    whole.train()
    trained = {name: _whole(it.detach()) for name, it in whole.model_parts.named_parameters()}
    adapted = small_trainer(
        small_config(
            Path(folder, "adapted"),
            finetune={"adapter": "lora", "lora": {"quantize_base": "nf4"}},
            checkpoint={"enable": True, "initial_load_path": f"{folder}/whole/checkpoint/step-1"},
            **TABLES,
        )
    )
    named = [(name, it) for name, it in adapted.model_parts.named_parameters() if it.dtype == torch.uint8]
    assert len(named) == 14
    return [name for name, it in named if not torch.equal(_whole(it), nf4.quantize(trained[name]))]


@sharded
def test_a_checkpoint_of_the_whole_model_is_quantized_as_it_is_read(tmp_path: Path) -> None:
    assert run_world(_from_a_checkpoint, 2, str(tmp_path)) == [[], []]


def _checkpointed(folder: str) -> list[list[float]]:
    """Losses and norms of three steps in bf16, which keep everything, nothing of blocks, or some matmuls."""
    found = []
    for mode in ("none", "full", "selective"):
        trainer = small_trainer(
            small_config(
                Path(folder, mode),
                model=TABLES["model"],
                training=TABLES["training"] | {"steps": 3, "mixed_precision_param": "bfloat16"},
                finetune={"adapter": "lora", "lora": {"quantize_base": "nf4", "use_dora": True}},
                activation_checkpoint={"mode": mode, "selective_ac_option": "op"},
            )
        )
        trainer.train()
        found.append([record[of] for record in trainer.history for of in ("loss", "grad_norm")])
    return found


@sharded
def test_checkpointed_activations_change_no_bit(tmp_path: Path) -> None:
    [[kept, *computed_again]] = run_world(_checkpointed, 1, str(tmp_path))
    assert computed_again == [kept, kept] and len(set(kept)) == 6
