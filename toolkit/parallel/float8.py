"""float8 matmuls in linear layers (Micikevicius et al. 2022, arXiv:2209.05433).

Forward and backward of a layer have three matmuls. The operands are cast dynamically, with a scale that maps
the largest magnitude of a matrix ("tensorwise") or of each row ("rowwise") to the largest float8 value.
Weights, gradients and optimizer state keep their dtypes. Recipes, casts and kernels are torchao's. Shapes: T
tokens of a micro-batch, K input features, N output features.

A matrix sharded by tensor or context parallelism uses the scales of the full matrix: maxima are reduced over
its ranks, so that a layer computes the same values as on one rank. Maxima are not reduced over data-parallel
ranks, so activation scales belong to one micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import inductor_config, local_tensor
from toolkit.config import Config
from toolkit.config.parallelism import Float8 as Options
from toolkit.distributed.collectives import all_reduce
from toolkit.distributed.dtensor import local
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.plain_linear import check_plain
from toolkit.parallel.float8_layers import can_gather_in_float8, float8_layers
from toolkit.parallel.mesh import Mesh

logging.disable(logging.WARNING)  # torchao warns about kernels that it cannot load; none are used here
try:
    from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
    from torchao.float8.float8_training_tensor import (
        Float8TrainingTensor,
        GemmInputRole,
        LinearMMConfig,
        ScaledMMConfig,
        hp_tensor_and_scale_to_float8,
    )
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax
finally:
    logging.disable(logging.NOTSET)
try:
    # Inductor of torch 2.14 and Triton's transposed float8 stores together give NaN (triton issue 11111).
    # torchao patches inductor in convert_to_float8_training, which is not called here.
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen as avoid_triton_nan
except ImportError:  # a torchao without the patch

    def avoid_triton_nan() -> None:
        """Do nothing."""


_FILTER = "quantize.linear.float8.filter_fqns"
_NOT_SHARDED = ""
"""Placeholder for a group name: the dimension is not sharded."""


class Float8Converter:
    """The built-in float8 converter (interface: :class:`toolkit.parallel.converters.Converters`)."""

    def __init__(self, config: Config):
        self.options, self.verbose = config.quantize.linear.float8, config.model.print_after_conversion
        if config.compile.enable:
            avoid_triton_nan()

    def convert(self, model: Decoder) -> None:
        """Convert linear layers to float8."""
        apply_float8(model, self.options, verbose=self.verbose)

    def connect(self, models: Iterable[Decoder], mesh: Mesh) -> None:
        """Set the process groups over which each layer's matrices are sharded."""
        connect(models, mesh, self.options)

    def post_optimizer_hook(self, models: Iterable[Decoder]) -> None:
        """Precompute the scales for the next forward, if configured."""
        if self.options.precompute_float8_dynamic_scale_for_fsdp:
            precompute_scales(models)


def apply_float8(model: Decoder, options: Options, *, verbose: bool = False) -> None:
    """Convert the linear layers of ``model``, or of a stage of it, to float8, on the meta device, in place.

    ``verbose`` prints the model on rank 0.

    Raises:
        ConfigError: a layer is not a plain torch.nn.Linear.
    """
    config = replace(
        Float8LinearConfig.from_recipe_name(options.recipe_name or "tensorwise"), emulate=options.emulate
    )
    # Fused casts round differently from eager casts, so recomputed tensors would get other scales (torch
    # issue 150859).
    inductor_config.emulate_precision_casts = options.recipe_name == "rowwise"
    modules = dict(model.named_modules())
    for name in float8_layers(model.args, options):
        if name in modules:  # otherwise it is on another stage
            without = "add its name to that list"
            check_plain(name, modules[name], key=_FILTER, value=options.filter_fqns, without=without)
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, ShardedFloat8Linear(modules[name], config))
    if verbose and dist.get_rank() == 0:
        print(model, flush=True)


