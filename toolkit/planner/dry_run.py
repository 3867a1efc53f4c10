"""Dry run (``comm.mode = "fake_backend"``): check and describe a run of any size in one process without a
GPU.

    NGPU=16384 ./run_train.sh --comm.mode fake_backend --job.config_file FILE

Runs the preflight, then prints the mesh, the pipeline stages, and the state and traffic of single ranks. The
ranks are those in LOG_RANK, by default the first rank of each different pipeline stage, which has the largest
shards. The peak memory is that of a step on tensors without storage. Neither a corpus nor a checkpoint is
read; a missing or unusable one is reported in a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from toolkit import preflight
from toolkit.config import Config, load_config
from toolkit.config.phases import run_phases
from toolkit.config.types import MAX_RANKS, UnknownValue
from toolkit.errors import EXIT_FINISHED, ConfigError, one_line
from toolkit.hardware import Hardware, detect
from toolkit.launcher.environment import node_range, shown_ranks, whole_number
from toolkit.models.from_config import needs_tokenizer
from toolkit.models.parameters import head_parameters, table
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.planner.work import BYTES
from toolkit.preflight.planned_run import PlannedRun

if TYPE_CHECKING:  # these import torch, and mistakes are reported before that
    from toolkit.planner.allocations import StepMemory
    from toolkit.planner.memory import ParameterShard, RankState
    from toolkit.planner.traffic import Exchange

_MAX_ITEMS = 3
_MACHINE_RULES = ("folders_writable", "wandb_ready", "trackers_ready", "triton_has_a_compiler")
"""Rules about this machine's folders and compilers, which are irrelevant for a dry run."""
_MODEL_RULES = ("architecture_readable", "tokenizer_readable", "weights_readable")
"""Rules about the files that may define the model."""


def dry_run(config: Config, environ: Mapping[str, str], argv: Sequence[str]) -> int:
    """Check and describe the run of ``config``, which was read from ``argv``, and of the launch variables.

    Raises:
        ConfigError: the configuration is invalid.
        DataError: the file that defines the model cannot be read.
    """
    run = checked_run(config, environ, argv)
    config = run.config
    if config.job.print_config:
        print(config.to_toml())
    print("dry    nothing is trained, and no corpus or checkpoint is read")
    print(preflight.describe(config, world_size=run.world_size, hardware=run.hardware))
    for problem in preflight.check(config, world_size=run.world_size, hardware=run.hardware):
        reason = one_line(f"{problem.key} = {problem.value!r}: {problem.rule}")
        print(f"note   a run started here would fail: {reason}")
    for phase in run_phases(config):
        if phase.name:
            print(f"\nphase  {phase.name}, from step {phase.start + 1} to {phase.end}")
        _describe_run(replace(run, config=phase.config), environ)
    return EXIT_FINISHED


def _describe_run(run: PlannedRun, environ: Mapping[str, str]) -> None:
    config = run.config
    print("\n".join(_describe_mesh(run)))
    if run.stages:
        print("\n".join(_describe_stages(run)))
    from toolkit.distributed.process_group import DTYPES
    from toolkit.planner.fake_step import step_memory
    from toolkit.planner.memory import rank_state
    from toolkit.planner.traffic import step_traffic

    assert run.mesh and run.model, "the preflight found nothing wrong with the config"
    alike = distinct_ranks(run)
    for rank in shown_ranks(environ, run.world_size, ",".join(map(str, alike))):
        options: dict[str, Any] = {"param_dtype": DTYPES[run.precision], "target": run.hardware.device}
        state = rank_state(config, run.model, run.mesh, rank, **options)
        step = step_memory(config, run.model, run.mesh, rank, **options)
        ep = run.mesh.ep
        worst = step_memory(config, run.model, run.mesh, rank, expert_load=ep, **options) if ep > 1 else None
        sent = step_traffic(config, run.model, run.mesh, rank, **options)
        print("\n".join(_describe_rank(run, state, step, worst, sent, alike.get(rank, []))), flush=True)


def checked_run(config: Config, environ: Mapping[str, str], argv: Sequence[str]) -> PlannedRun:
    """Return :func:`plan_run` if its configuration is valid; else raise the errors of :func:`dry_run`."""
    run = plan_run(config, environ, argv)
    only = required_rules(run)
    preflight.raise_problems(run.config, world_size=run.world_size, hardware=run.hardware, only=only)
    return run


