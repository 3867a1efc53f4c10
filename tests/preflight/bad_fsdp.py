"""Runs that break the rules of ``rules.fsdp``."""

from __future__ import annotations

from tests.preflight.bad_runs import CP, PP, REPLICATE, SHARD, TP, Bad, bad

STRATEGY = "parallelism.sharding_strategy"
RESHARD = "parallelism.fsdp_reshard_after_forward"
POLICY = "parallelism.fsdp_wrap_policy"
CLASSES = "parallelism.fsdp_wrap_classes"
MIN_PARAMS = "parallelism.fsdp_min_num_params"
DEGREES, RESHARDING = "strategy_has_its_degrees", "strategy_has_its_resharding"


def _class(name: str, *says: str, flags: str = "") -> Bad:
    return bad("wrap_classes_exist", f"{CLASSES}={name} {POLICY}=class {flags}", *says)


CASES: list[Bad] = [
    bad(DEGREES, f"{REPLICATE}=2 {STRATEGY}=FULL_SHARD", "no replicas", '"HYBRID_SHARD"', world=4),
    bad(DEGREES, f"{REPLICATE}=2 {STRATEGY}=2", "no replicas", '"HYBRID_SHARD_ZERO2"', world=4),
    bad(DEGREES, f"{STRATEGY}=HYBRID_SHARD", f"set {REPLICATE} to", '"FULL_SHARD"', world=4),
    bad(DEGREES, f"{STRATEGY}=5", "number of nodes", '"SHARD_GRAD_OP"', world=4),
    bad(DEGREES, f"{SHARD}=4 {STRATEGY}=NO_SHARD", "all parameters", '"FULL_SHARD"', world=4),
    bad(DEGREES, f"{REPLICATE}=2 {STRATEGY}=3", "each of the 4", '"HYBRID_SHARD"', world=4),
    bad(RESHARDING, f"{RESHARD}=always {STRATEGY}=SHARD_GRAD_OP", "keeps", '"FULL_SHARD"', world=4),
    bad(RESHARDING, f"{RESHARD}=2 {STRATEGY}=SHARD_GRAD_OP", "keeps", '"FULL_SHARD"', world=4),
    bad(RESHARDING, f"{RESHARD}=never {STRATEGY}=1", "FULL_SHARD frees", '"SHARD_GRAD_OP"', world=4),
    bad(
        RESHARDING,
        f"{RESHARD}=never {STRATEGY}=HYBRID_SHARD {REPLICATE}=2",
        "HYBRID_SHARD frees",
        '"HYBRID_SHARD_ZERO2"',
        world=4,
    ),
    bad(RESHARDING, f"{RESHARD}=never {STRATEGY}=NO_SHARD", "a second copy", "remove it", world=4),
    bad("reshard_size_divides", f"{RESHARD}=3", "which is 8", '"always", or one of 2, 4', world=8),
    bad("reshard_size_divides", f"{RESHARD}=4 {REPLICATE}=2", "the shard group, 4 ranks", world=8),
    bad("reshard_size_divides", f"{RESHARD}=8 {CP}=2", "the shard group, 8 ranks", "one of 2, 4", world=8),
    bad("reshard_size_divides", f"{RESHARD}=3 {CP}=2", "dp_shard × cp, which is 4", world=4),
    bad("reshard_size_divides", f"{RESHARD}=2", "which is 1", 'set it to "always"', world=1),
    bad("reshard_size_has_its_groups", f"{RESHARD}=2 {PP}=2", "not with pp", '"always" or "never"', world=8),
    bad("reshard_size_has_its_groups", f"{RESHARD}=2 {PP}=2 {TP}=2", "not with pp and tp", world=16),
    bad("options_act", "training.enable_cpu_offload", "has no effect without a GPU", "remove it"),
    bad("options_act", f"{CLASSES}=Attention", 'policy = "block"', 'policy = "class"'),
    bad("options_act", f"{MIN_PARAMS}=10 {POLICY}=class", 'policy = "class"', '"size"'),
    _class(
        "BertLayer",
        "BertLayer is not one of",
        "supported classes: TransformerBlock, ",
        "did you mean TransformerBlock?",
    ),
    _class("LlamaDecoderLayer", "did you mean TransformerBlock?"),
    _class("GPT2Block", "did you mean TransformerBlock?"),
    _class("LlamaSdpaAttention,LlamaMLP", "mean Attention?", "mean FeedForward?"),
    _class("transformerblock", "did you mean TransformerBlock?"),
    _class("Llama4TextExperts", "use one of these"),
    _class("[]", "one unit", '["TransformerBlock"]'),
    _class("OutputHead", "stays in the root", "remove OutputHead", flags="model.name=llama3.2"),
    bad(
        "compiled_blocks_are_whole",
        f"{CLASSES}=TransformerBlock,Attention,Linear {POLICY}=class compile.enable",
        "Attention and Linear",
        '"block"',
    ),
    # The feed-forward of a debugmodel has 3 · 256 · 768 = 589,824 parameters, its attention 262,144.
    bad(
        "compiled_blocks_are_whole",
        f"{MIN_PARAMS}=589824 {POLICY}=size compile.enable",
        "inside blocks",
        "at least 589825",
    ),
]
