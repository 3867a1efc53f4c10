"""LoRA of experts in PEFT folders: names and shapes. Imports no torch.

transformers 5 stacks and fuses a layer's experts in memory: ``gate_up_proj`` (E, 2F, D), gate above up, and
``down_proj`` (E, D, F). PEFT updates such a parameter by ``target_parameters``, with one A and one B for each
expert: A as (E·R, in), whose rows are sorted by expert, and B as (out, R·E), whose columns are sorted by rank
and then by expert. Gate and up share A there; here w1 and w3 have an A each.

- Export is exact. gate_up_proj gets rank 2R: w1's A above w3's, and a block-diagonal B; rank_pattern and
  alpha_pattern keep the scale. If only w1 or w3 is adapted, the blocks of the other are 0.
- Import of rank R is exact: w1 and w3 get copies of A, and their halves of B. Training then continues with
  two As, so it takes other steps than PEFT's, in which they stay equal.
- Import of an export, with rank 2R for gate_up_proj, is exact if B is still block-diagonal; otherwise the
  folder is rejected, because rank R cannot express it.
- Fused checkpoints store transposed matrices. If their outputs alternate, so do the rows of B. If PEFT takes
  their inputs for outputs, its A is our B, transposed, and its B our A.
- Import of PEFT's own rank 2R, which it chooses if gate_proj and up_proj are targets (as in all-linear), is
  exact: all updates get rank 2R, those of rank R padded with zeros, at the same scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.finetune import LoRA
from toolkit.finetune.parameters import added_name
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import ParameterRow
from toolkit.models.parameters import adaptable

Shape = tuple[int, ...]
GATE_UP = "gate_up_proj"
_WEIGHTS = {"down_proj": ("w2",), GATE_UP: ("w1", "w3")}
"""Our weights in each of transformers' parameters, whose wrappers PEFT nests in this order."""
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


@dataclass(frozen=True)
class FusedExperts:
    """A parameter of transformers that PEFT updates.

    Attributes:
        parameter: its name, such as model.layers.0.mlp.experts.down_proj.
        module: prefix of its tensors in a folder, without PEFT's own prefix.
        rows: our weights in it, in order.
        adapted: names of those that are adapted.
        blocks: whether A and B consist of a block for each of ``rows``, of rank R each; otherwise they share
            A.
    """

    parameter: str
    module: str
    rows: tuple[ParameterRow, ...]
    adapted: frozenset[str]
    blocks: bool

    @property
    def names(self) -> dict[str, tuple[ParameterRow, str]]:
        """Names of our parameters, with their weight and part."""
        return {
            added_name(row, part): (row, part)
            for row in self.rows
            for part in _PARTS
            if row.name in self.adapted
        }

    @property
    def swapped(self) -> bool:
        """True if PEFT's A is our B, and its B our A."""
        return any(row.fused is not None and row.fused.peft_swaps for row in self.rows)

    @property
    def interleaved(self) -> bool:
        """True if the outputs of ``rows`` alternate."""
        return any(row.fused is not None and row.fused.interleaved for row in self.rows)

    def key(self, part: str) -> str:
        """Return the name of the tensor of ``part``, lora_a or lora_b."""
        other = {"lora_a": "lora_b", "lora_b": "lora_a"}
        return f"{self.module}.{_PARTS[other[part] if self.swapped else part]}"

    def our_shape(self, part: str, found: Shape) -> Shape:
        """Return the shape of our ``part`` of each weight for PEFT's shape; ``found`` if it does not fit."""
        if len(found) != 2:
            return found
        experts, weights = self.rows[0].experts, len(self.rows)
        parts = weights if self.blocks else 1
        ranks, size = found if (part == "lora_a") != self.swapped else found[::-1]
        outs = weights if part == "lora_b" else 1
        if ranks % (experts * parts) or size % outs:
            return found
        rank = ranks // (experts * parts)
        return (experts, rank, size) if part == "lora_a" else (experts, size // outs, rank)


def fused_experts(args: ModelArgs, targets: Collection[str], *, blocks: bool = True) -> list[FusedExperts]:
    """Return the parameters of transformers that contain the adapted experts among ``targets``."""
    rows = {name: row for name, row in adaptable(args).items() if row.experts}
    found = []
    for module in dict.fromkeys(name.rpartition(".")[0] for name in rows):
        row = rows[f"{module}.w1"]
        prefix = container = f"model.layers.{row.block}.mlp.experts"
        if row.fused:
            prefix = container = row.hf.rpartition(".")[0]
        for parameter, weights in _WEIGHTS.items():
            names = [f"{module}.{weight}" for weight in weights]
            if adapted := frozenset(names) & frozenset(targets):
                its_rows = tuple(rows[name] for name in names)
                found.append(
                    FusedExperts(f"{container}.{parameter}", prefix, its_rows, adapted, blocks)
                )  # fmt: skip
                prefix += ".base_layer"
    return found


def targeted_experts(args: ModelArgs, parameters: object) -> set[str]:
    """Return our names of the experts' weights that PEFT's ``target_parameters`` select."""
    listed = [it for it in parameters if isinstance(it, str)] if isinstance(parameters, list) else []
    experts = {name for name, row in adaptable(args).items() if row.experts}
    return {
        row.name
        for fused in fused_experts(args, experts)
        for row in fused.rows
        if any(f".{fused.parameter}".endswith(f".{it}") for it in listed)
    }


def block_patterns(lora: LoRA) -> dict[str, dict[str, float]]:
    """Return PEFT's patterns of rank and alpha for gate_up_proj in blocks."""
    alpha = lora.alpha * alpha_factor(use_rslora=lora.use_rslora)
    return {"rank_pattern": {GATE_UP: 2 * lora.rank}, "alpha_pattern": {GATE_UP: alpha}}


def alpha_factor(*, use_rslora: object) -> float:
    """Return the factor of alpha that keeps the scale of an update with twice the rank."""
    return 2**0.5 if use_rslora else 2.0


def doubled_rank(values: Mapping[str, Any]) -> str | None:
    """Return the name in the patterns of an adapter_config.json that only double the rank of gate_up_proj, at
    the same scale: gate_up_proj after an export, another if PEFT fused the targets gate_proj and up_proj."""
    names = []
    for key, factor in (("rank", 2), ("alpha", alpha_factor(use_rslora=values.get("use_rslora")))):
        pattern, plain = values.get(f"{key}_pattern"), values.get("r" if key == "rank" else "lora_alpha")
        if not isinstance(pattern, dict) or len(pattern) != 1 or not isinstance(plain, int | float):
            return None
        [(name, value)] = pattern.items()
        if not isinstance(value, int | float) or not abs(value - factor * plain) <= 1e-6 * abs(value):
            return None
        names.append(name)
    return names[0] if names[0] == names[1] and names[0].endswith(GATE_UP) else None
