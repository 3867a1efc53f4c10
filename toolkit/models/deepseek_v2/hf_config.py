"""Fields of DeepSeek-V2's config.json with fixed values. Imports no torch."""

from __future__ import annotations

from typing import Any

from toolkit.io.json_fields import Fields
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.common.mla_config import MLAConfig

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


class DeepSeekV2Config(MLAConfig):
    """A config.json with softmax scores that are not normalized over the chosen experts."""

    @property
    def fixed(self) -> dict[str, Any]:
        return {"moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"}

    def read_moe(self, fields: Fields) -> MoEArgs:
        method = fields.values.get("topk_method", _GREEDY)
        if method not in (_GREEDY, _LIMITED):
            fields.reject("topk_method", f'must be "{_GREEDY}" or "{_LIMITED}"')
        if method == _GREEDY:  # which ignores groups
            fields.values.update(n_group=1, topk_group=1)
        fields.count("num_experts_per_tok")  # which has no default
        return super().read_moe(fields)

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        method = _LIMITED if moe.num_expert_groups else _GREEDY
        return super().write_moe(args, moe) | {"topk_method": method}