class ShardedFloat8Linear(nn.Linear):
    """Float8 replacement of ``linear`` with the same weight; its scales are those of the full matrices."""

    def __init__(self, linear: nn.Linear, config: Float8LinearConfig):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.config = config
        self.groups = (_NOT_SHARDED, _NOT_SHARDED, _NOT_SHARDED)
        """Names of the groups that shard T, K and N."""

    def forward(self, x: Tensor) -> Tensor:
        output = _Float8Matmul.apply(x, self.weight, self.config, self.groups)
        return output if self.bias is None else output + self.bias

    def reset_scale(self) -> None:
        """Discard the precomputed scale; the all-gather computes the scale until the next update."""
        if all_gather := _float8_all_gather(self):
            all_gather.scale = None


def connect(models: Iterable[Decoder], mesh: Mesh, options: Options) -> None:
    """Set the groups that shard the matrices of ``models``, and enable FSDP's float8 all-gather if
    configured."""
    tokens = _name(mesh.cp.get_group()) if mesh.cp else _NOT_SHARDED
    for layer in _layers(models):
        weight: Any = layer.weight
        inner = outer = _NOT_SHARDED
        if mesh.tp:
            sharded = weight.placements[weight.device_mesh.mesh_dim_names.index("tp")].dim
            inner, outer = (_name(mesh.tp.get_group()) if dim == sharded else _NOT_SHARDED for dim in (1, 0))
        layer.groups = (tokens, inner, outer)
        shards, tp = mesh.fsdp.size(-1), mesh.tp.size() if mesh.tp else 1
        if options.enable_fsdp_float8_all_gather and can_gather_in_float8(len(weight), shards=shards, tp=tp):
            groups = _name(mesh.fsdp.get_group(mesh.fsdp.ndim - 1)), inner or outer
            _Float8AllGather(weight, layer.config, groups)


def _layers(models: Iterable[Decoder]) -> list[ShardedFloat8Linear]:
    return [it for model in models for it in model.modules() if isinstance(it, ShardedFloat8Linear)]


def _name(group: dist.ProcessGroup) -> str:
    return group.group_name if group.size() > 1 else _NOT_SHARDED


# Casts


def _max_over_ranks(amax: Tensor, groups: Iterable[str]) -> Tensor:
    for group in filter(None, groups):
        amax = all_reduce(amax, "max", group)
    return amax


@cache
def _mm_config(config: Float8LinearConfig) -> LinearMMConfig:
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return LinearMMConfig(*(ScaledMMConfig(config.emulate, gemm.use_fast_accum) for gemm in gemms))


def _cast(
    matrix: Tensor,
    how: CastConfig,
    config: Float8LinearConfig,
    role: GemmInputRole,
    *,
    groups: tuple[str, str],
    along: int,
) -> Tensor:
    """Cast ``matrix`` (2-D) to float8, unless ``how`` disables it or it is float8 already.

    ``groups`` shard its dimensions. Rowwise scales reduce over the dimension ``along``, the inner dimension
    of the matmul.
    """
    if how.scaling_type is ScalingType.DISABLED or isinstance(matrix, Float8TrainingTensor):
        return matrix
    by_row = how.scaling_granularity is ScalingGranularity.AXISWISE
    dim = along if by_row else None
    amax = tensor_to_amax(matrix, scaling_granularity=how.scaling_granularity, axiswise_dim=dim)
    amax = _max_over_ranks(amax, [groups[along]] if by_row else groups)
    scale = amax_to_scale(amax, how.target_dtype, config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(matrix, scale, how.target_dtype, _mm_config(config), role, dim)


def _multiply(a: Tensor, b: Tensor, *, emulate: bool) -> Tensor:
    """Multiply two float8 matrices, or two of another dtype; emulation uses at least fp32."""
    if not (emulate and isinstance(a, Float8TrainingTensor) and isinstance(b, Float8TrainingTensor)):
        return torch.mm(a, b)
    precise = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a._data.to(precise) / a._scale, b._data.to(precise) / b._scale).to(a.dtype)


