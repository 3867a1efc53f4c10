"""The experts in config.json of a Mixtral. Imports no torch."""

from __future__ import annotations

from toolkit.io.json_fields import Fields
from toolkit.models.common.args import MoEArgs
from toolkit.models.common.hf_config import HFConfig


class MixtralConfig(HFConfig):
    """A config.json with experts of the width intermediate_size, whose chosen scores always sum to 1."""

    def read_moe(self, fields: Fields) -> MoEArgs:
        experts, top_k = self.read_choice(fields, "num_local_experts", 8, 2)
        if fields.values.get("router_jitter_noise", 0) != 0:
            fields.reject("router_jitter_noise", "must be 0: noise in the router's input is not supported")
        return MoEArgs(experts, top_k, fields.count("intermediate_size"), route_norm=True)
