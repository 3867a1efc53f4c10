"""Rules about the mesh: what the world, the batch, the sequence and the model must divide into."""

from __future__ import annotations

import math
from itertools import product

from toolkit.config.layout import Degrees
from toolkit.errors import Problem
from toolkit.preflight.facts import Run, divisors, rule
from toolkit.wording import nearest_multiple

_SHOWN = 6
_DEGREES = {
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
}


@rule()
def world_fills_mesh(run: Run) -> list[Problem]:
    """Every rank has one place in the mesh."""
    if run.mesh:
        return []
    asked = {name: run.config.value(key) for name, key in _DEGREES.items()}
    fixed = math.prod(size for size in asked.values() if size != -1)
    product_said = " × ".join(f"{name} {size}" for name, size in asked.items() if size != -1)
    if asked["dp_shard"] == -1:
        said = f"{product_said} = {fixed} does not divide the world size {run.world_size}"
        start = f"start a multiple of {fixed} processes"
    else:
        said = f"{product_said} = {fixed} is not the world size {run.world_size}"
        start = f"start {fixed} processes"
    fitting = "; ".join(str(found) for found in _fitting(asked, run.world_size)[:_SHOWN])
    return [
        run.problem(_DEGREES["dp_shard"], said, f"{start}, or for {run.world_size} use one of: {fitting}")
    ]


def _fitting(asked: dict[str, int], world_size: int) -> list[Degrees]:
    """All meshes of ``world_size`` with no technique that was not asked for, most like ``asked`` first."""
    found = [
        Degrees(pp, dp_replicate, world_size // (pp * dp_replicate * cp * tp), cp, tp)
        for pp, cp, tp in product(divisors(asked["pp"]), divisors(asked["cp"]), divisors(asked["tp"]))
        if world_size % (pp * cp * tp) == 0
        for dp_replicate in divisors(world_size // (pp * cp * tp))
    ]
    # Splitting the model is what makes it fit a device, so that is given up last.
    weights = {"pp": 4, "cp": 4, "tp": 4, "dp_replicate": 2, "dp_shard": 1}

    def distance(degrees: Degrees) -> float:
        kept = [name for name, size in asked.items() if size != -1]
        return sum(weights[name] * abs(math.log(getattr(degrees, name) / asked[name])) for name in kept)

    return sorted(found, key=distance)


@rule()
def batch_divides(run: Run) -> list[Problem]:
    """A global batch has equal parts on the data-parallel ranks."""
    if run.mesh is None or run.batch:
        return []
    size, dp = run.config.training.global_batch_size, run.mesh.dp
    fix = f"set it to {nearest_multiple(size, dp)}, or use a data-parallel degree of {_or(divisors(size))}"
    return [
        run.problem("training.global_batch_size", f"must be a multiple of the data-parallel degree {dp}", fix)
    ]


def _or(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


@rule()
def tensor_parallel_divides(run: Run) -> list[Problem]:
    """A dimension that tp shards has equal shards."""
    tp, model = run.config.parallelism.tensor_parallel_degree, run.model
    if model is None or tp == 1:
        return []
    problems = []
    for name in ("n_heads", "n_kv_heads"):
        if getattr(model, name) % tp:
            fitting = divisors(math.gcd(model.n_heads, model.n_kv_heads))
            fix = f"tensor_parallel_degree can be {_or(fitting)}"
            problems.append(
                run.problem(_DEGREES["tp"], f"must divide {name}, which is {getattr(model, name)}", fix)
            )
    for name in ("vocab_size", "ffn_dim"):
        size = getattr(model, name)
        if size % tp:
            fix = f"the nearest size that does is model.{name} = {_nearest_size(name, size, tp)}"
            problems.append(run.problem(_DEGREES["tp"], f"must divide {name}, which is {size}", fix))
    return problems


def _nearest_size(name: str, size: int, tp: int) -> int:
    # A vocabulary may grow, but not lose tokens.
    return -(-size // tp) * tp if name == "vocab_size" else nearest_multiple(size, tp)


@rule()
def sequence_divides(run: Run) -> list[Problem]:
    """Context parallelism cuts a sequence into equal pieces, and tp cuts each of them again."""
    options = run.config.parallelism
    cp, tp = options.context_parallel_degree, options.tensor_parallel_degree
    balanced = options.context_parallel_load_balancer is not None and cp > 1
    unit = cp * (2 if balanced else 1) * tp
    parts = [f"2·cp = {2 * cp}" if balanced else f"cp = {cp}"] if cp > 1 else []
    parts += [f"tp = {tp}"] if tp > 1 else []
    validation = ["validation.seq_len"] if run.config.validation.enable else []
    return [
        run.problem(
            key,
            f"must be a multiple of {' × '.join(parts)}{f', that is {unit}' if len(parts) > 1 else ''}",
            f"the nearest is {nearest_multiple(run.config.value(key), unit)}",
        )
        for key in ["training.seq_len", *validation]
        if run.config.value(key) % unit
    ]


@rule()
def stages_have_layers(run: Run) -> list[Problem]:
    """Each pipeline stage has at least one block, each rank equally many stages."""
    model, options = run.model, run.config.parallelism
    pp = options.pipeline_parallel_degree
    if model is None or pp == 1:
        return []
    if pp > model.n_layers:
        fix = f"set it to at most {model.n_layers}"
        return [
            run.problem(_DEGREES["pp"], f"a model of {model.n_layers} layers has at most as many stages", fix)
        ]
    per_stage = options.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return []
    counted = (
        model.n_layers
        + options.pipeline_parallel_first_stage_less_layers
        + options.pipeline_parallel_last_stage_less_layers
    )
    stages = -(-counted // per_stage)
    if stages % pp == 0 and stages <= model.n_layers:
        return []
    fitting = [
        n for n in range(1, counted + 1) if -(-counted // n) % pp == 0 and -(-counted // n) <= model.n_layers
    ]
    return [
        run.problem(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"makes {stages} stages of {model.n_layers} layers, which must be a multiple of "
            f"pipeline_parallel_degree {pp} and no more than the layers",
            f"it can be {_or(fitting)}" if fitting else "lower pipeline_parallel_degree",
        )
    ]
