from dataclasses import replace
from toolkit.extensions import register_family
from toolkit.models.common.args import MoEArgs
from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.parameter_table import expert_block
from toolkit.models.common.spec import ModelSpec
from toolkit.models.registry import resolve
class F(ModelSpec):
    def block(self, args, layer): return expert_block(args, layer)
    def hf_config(self): return HFConfig("tmoe","TmoeForCausalLM","a Tmoe",2048)
S=replace(resolve("llama3.1","debugmodel"),rope_scaling=None,family="tmoe",moe=MoEArgs(8,2,12,num_shared_experts=1,expert_bias=True,first_dense=1,route_norm=True))
register_family("tmoe",F({"tmoe":{"debugmodel":S}}))
