"""Rules for FSDP: sharding strategies, units and resharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from toolkit.errors import Problem, did_you_mean, divisors
from toolkit.models.common.args import INNER_CLASSES, WRAP_CLASSES, ModelArgs
from toolkit.models.parameters import table
from toolkit.parallel.dims import strategy
from toolkit.preflight.planned_run import PlannedRun, note, rule

_REPLICATE = "parallelism.data_parallel_replicate_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_STRATEGY = "parallelism.sharding_strategy"
_POLICY = "parallelism.fsdp_wrap_policy"
_CLASSES = "parallelism.fsdp_wrap_classes"
_MIN_PARAMS = "parallelism.fsdp_min_num_params"

# Parts of the names of a decoder's modules in other libraries, most specific first.
_ELSEWHERE = {
    "attention": "Attention",
    "mlp": "FeedForward",
    "norm": "RMSNorm",
    "embedding": "Embedding",
    "head": "OutputHead",
    "layer": "TransformerBlock",
    "block": "TransformerBlock",
}


@rule()
def strategy_has_its_degrees(run: PlannedRun) -> Iterator[Problem]:
    """Check that explicitly set degrees match the strategy."""
    options, name = run.config.parallelism, strategy(run.config.parallelism)
    replicate, shard = options.data_parallel_replicate_degree, options.data_parallel_shard_degree
    if name in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        hybrid = "HYBRID_SHARD" if name == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
        fix = f'set {_STRATEGY} = "{hybrid}", or remove the degree'
        yield run.problem(_REPLICATE, f"{name} has no replicas", fix)
    if name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") and replicate == 1:
        plain = "FULL_SHARD" if name == "HYBRID_SHARD" else "SHARD_GRAD_OP"
        rule = "shards within each of several replicas, but there is only one replica"
        fix = f'set {_REPLICATE} to the number of nodes; on one node {_STRATEGY} = "{plain}"'
        yield run.problem(_STRATEGY, rule, fix)
    if name != "NO_SHARD":
        return
    if shard > 1:
        fix = f'remove it, or set {_STRATEGY} = "FULL_SHARD"'
        yield run.problem(_SHARD, "NO_SHARD keeps all parameters on every rank", fix)
    if run.mesh and replicate not in (1, run.mesh.dp_replicate):
        fix = f'remove it, or set {_STRATEGY} = "HYBRID_SHARD"'
        rule = f"NO_SHARD makes each of the {run.mesh.dp_replicate} data-parallel ranks a replica"
        yield run.problem(_REPLICATE, rule, fix)


@rule()
def strategy_has_its_resharding(run: PlannedRun) -> list[Problem]:
    """Check that ``fsdp_reshard_after_forward``, if set, matches the strategy."""
    name, reshard = strategy(run.config.parallelism), run.config.parallelism.fsdp_reshard_after_forward
    if name is None or reshard == "default":
        return []
    keeps = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    if keeps == (reshard == "never"):
        return []
    if name == "NO_SHARD":
        rule = "NO_SHARD keeps all parameters on every rank: gathered ones would be a second copy"
        return [run.problem(_RESHARD, rule, "remove it")]
    does = "keeps gathered parameters until backward" if keeps else "frees gathered parameters after forward"
    other = {
        "FULL_SHARD": "SHARD_GRAD_OP",
        "SHARD_GRAD_OP": "FULL_SHARD",
        "HYBRID_SHARD": "HYBRID_SHARD_ZERO2",
        "HYBRID_SHARD_ZERO2": "HYBRID_SHARD",
    }[name]
    return [run.problem(_RESHARD, f"{name} {does}", f'remove it, or set {_STRATEGY} = "{other}"')]


@rule()
def reshard_size_divides(run: PlannedRun) -> list[Problem]:
    """Check that the number of ranks to reshard to is a proper divisor of the shard group's size."""
    size = run.config.parallelism.fsdp_reshard_after_forward
    if isinstance(size, str) or run.mesh is None or run.mesh.pp * run.mesh.tp > 1:
        return []
    shard = run.mesh.dp_shard * run.mesh.cp
    fitting = divisors(shard)[1:-1]
    if size in fitting:
        return []
    if size == shard:
        rule = f'equals the size of the shard group, {shard} ranks, which is what "always" means'
    else:
        degree = "the shard degree" if run.mesh.cp == 1 else "dp_shard × cp"
        rule = f"must be a proper divisor of {degree}, which is {shard}"
    possible = ", ".join(map(str, fitting))
    return [run.problem(_RESHARD, rule, f'set it to "always"{f", or one of {possible}" if possible else ""}')]


