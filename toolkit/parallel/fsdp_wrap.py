"""FSDP wrap policies: units by module class or by size."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from toolkit.config.parallelism import Parallelism
from toolkit.distributed.dtensor import WRAPPER_PREFIXES
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.fsdp import root_modules


def wrapped_units(model: Decoder, parallelism: Parallelism) -> list[list[nn.Module]]:
    """Return units of one module each, in forward order; a nested module comes after the outer one.

    ``fsdp_wrap_policy`` "class" makes each module of ``fsdp_wrap_classes`` a unit, "size" each module with
    ``fsdp_min_num_params`` parameters that are in no smaller unit. A module wrapped by activation
    checkpointing or torch.compile is a unit together with its wrapper.
    """
    excluded = root_modules(model)
    if parallelism.fsdp_wrap_policy == "class":
        units = modules_of_class(model, parallelism.fsdp_wrap_classes, excluded)
    else:
        units = modules_of_size(model, parallelism.fsdp_min_num_params, excluded)
    return [[unit] for unit in units]


def modules_of_class(
    root: nn.Module, classes: Container[str], excluded: Container[nn.Module] = ()
) -> list[nn.Module]:
    """Return modules below ``root`` of these class names, or of a subclass, with parameters, without
    ``excluded``."""
    return [
        outermost
        for outermost, module in _below(root)
        if any(kind.__name__ in classes for kind in type(module).__mro__)
        and module not in excluded
        and next(module.parameters(), None) is not None
    ]


def modules_of_size(root: nn.Module, min_params: int, excluded: Container[nn.Module] = ()) -> list[nn.Module]:
    """Return units as FSDP1's ``size_based_auto_wrap_policy`` does, from the inside out: a module below
    ``root`` is a unit if it has at least ``min_params`` parameters outside its nested units. A ModuleList or
    ModuleDict has no forward and is never a unit.
    """
    units: list[nn.Module] = []
    for child in root.children():
        units += _of_size(child, min_params, excluded)[0]
    return units


def _of_size(
    outermost: nn.Module, min_params: int, excluded: Container[nn.Module]
) -> tuple[list[nn.Module], int]:
    """Return the units in a module and their number of parameters."""
    module = _unwrapped(outermost)
    if module in excluded:
        return [], 0
    units: list[nn.Module] = []
    wrapped = 0
    for child in module.children():
        inner, count = _of_size(child, min_params, excluded)
        units += inner
        wrapped += count
    total = sum(parameter.numel() for parameter in module.parameters())
    if total - wrapped >= min_params and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [outermost, *units], total
    return units, wrapped


def _below(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the outermost wrapper of each module below ``root``, and the module, in the order of
    registration."""
    for outermost in root.children():
        module = _unwrapped(outermost)
        yield outermost, module
        yield from _below(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if f"{name}." in WRAPPER_PREFIXES:
            return _unwrapped(child)
    return module
