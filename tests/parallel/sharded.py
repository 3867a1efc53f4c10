"""Small sharded models and their steps, for the tests of this folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.small_llama import small, tokens_and_labels
from toolkit.config.parallelism import ActivationCheckpoint, Compile, Parallelism
from toolkit.distributed.dtensor import clean_name
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import Init
from toolkit.models.parameters import init_rule
from toolkit.parallel.fsdp import begin_micro_batch
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.parallelize import parallelize

UNTIED, TIED = small("llama3.1", n_layers=2), small("llama3.2", n_layers=2)


@dataclass(frozen=True)
class Sharding:
    """Values that FSDP reads of a configuration, with precisions that a configuration may not have."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    options: Parallelism = Parallelism()

    @property
    def precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            self.param_dtype, self.reduce_dtype, self.output_dtype, cast_forward_inputs=False
        )


def changed(how: Sharding, **options: Any) -> Sharding:
    """``how`` with other options of [parallelism]."""
    return replace(how, options=how.options.model_copy(update=options))


EXACT = Sharding(param_dtype=torch.float64, reduce_dtype=torch.float64)
SINGLE = Sharding(param_dtype=torch.float32, reduce_dtype=torch.float32)
# Replicas and resharding of each strategy on four ranks.
STRATEGIES = {
    "FULL_SHARD": (1, "default"),
    "SHARD_GRAD_OP": (1, "never"),
    "NO_SHARD": (4, "default"),
    "HYBRID_SHARD": (2, "default"),
    "HYBRID_SHARD_ZERO2": (2, "never"),
}
BATCH = tokens_and_labels(12, 16)
KEEP_ALL = ActivationCheckpoint(mode="none")
FULL = ActivationCheckpoint(mode="full")
EAGER = Compile()


def sharded(
    args: ModelArgs,
    how: Sharding,
    *,
    replicate: int = 1,
    tp: int = 1,
    checkpointing: ActivationCheckpoint = KEEP_ALL,
    compiling: Compile = EAGER,
    dtype: torch.dtype = torch.float64,
    loss_chunk_tokens: int = 2048,
    headless: bool = False,
) -> Decoder:
    """A model over all ranks, with weights under which attention is far from uniform; ``headless`` as a stage
    of a pipeline."""
    ranks = dist.get_world_size()
    mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=ranks // replicate // tp, tp=tp)
    with torch.device("meta"):
        model = Decoder(args, loss_chunk_tokens=loss_chunk_tokens).to(dtype)
    if headless:
        model.output = None
    parallelize(
        model,
        mesh,
        parallelism=how.options,
        checkpointing=checkpointing,
        compiling=compiling,
        precision=how.precision,
        cpu_offload=how.cpu_offload,
    )
    return fill(model.to_empty(device="cpu"))


def fill(model: Decoder) -> Decoder:
    sharp = Init(std=0.2)
    initialize(
        model.named_parameters(),
        1,
        lambda n: sharp if n.endswith(("wq.weight", "wk.weight")) else init_rule(n, model.args),
    )
    return model


def step(model: Decoder, how: Sharding, accumulation: int = 1, after_forward: Any = None) -> None:
    """Gradients of :data:`BATCH`, of which each rank takes equally many rows."""
    tokens, labels = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in BATCH)
    for index in range(accumulation):
        begin_micro_batch(model, how.options, last=index == accumulation - 1)
        rows = slice(index * len(tokens) // accumulation, (index + 1) * len(tokens) // accumulation)
        loss = model(tokens[rows], labels=labels[rows])
        if after_forward:
            after_forward()
        loss.backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by clean name, off their sharded parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[clean_name(name)] = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
    return found


def plain_gradients(args: ModelArgs, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Gradients of one process without sharding."""
    model = fill(Decoder(args).to(dtype))
    tokens, labels = BATCH
    model(tokens, labels=labels).backward()
    return gradients(model)


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient from the expected one, relative to that one's largest number."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in expected.items()
    )


def groups(model: nn.Module) -> list[Any]:
    """FSDP's own records of its units, one each, units without parameters left out."""
    records = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            record = module._get_fsdp_state()._fsdp_param_group
            if record is not None and record not in records:
                records.append(record)
    return records


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of whole parameters that FSDP holds on this rank beside the shards."""
    return sum(
        output.untyped_storage().size()
        for group in groups(model)
        for parameter in group.fsdp_params
        for output in parameter.all_gather_outputs
    )


class Collectives(TorchDispatchMode):
    """Counts what is sent: all-gathers, reduce-scatters and all-reduces, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.counts[name.strip("_").replace("_base", "")] += 1
        return func(*args, **(kwargs or {}))