@rule()
def reshard_size_has_its_groups(run: PlannedRun) -> list[Problem]:
    """Check that all ranks are in one shard group if parameters reshard to a number of ranks.

    torch creates the process groups for that number on each shard mesh separately, under the same names: with
    several shard meshes, collectives would wait forever for the wrong ranks.
    """
    if isinstance(run.config.parallelism.fsdp_reshard_after_forward, str) or run.mesh is None:
        return []
    split = [name for name in ("pp", "tp") if getattr(run.mesh, name) > 1]
    if not split:
        return []
    rule = f"torch supports a number only if all ranks shard together, not with {' and '.join(split)}"
    return [run.problem(_RESHARD, rule, 'set it to "always" or "never"')]


@rule()
def wrap_classes_exist(run: PlannedRun) -> Iterator[Problem]:
    """Check that the FSDP wrap classes exist in the model."""
    options = run.config.parallelism
    if options.fsdp_wrap_policy != "class":
        return
    if not options.fsdp_wrap_classes:
        fix = 'set it to ["TransformerBlock"]'
        yield run.problem(_CLASSES, "without any class the whole model is one unit", fix)
    for name in options.fsdp_wrap_classes:
        if name not in WRAP_CLASSES:
            rule = f"{name} is not one of the supported classes: {', '.join(WRAP_CLASSES)}"
            yield run.problem(_CLASSES, rule, right_class(name))
        elif name in ("Embedding", "OutputHead") and run.model and run.model.tie_embeddings:
            rule = f"{name} cannot be a unit: the embedding is tied to the head and stays in the root"
            yield run.problem(_CLASSES, rule, f"remove {name}")


def right_class(name: str) -> str:
    """Suggest the class that a user of another library probably means by ``name``."""
    part = next((part for part in _ELSEWHERE if part in name.lower()), None)
    return (
        f"did you mean {_ELSEWHERE[part]}?" if part else did_you_mean(name, WRAP_CLASSES, "use one of these")
    )


@rule()
def compiled_blocks_are_whole(run: PlannedRun) -> list[Problem]:
    """Check that no FSDP unit is inside a compiled block, whose graph cannot contain FSDP's hooks."""
    options, compiling = run.config.parallelism, run.config.compile
    if not compiling.enable or "model" not in compiling.components:
        return []
    fix = 'set parallelism.fsdp_wrap_policy = "block", or remove "model" from compile.components'
    if options.fsdp_wrap_policy == "class":
        inner = [name for name in options.fsdp_wrap_classes if name in INNER_CLASSES]
        if inner:
            rule = f"{' and '.join(inner)} would be units inside blocks, which are compiled as one graph"
            return [run.problem(_CLASSES, rule, fix)]
    elif options.fsdp_wrap_policy == "size" and run.model:
        smallest = _smallest_whole_block(run.model)
        if options.fsdp_min_num_params < smallest:
            rule = "creates units inside blocks, which are compiled as one graph"
            fix = f"set {_MIN_PARAMS} to at least {smallest}, or {fix}"
            return [run.problem(_MIN_PARAMS, rule, fix, _POLICY, "compile.enable")]
    return []


@note
def sharding_notes(run: PlannedRun) -> Iterator[str]:
    """Note options that have no effect in this run."""
    options = run.config.parallelism
    if options.fsdp_wrap_policy == "size" and run.model:
        block = max(table(run.model).block_sizes)
        embedding = 0 if run.model.tie_embeddings else run.model.vocab_size * run.model.dim
        if max(block, embedding) < options.fsdp_min_num_params:
            yield (
                f"no module has {_MIN_PARAMS} = {options.fsdp_min_num_params:,} parameters: the whole model "
                f"is gathered at once; a block has {block:,}"
            )
    if strategy(options) == "NO_SHARD" and options.context_parallel_degree > 1:
        yield (
            f"{_STRATEGY} NO_SHARD makes each data-parallel rank a replica, which is still sharded over "
            f"the {options.context_parallel_degree} ranks of parallelism.context_parallel_degree"
        )


def _smallest_whole_block(model: ModelArgs) -> int:
    """Return the lowest ``fsdp_min_num_params`` at which no module inside a block is a unit."""
    inside: Counter[tuple[int | None, str]] = Counter()
    for row in table(model).values():
        module, _, below = row.module.removeprefix(f"layers.{row.block}.").partition(".")
        if below and row.block is not None:
            inside[row.block, module] += row.size
    return max(inside.values(), default=0) + 1
