"""Rules about sharding: strategies, what is gathered together, where parameters are kept."""

from __future__ import annotations

from collections import Counter

from toolkit.errors import Problem, did_you_mean, divisors
from toolkit.models.common.args import INNER_CLASSES, WRAP_CLASSES, ModelArgs
from toolkit.models.parameters import table
from toolkit.parallel.dims import strategy
from toolkit.preflight.planned_run import PlannedRun, note, rule

_REPLICATE = "parallelism.data_parallel_replicate_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_STRATEGY = "parallelism.sharding_strategy"
_CLASSES = "parallelism.fsdp_wrap_classes"
_MIN_PARAMS = "parallelism.fsdp_min_num_params"

# What other libraries call the modules of a decoder, by parts of the names, the telling ones first.
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
def strategy_has_its_degrees(run: PlannedRun) -> list[Problem]:
    """Degrees at other than their defaults are those of the strategy."""
    options, name = run.config.parallelism, strategy(run.config.parallelism)
    replicate, shard = options.data_parallel_replicate_degree, options.data_parallel_shard_degree
    if name in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        hybrid = "HYBRID_SHARD" if name == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
        fix = f'set {_STRATEGY} = "{hybrid}", or remove the degree'
        return [run.problem(_REPLICATE, f"{name} has no replicas", fix)]
    if name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") and replicate == 1:
        plain = "FULL_SHARD" if name == "HYBRID_SHARD" else "SHARD_GRAD_OP"
        rule = "it shards within each of several replicas, but there is one"
        fix = f'set {_REPLICATE} to the number of nodes; on one node {_STRATEGY} = "{plain}"'
        return [run.problem(_STRATEGY, rule, fix)]
    if name != "NO_SHARD":
        return []
    problems = []
    if shard > 1:
        fix = f'remove it, or set {_STRATEGY} = "FULL_SHARD"'
        problems.append(run.problem(_SHARD, "NO_SHARD keeps all parameters on each rank", fix))
    if run.mesh and replicate not in (1, run.mesh.dp_replicate):
        fix = f'remove it, or set {_STRATEGY} = "HYBRID_SHARD"'
        rule = f"NO_SHARD makes each of the {run.mesh.dp_replicate} data-parallel ranks a replica"
        problems.append(run.problem(_REPLICATE, rule, fix))
    return problems


@rule()
def strategy_has_its_resharding(run: PlannedRun) -> list[Problem]:
    """``fsdp_reshard_after_forward``, where it is set, does what the strategy does."""
    name, reshard = strategy(run.config.parallelism), run.config.parallelism.fsdp_reshard_after_forward
    if name is None or reshard == "default":
        return []
    keeps = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    if keeps == (reshard == "never"):
        return []
    if name == "NO_SHARD":
        rule = "NO_SHARD has all parameters: gathered ones would be a second copy of them"
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
    """Parameters are kept sharded over some of the ranks that share them, equally many to each part."""
    size = run.config.parallelism.fsdp_reshard_after_forward
    if isinstance(size, str) or run.mesh is None or run.mesh.pp * run.mesh.tp > 1:
        return []
    shard = run.mesh.dp_shard * run.mesh.cp
    fitting = divisors(shard)[1:-1]
    if size in fitting:
        return []
    if size == shard:
        said = f'is all of the {shard} ranks of a shard group, which "always" means'
    else:
        degree = "the shard degree" if run.mesh.cp == 1 else "dp_shard × cp"
        said = f"must divide {degree}, which is {shard}, and be smaller"
    possible = ", ".join(map(str, fitting))
    return [run.problem(_RESHARD, said, f'set it to "always"{f", or one of {possible}" if possible else ""}')]


