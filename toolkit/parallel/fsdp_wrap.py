"""FSDP wrap policies: units by module class or by size."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from toolkit.config.parallelism import Parallelism
from toolkit.distributed.dtensor import WRAPPER_PREFIXES
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.fsdp import root_modules


def wrapped_units(model: Decoder, parallelism: Parallelism) -> list[list[nn.Module]]:
    """Return units of one module each, in forward order; nested modules follow their outer module.

    ``fsdp_wrap_policy`` "class" makes each module of ``fsdp_wrap_classes`` a unit; "size" makes a unit of
    each module with at least ``fsdp_min_num_params`` parameters outside smaller units. The wrapper of
    activation checkpointing or torch.compile belongs to the unit of its module.
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
    """Return the modules below ``root`` with parameters that are instances of these classes or of subclasses,
    except ``excluded``."""
    return [
        outermost
        for outermost, module in _below(root)
        if any(kind.__name__ in classes for kind in type(module).__mro__)
        and module not in excluded
        and next(module.parameters(), None) is not None
    ]


def modules_of_size(root: nn.Module, min_params: int, excluded: Container[nn.Module] = ()) -> list[nn.Module]:
    """Return units like FSDP1's ``size_based_auto_wrap_policy``, innermost first.

    A module below ``root`` is a unit if it has at least ``min_params`` parameters outside its nested units.
    ModuleLists and ModuleDicts have no forward and are never units.
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
    """Yield (outermost wrapper, module) for each module below ``root``, in registration order."""
    for outermost in root.children():
        module = _unwrapped(outermost)
        yield outermost, module
        yield from _below(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if f"{name}." in WRAPPER_PREFIXES:
            return _unwrapped(child)
    return module
