"""The description of a family of models that the toolkit reads. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.state_dict_adapter import StateDictAdapter


@dataclass(frozen=True)
class ModelSpec:
    """A family: the sizes of its models, and its form at Hugging Face.

    Attributes:
        sizes: shapes by ``model.name`` and ``model.flavor``.
        ffn_rule: for a name and a flavor, the feed-forward width that follows from another ``model.dim``;
            None keeps the width.
        hf_config: config.json.
        adapter: names of tensors, and the order of their rows.
        has_meta_files: Meta publishes the family as params.json and consolidated.*.pth.
    """

    sizes: Mapping[str, Mapping[str, ModelArgs]]
    hf_config: HFConfig
    adapter: StateDictAdapter
    has_meta_files: bool = False
    ffn_rule: Callable[[str, str], Callable[[int], int] | None] = lambda name, flavor: None