@rule()
def reshard_size_has_its_groups(run: PlannedRun) -> list[Problem]:
    """torch makes the groups of a number on each mesh of shards by itself, under the same names on all:
    where there are several, they meet the wrong ranks and wait forever."""
    if isinstance(run.config.parallelism.fsdp_reshard_after_forward, str) or run.mesh is None:
        return []
    split = [name for name in ("pp", "tp") if getattr(run.mesh, name) > 1]
    if not split:
        return []
    rule = (
        f"torch makes groups for a number only where all ranks shard together, not with {' and '.join(split)}"
    )
    return [run.problem(_RESHARD, rule, 'set it to "always" or "never"')]


@rule()
def wrap_classes_exist(run: PlannedRun) -> list[Problem]:
    """Units are made of classes that the model has."""
    options = run.config.parallelism
    if options.fsdp_wrap_policy != "class":
        return []
    if not options.fsdp_wrap_classes:
        fix = 'set it to ["TransformerBlock"]'
        return [run.problem(_CLASSES, "no class makes the whole model one unit", fix)]
    problems = []
    for name in options.fsdp_wrap_classes:
        if name not in WRAP_CLASSES:
            rule = f"{name} is none of the classes that may be named, which are {', '.join(WRAP_CLASSES)}"
            problems.append(run.problem(_CLASSES, rule, right_class(name)))
        elif name in ("Embedding", "OutputHead") and run.model and run.model.tie_embeddings:
            rule = f"{name} cannot be a unit: the embedding is tied to the head and stays in the root"
            problems.append(run.problem(_CLASSES, rule, f"remove {name}"))
    return problems


def right_class(name: str) -> str:
    part = next((part for part in _ELSEWHERE if part in name.lower()), None)
    return (
        f"did you mean {_ELSEWHERE[part]}?" if part else did_you_mean(name, WRAP_CLASSES, "name one of these")
    )


@rule()
def compiled_blocks_are_whole(run: PlannedRun) -> list[Problem]:
    """A unit has hooks that communicate, which cannot lie inside of a block that is one graph."""
    options, compiling = run.config.parallelism, run.config.compile
    if not compiling.enable or "model" not in compiling.components:
        return []
    fix = 'set parallelism.fsdp_wrap_policy = "block", or leave "model" out of compile.components'
    if options.fsdp_wrap_policy == "class":
        inner = [name for name in options.fsdp_wrap_classes if name in INNER_CLASSES]
        if inner:
            rule = f"{' and '.join(inner)} would be units inside of blocks, which are compiled whole"
            return [run.problem(_CLASSES, rule, fix)]
    elif options.fsdp_wrap_policy == "size" and run.model:
        smallest = _smallest_whole_block(run.model)
        if options.fsdp_min_num_params < smallest:
            rule = "makes units inside of blocks, which are compiled whole"
            return [run.problem(_MIN_PARAMS, rule, f"set it to at least {smallest}, or {fix}")]
    return []


@note
def sharding_notes(run: PlannedRun) -> list[str]:
    """Options that change nothing in this run."""
    options, said = run.config.parallelism, []
    if options.fsdp_wrap_policy == "size" and run.model:
        block = max(table(run.model).block_sizes)
        embedding = 0 if run.model.tie_embeddings else run.model.vocab_size * run.model.dim
        if max(block, embedding) < options.fsdp_min_num_params:
            said.append(
                f"no module has {_MIN_PARAMS} = {options.fsdp_min_num_params:,} parameters: the whole model "
                f"is gathered at once; a block has {block:,}"
            )
    if strategy(options) == "NO_SHARD" and options.context_parallel_degree > 1:
        said.append(
            f"{_STRATEGY} NO_SHARD makes data-parallel ranks replicas, each of which is still sharded over "
            f"the {options.context_parallel_degree} ranks of parallelism.context_parallel_degree"
        )
    return said


def _smallest_whole_block(model: ModelArgs) -> int:
    """The lowest ``fsdp_min_num_params`` at which nothing inside a block is a unit by itself."""
    inside: Counter[tuple[int | None, str]] = Counter()
    for row in table(model).values():
        module, _, below = row.module.removeprefix(f"layers.{row.block}.").partition(".")
        if below and row.block is not None:
            inside[row.block, module] += row.size
    return max(inside.values(), default=0) + 1