def plan_run(config: Config, environ: Mapping[str, str], argv: Sequence[str]) -> PlannedRun:
    """Return the run on all nodes; with elastic meshes, on the largest mesh."""
    device = config.training.device
    ranks, (least, most) = world_size(environ, device), node_range(environ)
    if config.parallelism.elastic_meshes and least < most:
        from toolkit.preflight.several_nodes import largest_mesh

        flags, ranks = largest_mesh(config, ranks // most, least, most)
        config = load_config([*argv, *flags])
    return PlannedRun(config, ranks, target(environ, device))


def required_rules(run: PlannedRun) -> list[str]:
    """Return the names of the rules that a dry run needs: rules about the config and, if they alone define
    the model, about the model's files."""
    names = [it.check.__name__ for it in preflight.rules_of(run) if it.error is ConfigError]
    try:
        unknown = run.model is None or (needs_tokenizer(run.config) and run.vocabulary is None)
    except UnknownValue:
        unknown = False
    return [name for name in names if name not in _MACHINE_RULES] + (list(_MODEL_RULES) if unknown else [])


def world_size(environ: Mapping[str, str], device: str) -> int:
    """Return NGPU × NNODES as in a launch, else WORLD_SIZE as under torchrun, else this machine's device
    count."""
    local, most = detect(device).count, MAX_RANKS
    if environ.get("NGPU") or environ.get("NNODES"):
        return whole_number(environ, "NGPU", local, 1, most) * node_range(environ)[1]
    return whole_number(environ, "WORLD_SIZE", local, 1, most)


def target(environ: Mapping[str, str], device: str) -> Hardware:
    """Return the hardware to plan for: this machine's GPUs, or unknown ones if there are none; the CPU if
    ``device`` selects it, or if an empty CUDA_VISIBLE_DEVICES hides the GPUs."""
    local = detect(device)
    if device == "cpu" or local.device == "cuda" or "CUDA_VISIBLE_DEVICES" in environ:
        return local
    name = "GPUs, none on this machine"
    return replace(local, device="cuda", name=name, native_bf16=True, capability=9.0)


# The mesh


def strides(layout: ParallelDims) -> dict[str, int]:
    """Return the rank difference between neighbors in each dimension, outermost first."""
    result, stride = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        result[name] = stride
        stride *= getattr(layout, name)
    return dict(reversed(result.items()))


def coordinates(layout: ParallelDims, rank: int) -> dict[str, int]:
    """Return the coordinates of ``rank`` in each dimension."""
    return {name: rank // stride % getattr(layout, name) for name, stride in strides(layout).items()}


def _used_strides(layout: ParallelDims) -> dict[str, int]:
    return {name: stride for name, stride in strides(layout).items() if getattr(layout, name) > 1}


def _describe_mesh(run: PlannedRun) -> Iterator[str]:
    assert run.mesh
    if run.world_size == 1:
        return
    used = _used_strides(run.mesh)
    formula = " + ".join(name if stride == 1 else f"{stride}·{name}" for name, stride in used.items())
    yield f"\nrank = {formula}; rank 0 is with"
    for name, stride in used.items():
        size = getattr(run.mesh, name)
        yield f"  {name:<12} {size:>5}  {_abbreviate([str(place * stride) for place in range(size)])}"


def _abbreviate(items: Sequence[str]) -> str:
    """Join ``items``; if there are many, only the first few and the last."""
    return ", ".join(items if len(items) <= _MAX_ITEMS + 1 else [*items[:_MAX_ITEMS], "…", items[-1]])


# The pipeline


def _describe_stages(run: PlannedRun) -> Iterator[str]:
    assert run.stages and run.mesh
    stride = strides(run.mesh)["pp"]
    yield f"\n{'stage':>5}  {'first rank':>10}  {'parameters':>15}  modules"
    owner = {stage: place for place, stages in enumerate(run.stages.of_ranks) for stage in stages}
    for stage, modules in enumerate(run.stages.modules):
        count = f"{_parameters(run, modules):,}"
        yield f"{stage:>5}  {owner[stage] * stride:>10}  {count:>15}  {_module_names(modules)}"


def _parameters(run: PlannedRun, modules: Sequence[str]) -> int:
    """Return the number of parameters of a stage; a tied head on another stage than the embedding counts as a
    copy."""
    assert run.model
    tied = run.model.tie_embeddings and "tok_embeddings" in modules
    sizes = {
        "tok_embeddings": run.model.vocab_size * run.model.dim,
        "norm": run.model.dim,
        "output": 0 if tied else head_parameters(run.model),
    }
    blocks = table(run.model).block_sizes
    return sum(sizes[name] if name in sizes else blocks[int(name.partition(".")[2])] for name in modules)


def _module_names(names: Sequence[str]) -> str:
    """Join module names, with all blocks as one range."""
    layers = [int(name.partition(".")[2]) for name in names if name.startswith("layers.")]
    others = [name for name in names if not name.startswith("layers.")]
    first = [name for name in others if name == "tok_embeddings"]
    shown = [f"layers {_ranges(layers)} ({len(layers)})" if len(layers) > 1 else f"layer {_ranges(layers)}"]
    return ", ".join([*first, *(shown if layers else []), *(name for name in others if name not in first)])


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, such as "0–3, 7" for 0, 1, 2, 3, 7."""
    runs = [list(group) for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ends)


def distinct_ranks(run: PlannedRun) -> dict[int, list[int]]:
    """Map the first pipeline rank of each kind to the other pipeline ranks with equal stages."""
    if run.stages is None:
        return {0: []}
    assert run.mesh
    stride, stages = strides(run.mesh)["pp"], run.stages
    by_kind: dict[object, list[int]] = {}
    for place, stage_indices in enumerate(stages.of_ranks):
        kinds = tuple(
            tuple("layers" if name.startswith("layers.") else name for name in stages.modules[stage])
            for stage in stage_indices
        )
        by_kind.setdefault(kinds, []).append(place * stride)
    return {ranks[0]: ranks[1:] for ranks in by_kind.values()}


# A rank


def _describe_rank(
    run: PlannedRun,
    found: RankState,
    step: StepMemory,
    worst: StepMemory | None,
    sent: Sequence[Exchange],
    alike: Sequence[int],
) -> Iterator[str]:
    assert run.mesh
    place = coordinates(run.mesh, found.rank)
    where = ", ".join(f"{name} {place[name]}" for name in _used_strides(run.mesh))
    stages = ""
    if run.stages:
        stage_indices = run.stages.of_ranks[place["pp"]]
        stages = (
            f", {'stage' if len(stage_indices) == 1 else 'stages'} {' and '.join(map(str, stage_indices))}"
        )
    yield f"\nrank {found.rank}{f' ({where})' if where else ''}{stages}"
    if alike:
        yield f"  same on ranks {_abbreviate([str(rank) for rank in alike])}"
    for name, size, note in [*_state_rows(run, found), *_step_rows(step, worst), *_traffic_rows(sent)]:
        yield f"  {name:<23} {_size(size):>11}  {note}".rstrip()
    rows = list(_shape_rows(found.parts))
    width = max(len(name) for name, _, _ in rows)
    for name, whole, local in rows:
        yield f"  {name:<{width}}  {whole:>15} → {local}"


def _state_rows(run: PlannedRun, found: RankState) -> Iterator[tuple[str, int, str]]:
    """Yield the bytes of each kind of state, and where it is stored."""
    training, options = run.config.training, run.config.parallelism
    assert run.mesh and run.batch
    where = "in CPU memory" if training.enable_cpu_offload else ""
    stored = found.parameter_bytes
    gradients, note = found.gradient_bytes, where
    if run.config.optimizer.early_step_in_backward and run.mesh.dp_replicate == 1:
        gradients = max(unit.stored_gradients for unit in found.units) * BYTES[training.dtype]
        note = "of one unit"
    stored_as = "linear layers in NF4" if run.config.finetune.quantizes else training.dtype
    yield "parameters", stored, ", ".join(filter(None, [stored_as, where]))
    yield "gradients", gradients, note
    ema = "with EMA of weights" if run.config.optimizer.ema_decay else ""
    yield "optimizer state", found.optimizer_bytes, ", ".join(filter(None, [ema, where]))
    yield "total", stored + gradients + found.optimizer_bytes, "without activations"
    dtype = run.precision
    largest = max(found.units, key=lambda unit: unit.bytes)
    pipeline = run.mesh.pp > 1
    if not largest.bytes:  # FSDP is skipped on one rank
        return
    yield "largest unit", largest.bytes, f"{largest.name}, gathered in {dtype}"
    if pipeline or reshard_after_forward(options) == "never":
        note = "gathered until the end of the step" if pipeline else "gathered until backward"
        yield "all units", sum(unit.bytes for unit in found.units), note
    if pipeline or (not options.fsdp_sync_each_batch and run.batch.accumulation > 1):
        reduced = training.mixed_precision_reduce
        whole = sum(unit.gradients for unit in found.units)
        yield "unsharded gradients", whole * BYTES[reduced], f"{reduced}, until the last micro-batch"


def _step_rows(step: StepMemory, worst: StepMemory | None) -> Iterator[tuple[str, int, str]]:
    """Yield the peak memory of a step, by purpose; ``worst`` is that of a rank whose experts get all
    tokens."""
    yield "peak of a step", step.peak, f"in {step.moment}"
    if worst:
        yield "  worst routing", worst.peak, "this rank's experts get all tokens of its ep group"
    for part, size in sorted(step.parts.items(), key=lambda it: -it[1]):
        yield f"  {part}", size, ""


def _traffic_rows(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, int, str]]:
    """Yield the bytes sent per step over each dimension, without the small messages over all ranks."""
    from toolkit.planner.traffic import WORLD

    sizes: dict[str, Counter[str]] = {}
    for exchange in exchanges:
        if exchange.dimension != WORLD:
            operation = exchange.operation.replace("_", "-")
            sizes.setdefault(exchange.dimension, Counter())[operation] += round(exchange.sent_bytes)
    for dimension, by_operation in sizes.items():
        each = ", ".join(f"{_size(size)} {operation}" for operation, size in by_operation.items())
        yield f"sent over {dimension}", by_operation.total(), f"per step: {each}"


def _shape_rows(parts: Sequence[ParameterShard]) -> Iterator[tuple[str, str, str]]:
    """Yield name, full shape and local shape of parameters; blocks with equal shapes share a row."""
    blocks: dict[tuple[str, ...], list[int]] = {}
    for part in parts:
        layer, name = [], part.name
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            layer = [int(number)]
        blocks.setdefault((name, _shape(part.whole), _shape(part.local)), []).extend(layer)
    for (name, whole, local), layers in blocks.items():
        yield f"layers.{_ranges(layers)}.{name}" if layers else name, whole, local


def _shape(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} bytes"
