"""Load of the experts over the global batch: its metrics, and the biases that balance it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config.training import MoE as Options
from toolkit.distributed import collectives
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import LOAD, MoE, RouterLosses, shares
from toolkit.parallel.mesh import Mesh

NAMES = ("moe/max_load", "moe/load_entropy")
"""Metrics: the load of the layer and expert with the most choices, over the mean load; and the entropy of the
choices divided by that of equal loads, the least of any layer."""


class ExpertLoad:
    """Counts the choices of each expert in a step, and sets up the losses of routers. ``models`` are this
    rank's stages.

    Attributes:
        losses: the losses of each layer's router.
        names: names of :meth:`metrics`.
        of_mean: loads of the last step (layers, E), divided by the mean of their layer.
    """

    names = NAMES

    def __init__(self, models: Sequence[Decoder], mesh: Mesh, options: Options, *, balanced: bool = False):
        args = models[0].args
        assert args.moe is not None
        layers = [str(layer) for layer in range(args.n_layers) if args.moe.has_experts(layer)]
        self.rows = {layer: row for row, layer in enumerate(layers)}
        self.experts = args.moe.num_experts
        self.of_mean = torch.ones(len(layers), self.experts)
        self.models, self.options = models, options
        self.one_stage = mesh.pp is None
        per_sequence = options.aux_loss_scope == "sequence"
        names = _sequence_groups(mesh) if per_sequence else [_world()]
        add = partial(_add_counts, groups=names)
        self.losses = RouterLosses(options.aux_loss_coeff, options.z_loss_coeff, per_sequence, add)
        for _, moe in self._moes():
            moe.router.force_load_balance = balanced
            moe.losses = replace(self.losses) if self.losses.names else None

    @property
    def needs_pass(self) -> bool:
        """Return whether the balancing loss needs the loads of the global batch before a step with several
        micro-batches."""
        return self.options.aux_loss_coeff > 0 and self.options.aux_loss_scope == "global_batch"

    def take(self, device: torch.device) -> Tensor:
        """Remove this rank's counts from its models. Returns (layers, E), fp64."""
        counts = torch.zeros(len(self.rows), self.experts, dtype=torch.float64, device=device)
        for model in self.models:
            per_layer = model.block_sums.per_layer
            for layer, row in self.rows.items():
                if (LOAD, layer) in per_layer:
                    counts[row] += per_layer.pop((LOAD, layer))
        return counts

    def set_shares(self, counts: Tensor | None) -> None:
        """Set the shares in the balancing losses to those of global ``counts`` (layers, E); None lets each
        layer count its own micro-batch."""
        for layer, moe in self._moes():
            assert moe.losses is not None
            moe.losses.shares_E = None if counts is None else shares(counts[self.rows[layer]])

    def metrics(self, counts: Tensor) -> Tensor:
        """Return the values of :data:`NAMES`, (2,) fp64, for global ``counts`` (layers, E)."""
        self.of_mean = of_mean = shares(counts)
        probabilities = of_mean / self.experts
        entropy = torch.special.entr(probabilities).sum(-1) / math.log(max(self.experts, 2))
        return torch.stack([of_mean.max(), entropy.min()])

    @torch.no_grad()
    def update_biases(self, counts: Tensor) -> None:
        """Raise the bias of experts with fewer choices than the mean and lower that of others."""
        step = self.options.load_balance_coeff
        for layer, moe in self._moes():
            if moe.expert_bias is not None and step:
                counts_E = counts[self.rows[layer]]
                change_E = step * (counts_E.mean() - counts_E).sign()
                moe.expert_bias.add_((change_E - change_E.mean()).to(moe.expert_bias.dtype))

    def _moes(self) -> list[tuple[str, MoE]]:
        return [
            (name, module)
            for model in self.models
            for name, block in model.layers.items()
            for module in block.modules()
            if isinstance(module, MoE)
        ]


def _world() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def _sequence_groups(mesh: Mesh) -> list[str]:
    """Return the names of the groups of ranks whose routers see parts of the same sequences."""
    meshes = [mesh.cp, mesh.tp if mesh.ep and not mesh.ep_etp else None]
    return [it.get_group().group_name for it in meshes if it is not None]


def _add_counts(counts: Tensor, *, groups: Sequence[str]) -> Tensor:
    for group in groups:
        counts = collectives.all_reduce(counts, "sum", group)
    return counts
