"""Runs that break the rules of ``rules.experts``, and keys that need a model with experts."""

from __future__ import annotations

from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.preflight.bad_runs import SHARD, TP, Bad, bad

EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"
EXPERTS = "model.name=experts"  # 8 of width 12, one shared, with a bias
NO_BIAS = "model.name=qwen3_moe"
DENSE = "no effect without a model with experts"

CASES: list[Bad] = [
    bad(
        "expert_parallel_divides",
        f"{EP}=3 {EXPERTS}",
        "must divide the number of experts, which is 8, and dp_shard × cp × tp, which is 4",
        f"set {EP} to 1, 2 or 4",
        world=4,
    ),
    bad(
        "expert_parallel_divides", f"{EP}=4 {EXPERTS}", "must divide dp_shard × cp × tp, which is 2", world=2
    ),
    # Replicas have the same experts.
    bad(
        "expert_parallel_divides",
        f"{EP}=4 {SHARD}=2 parallelism.data_parallel_replicate_degree=2 {EXPERTS}",
        "dp_shard × cp × tp, which is 2",
        f"set {EP} to 1 or 2",
        world=4,
    ),
    bad(
        "expert_parallel_divides",
        f"{EP}=16 {EXPERTS}",
        "must divide the number of experts, which is 8",
        f"set {EP} to 1, 2, 4 or 8",
        world=16,
    ),
    bad(
        "expert_parallel_divides",
        f"{EP}=4 {ETP}=2 {TP}=2 {EXPERTS}",
        f"dp_shard × cp (with {ETP} = 2), which is 2",
        f"set {EP} to 1 or 2",
        world=4,
    ),
    *(
        bad(
            "experts_are_whole_or_split_by_tp",
            f"{ETP}=2 {EP}={ep} {TP}=4 {EXPERTS} model.n_kv_heads=4 model.n_heads=4",
            f"must be 1 or {TP}, which is 4",
            f"set {ETP} to 1 or 4",
            world=8,
        )
        for ep in (1, 2)
    ),
    bad(
        "expert_parallel_runs",
        f"{RESHARD}=2 {EXPERTS} {EP}=2",
        "experts are sharded over other ranks",
        f'set {RESHARD} = "default"',
        world=4,
    ),
    # The shared experts' feed-forward is split with expert parallelism too.
    *(
        bad(
            "tensor_parallel_divides_experts",
            f"{TP}=8 {EXPERTS} model.n_kv_heads=8 model.n_heads=8 {EP}={ep}",
            "must divide the width of experts, which is 12",
            f"set {TP} to 1, 2 or 4",
            world=8,
        )
        for ep in (1, 2)
    ),
    bad("options_act", f"{EP}=2", DENSE, "set expert_parallel_degree = 1", world=2),
    bad("options_act", "moe.aux_loss_coeff=0.01", DENSE),
    bad("options_act", "moe.z_loss_coeff=0.001", DENSE),
    bad("options_act", "moe.aux_loss_scope=sequence", "moe.aux_loss_coeff"),
    bad("options_act", f"moe.aux_loss_scope=sequence {EXPERTS}", "moe.aux_loss_coeff"),
    bad("options_act", "moe.load_balance_coeff=0.01", "no effect without a model whose experts have a bias"),
    bad("options_act", f"moe.load_balance_coeff=0.01 {NO_BIAS}", "a model whose experts have a bias"),
    bad("options_act", "debug.moe_force_load_balance", DENSE),
]
