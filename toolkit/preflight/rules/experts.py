"""Rules for mixtures of experts."""

from __future__ import annotations

import math

from toolkit.errors import Problem, divisors, join_or
from toolkit.parallel.dims import splits_experts
from toolkit.preflight.planned_run import PlannedRun, rule

_EP = "parallelism.expert_parallel_degree"
_ETP = "parallelism.expert_tensor_parallel_degree"
_TP = "parallelism.tensor_parallel_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"


@rule()
def expert_parallel_divides(run: PlannedRun) -> list[Problem]:
    """Check that the expert-parallel degree divides the experts and the ranks of a pipeline stage."""
    degree, model, mesh = run.config.parallelism.expert_parallel_degree, run.model, run.mesh
    if degree == 1 or model is None or model.moe is None or mesh is None:
        return []
    ranks, named = mesh.dp_shard * mesh.cp * mesh.tp, "dp_shard × cp × tp"
    if mesh.etp > 1:
        ranks, named = mesh.dp_shard * mesh.cp, f"dp_shard × cp (with {_ETP} = {mesh.etp})"
    sizes = {"the number of experts": model.moe.num_experts, named: ranks}
    broken = [f"{what}, which is {size}" for what, size in sizes.items() if size % degree]
    if not broken:
        return []
    fitting = join_or(divisors(math.gcd(*sizes.values())))
    return [run.problem(_EP, f"must divide {', and '.join(broken)}", f"set {_EP} to {fitting}")]


@rule()
def experts_are_whole_or_split_by_tp(run: PlannedRun) -> list[Problem]:
    """Check that the expert tensor-parallel degree is 1 or the tensor-parallel degree."""
    tp = run.config.parallelism.tensor_parallel_degree
    if run.config.parallelism.expert_tensor_parallel_degree in (1, tp):
        return []
    fix = f"set {_ETP} to {join_or(sorted({1, tp}))}"
    return [run.problem(_ETP, f"must be 1 or {_TP}, which is {tp}", fix, _TP)]


@rule()
def expert_parallel_runs(run: PlannedRun) -> list[Problem]:
    """Reject options that are not supported with expert parallelism."""
    options = run.config.parallelism
    if options.expert_parallel_degree == 1 or not isinstance(options.fsdp_reshard_after_forward, int):
        return []
    rule = f"must not be a number with {_EP} above 1: experts are sharded over other ranks"
    return [run.problem(_RESHARD, rule, f'set {_RESHARD} = "default"', _EP)]


@rule()
def tensor_parallel_divides_experts(run: PlannedRun) -> list[Problem]:
    """Check that the tensor-parallel degree divides the width of experts that it splits."""
    tp, model = run.config.parallelism.tensor_parallel_degree, run.model
    if tp == 1 or model is None or model.moe is None:
        return []
    widths = [model.moe.ffn_dim * shared for shared in {model.moe.num_shared_experts} - {0}]
    if splits_experts(run.config.parallelism):
        widths.append(model.moe.ffn_dim)
    broken = [width for width in widths if width % tp]
    if not broken:
        return []
    rule = f"must divide the width of experts, which is {broken[0]}"
    fix = f"set {_TP} to {join_or(divisors(math.gcd(model.n_kv_heads, *widths)))}"
    return [run.problem(_TP, rule, fix)]
