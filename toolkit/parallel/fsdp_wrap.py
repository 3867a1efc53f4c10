"""Other FSDP units than a model's own: modules of some classes, or of some size."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from toolkit.config.parallelism import Parallelism
from toolkit.distributed.dtensor import WRAPPER_PREFIXES
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.fsdp import root_modules


def wrapped_units(model: Decoder, parallelism: Parallelism) -> list[list[nn.Module]]:
    """Units of one module each, in forward order; a module inside another comes after it.

    By ``fsdp_wrap_policy``: "class" makes one of each module of ``fsdp_wrap_classes``, "size" of each with
    ``fsdp_min_num_params`` parameters that are in no smaller unit.

    A module that activation checkpointing or torch.compile has wrapped is a unit with its wrapper.
    """
    kept = root_modules(model)
    if parallelism.fsdp_wrap_policy == "class":
        units = modules_of_class(model, parallelism.fsdp_wrap_classes, kept)
    else:
        units = modules_of_size(model, parallelism.fsdp_min_num_params, kept)
    return [[unit] for unit in units]


def modules_of_class(
    root: nn.Module, classes: Container[str], kept: Container[nn.Module] = ()
) -> list[nn.Module]:
    """Modules below ``root`` whose class, or one that it is made from, has one of these names, less ``kept``
    and the empty ones."""
    return [
        outermost
        for outermost, module in _below(root)
        if any(kind.__name__ in classes for kind in type(module).__mro__)
        and module not in kept
        and next(module.parameters(), None) is not None
    ]


def modules_of_size(root: nn.Module, min_params: int, kept: Container[nn.Module] = ()) -> list[nn.Module]:
    """FSDP1's ``size_based_auto_wrap_policy``, from the inside out: a module below ``root`` is a unit
    where those of its parameters that are in no unit inside it are at least ``min_params``. A ModuleList
    or ModuleDict has no forward and never is one.
    """
    units: list[nn.Module] = []
    for child in root.children():
        units += _of_size(child, min_params, kept)[0]
    return units


def _of_size(
    outermost: nn.Module, min_params: int, kept: Container[nn.Module]
) -> tuple[list[nn.Module], int]:
    """The units in a module and how many parameters they hold."""
    module = _unwrapped(outermost)
    if module in kept:
        return [], 0
    units: list[nn.Module] = []
    held = 0
    for child in module.children():
        inner, count = _of_size(child, min_params, kept)
        units += inner
        held += count
    total = sum(parameter.numel() for parameter in module.parameters())
    if total - held >= min_params and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [outermost, *units], total
    return units, held


def _below(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module below ``root`` with its outermost wrapper before it, in the order of registration."""
    for outermost in root.children():
        module = _unwrapped(outermost)
        yield outermost, module
        yield from _below(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if f"{name}." in WRAPPER_PREFIXES:
            return _unwrapped(child)
    return module