@torch.compiler.allow_in_graph
class _Float8Matmul(torch.autograd.Function):
    """x (…, K) times the transposed weight (N, K)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, config: Float8LinearConfig, groups: tuple[str, str, str]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config, ctx.groups = config, groups
        t, k, n = groups
        x_TK = _cast(
            x.flatten(0, -2), config.cast_config_input, config, GemmInputRole.INPUT, groups=(t, k), along=-1
        )
        w_NK = _cast(weight, config.cast_config_weight, config, GemmInputRole.WEIGHT, groups=(n, k), along=-1)
        return _multiply(x_TK, w_NK.t(), emulate=config.emulate).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        config, (t, k, n) = ctx.config, ctx.groups
        g = grad.flatten(0, -2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            how = config.cast_config_grad_output, config.cast_config_weight_for_grad_input
            g_TN = _cast(g, how[0], config, GemmInputRole.GRAD_OUTPUT, groups=(t, n), along=-1)
            w_NK = _cast(weight, how[1], config, GemmInputRole.WEIGHT, groups=(n, k), along=0)
            grad_x = _multiply(g_TN, w_NK, emulate=config.emulate).view(x.shape)
        if ctx.needs_input_grad[1]:
            how = config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight
            g_TN = _cast(g, how[0], config, GemmInputRole.GRAD_OUTPUT, groups=(t, n), along=0)
            x_TK = _cast(x.flatten(0, -2), how[1], config, GemmInputRole.INPUT, groups=(t, k), along=0)
            grad_weight = _multiply(g_TN.t(), x_TK, emulate=config.emulate)
        return grad_x, grad_weight, None, None


# All-gather


class _Float8AllGather:
    """Casts this rank's shard of ``weight``, a DTensor, so that FSDP2 gathers float8.

    This class's methods become FSDP2's all-gather extensions of the shard, which otherwise stays a plain
    tensor. ``groups`` shard the weight.
    """

    def __init__(self, weight: DTensor, config: Float8LinearConfig, groups: tuple[str, str]):
        self.shard = cast("Any", local(weight))
        self.config, self.groups = config, groups
        self.scale: Tensor | None = None
        self.shard.fsdp_pre_all_gather, self.shard.fsdp_post_all_gather = self.before, self.after

    @property
    def dtype(self) -> torch.dtype:
        return self.config.cast_config_weight.target_dtype

    def before(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """Return the bytes to gather, and the scale as metadata."""
        scale = self.scale
        if scale is None:
            scale = amax_to_scale(_max_over_ranks(tensor_to_amax(self.shard), self.groups), self.dtype)
        shard: Any = hp_tensor_and_scale_to_float8(self.shard, scale, self.dtype)
        return (shard._data.view(torch.uint8),), scale

    def after(
        self, gathered: tuple[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Return the weight from the gathered bytes; ``out``, if given, already contains them."""
        if out is not None:
            cast("Any", local_tensor(out) if isinstance(out, DTensor) else out)._scale = scale
            return None
        [data] = gathered
        role, mm_config = GemmInputRole.WEIGHT, _mm_config(self.config)
        return Float8TrainingTensor(data.view(self.dtype), scale, dtype, mm_config, role), (data,)


def _float8_all_gather(layer: ShardedFloat8Linear) -> _Float8AllGather | None:
    before = getattr(local(layer.weight), "fsdp_pre_all_gather", None)
    return before.__self__ if before else None


@torch.no_grad()
def precompute_scales(models: Iterable[Decoder]) -> None:
    """Compute the scales of all weights gathered in float8, after each update, with one collective."""
    found = [it for layer in _layers(models) if (it := _float8_all_gather(layer))]
    if found:
        amax = _max_over_ranks(torch.stack([tensor_to_amax(it.shard) for it in found]), found[0].groups)
        for it, scale in zip(found, amax_to_scale(amax, found[0].dtype), strict=True):
            it.scale = scale
