"""Fields of DeepSeek-V3's config.json with fixed values. Imports no torch."""

from __future__ import annotations

from typing import Any

from toolkit.models.common.mla_config import MLAConfig


class DeepSeekV3Config(MLAConfig):
    """A config.json with sigmoid scores and biases. Multi-token prediction layers are not written."""

    @property
    def fixed(self) -> dict[str, Any]:
        return {
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
