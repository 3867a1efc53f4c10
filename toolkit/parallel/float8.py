"""float8: matmuls of linear layers with operands of 8 bits (Micikevicius et al. 2022, arXiv:2209.05433).

The operands of the three products of a layer, in forward and backward, are cast as they are used, with a
scale that takes the largest magnitude of a matrix ("tensorwise") or of each of its rows ("rowwise") to the
largest of float8. Weights, gradients and the optimizer's state stay as they are. Recipes, casts and kernels
are torchao's. Shapes: T tokens of a micro-batch, K features that come in, N that go out.

A matrix that tensor or context parallelism has cut has the scales of the whole: magnitudes are compared over
its ranks, so that a layer computes what it does on one. Not over those that have other samples: scales are
those of a micro-batch.
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
from toolkit.parallel.float8_layers import float8_layers, gathered_in_float8
from toolkit.parallel.mesh import Mesh

logging.disable(logging.WARNING)  # torchao warns of kernels of its own that it cannot load; none is used here
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
    # Inductor of torch 2.14 and Triton's transposed stores of float8 give NaN together (triton issue 11111).
    # torchao undoes inductor's part in convert_to_float8_training, which is not called here.
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen as avoid_triton_nan
except ImportError:  # a torchao that needs no such patch

    def avoid_triton_nan() -> None:
        """Do nothing."""


_FILTER = "quantize.linear.float8.filter_fqns"
_WHOLE = ""
"""In place of the name of a group: the dimension is not cut."""


class Float8Converter:
    """The converter of a configuration (:class:`toolkit.parallel.converters.Converters`)."""

    def __init__(self, config: Config):
        self.options, self.tell = config.quantize.linear.float8, config.model.print_after_conversion
        if config.compile.enable:
            avoid_triton_nan()

    def convert(self, model: Decoder) -> None:
        """Have linear layers compute in float8."""
        apply_float8(model, self.options, tell=self.tell)

    def connect(self, models: Iterable[Decoder], mesh: Mesh) -> None:
        """Tell the layers over which ranks matrices are cut."""
        connect(models, mesh, self.options)

    def post_optimizer_hook(self, models: Iterable[Decoder]) -> None:
        """Make the scales of the next forward, where they are made ahead."""
        if self.options.precompute_float8_dynamic_scale_for_fsdp:
            precompute_scales(models)


def apply_float8(model: Decoder, options: Options, *, tell: bool = False) -> None:
    """Have the linear layers of ``model``, or of a stage of it, on the meta device, compute in float8, in
    place; ``tell`` prints the model from rank 0.

    Raises:
        ConfigError: one of them is no plain linear layer.
    """
    config = replace(
        Float8LinearConfig.from_recipe_name(options.recipe_name or "tensorwise"), emulate=options.emulate
    )
    # Fused casts would round other than eager ones, and scales of what is computed again be others (torch
    # issue 150859).
    inductor_config.emulate_precision_casts = options.recipe_name == "rowwise"
    modules = dict(model.named_modules())
    for name in float8_layers(model.args, options):
        if name in modules:  # else another stage has it
            without = "name it there"
            check_plain(name, modules[name], key=_FILTER, value=options.filter_fqns, without=without)
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, Float8Linear(modules[name], config))
    if tell and dist.get_rank() == 0:
        print(model, flush=True)


class Float8Linear(nn.Linear):
    """Takes the place of ``linear``, whose weight it keeps."""

    def __init__(self, linear: nn.Linear, config: Float8LinearConfig):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.config = config
        self.groups = (_WHOLE, _WHOLE, _WHOLE)
        """Names of the groups whose ranks have parts of T, K and N."""

    def forward(self, x: Tensor) -> Tensor:
        product = _Product.apply(x, self.weight, self.config, self.groups)
        return product if self.bias is None else product + self.bias

    def forget_scale(self) -> None:
        """Until the next update find the scale of the weight as it is gathered, not that made ahead."""
        if gathered := _gathered(self):
            gathered.scale = None


def connect(models: Iterable[Decoder], mesh: Mesh, options: Options) -> None:
    """Tell the layers of sharded ``models`` over which ranks matrices are cut, and FSDP to gather weights in
    float8 if ``options`` say so."""
    tokens = _name(mesh.cp.get_group()) if mesh.cp else _WHOLE
    for layer in _layers(models):
        weight: Any = layer.weight
        inner = outer = _WHOLE
        if mesh.tp:
            cut = weight.placements[weight.device_mesh.mesh_dim_names.index("tp")].dim
            inner, outer = (_name(mesh.tp.get_group()) if dim == cut else _WHOLE for dim in (1, 0))
        layer.groups = (tokens, inner, outer)
        shards, tp = mesh.fsdp.size(-1), mesh.tp.size() if mesh.tp else 1
        if options.enable_fsdp_float8_all_gather and gathered_in_float8(len(weight), shards=shards, tp=tp):
            _Gathered(weight, layer.config, (_name(mesh.fsdp.get_group(mesh.fsdp.ndim - 1)), inner or outer))


def _layers(models: Iterable[Decoder]) -> list[Float8Linear]:
    return [it for model in models for it in model.modules() if isinstance(it, Float8Linear)]


def _name(group: dist.ProcessGroup) -> str:
    return group.group_name if group.size() > 1 else _WHOLE


# Casts


def _largest(amax: Tensor, groups: Iterable[str]) -> Tensor:
    """The largest of each over the ranks of ``groups``."""
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
    """``matrix`` (2-D) in float8, or as it is where ``how`` says so or it is in float8 already. Its
    dimensions are cut over ``groups``; scales of rows are of what is multiplied ``along`` one of them."""
    if how.scaling_type is ScalingType.DISABLED or isinstance(matrix, Float8TrainingTensor):
        return matrix
    by_row = how.scaling_granularity is ScalingGranularity.AXISWISE
    dim = along if by_row else None
    amax = tensor_to_amax(matrix, scaling_granularity=how.scaling_granularity, axiswise_dim=dim)
    amax = _largest(amax, [groups[along]] if by_row else groups)
    scale = amax_to_scale(amax, how.target_dtype, config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(matrix, scale, how.target_dtype, _mm_config(config), role, dim)


def _multiply(a: Tensor, b: Tensor, *, emulate: bool) -> Tensor:
    """a b, of two matrices in float8 or of two others; emulated in at least fp32."""
    if not (emulate and isinstance(a, Float8TrainingTensor) and isinstance(b, Float8TrainingTensor)):
        return torch.mm(a, b)
    precise = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a._data.to(precise) / a._scale, b._data.to(precise) / b._scale).to(a.dtype)


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """x (…, K) times the weight (N, K), transposed."""

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


# Gathering


class _Gathered:
    """Casts this rank's part of ``weight``, a DTensor, before FSDP2 gathers it, which then gathers bytes.

    Its methods become the extensions of FSDP2 on the part, which stays a plain tensor for all others;
    ``groups`` are those whose ranks have the other parts.
    """

    def __init__(self, weight: DTensor, config: Float8LinearConfig, groups: tuple[str, str]):
        self.part = cast("Any", local(weight))
        self.config, self.groups = config, groups
        self.scale: Tensor | None = None
        self.part.fsdp_pre_all_gather, self.part.fsdp_post_all_gather = self.before, self.after

    @property
    def dtype(self) -> torch.dtype:
        return self.config.cast_config_weight.target_dtype

    def before(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """The bytes to be gathered, and what is kept beside them."""
        scale = self.scale
        if scale is None:
            scale = amax_to_scale(_largest(tensor_to_amax(self.part), self.groups), self.dtype)
        numbers: Any = hp_tensor_and_scale_to_float8(self.part, scale, self.dtype)
        return (numbers._data.view(torch.uint8),), scale

    def after(
        self, gathered: tuple[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The weight of the bytes; ``out`` is one whose bytes they have become already."""
        if out is not None:
            cast("Any", local_tensor(out) if isinstance(out, DTensor) else out)._scale = scale
            return None
        [data] = gathered
        role, mm_config = GemmInputRole.WEIGHT, _mm_config(self.config)
        return Float8TrainingTensor(data.view(self.dtype), scale, dtype, mm_config, role), (data,)


def _gathered(layer: Float8Linear) -> _Gathered | None:
    """The cast of the weight of ``layer`` before it is gathered, if it is gathered in float8."""
    before = getattr(local(layer.weight), "fsdp_pre_all_gather", None)
    return before.__self__ if before else None


@torch.no_grad()
def precompute_scales(models: Iterable[Decoder]) -> None:
    """Find the scales of all weights that are gathered in float8 at once. To be called after each update."""
    found = [gathered for layer in _layers(models) if (gathered := _gathered(layer))]
    if found:
        amax = _largest(torch.stack([tensor_to_amax(it.part) for it in found]), found[0].groups)
        for it, scale in zip(found, amax_to_scale(amax, found[0].dtype), strict=True):
            it.scale = scale
