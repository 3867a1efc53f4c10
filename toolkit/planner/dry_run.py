"""``comm.mode = "fake_backend"``: a run of any size checked and described by one process without a GPU.

    NGPU=16384 ./run_train.sh --comm.mode fake_backend --job.config_file FILE

The preflight, then the mesh, the stages of a pipeline and what single ranks hold and send. These are the
ranks of LOG_RANK, by default the first of each pipeline stage that differs from the others: of the ranks of a
stage the first has the largest part, where parameters do not divide evenly. A step is taken on tensors
without storage, which tells the most memory that it takes. Neither corpus nor checkpoint is read: where they
are not here, or no start could use them, a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from toolkit import preflight
from toolkit.config import Config, load_config
from toolkit.config.types import MAX_RANKS
from toolkit.errors import EXIT_FINISHED, ConfigError, one_line
from toolkit.hardware import Hardware, detect
from toolkit.launcher.environment import node_range, shown_ranks, whole_number
from toolkit.models.from_config import needs_tokenizer
from toolkit.models.parameters import head_parameters, table
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.planner.work import BYTES
from toolkit.preflight.planned_run import PlannedRun

if TYPE_CHECKING:  # it imports torch, which a mistake shall not wait for
    from toolkit.planner.allocations import StepMemory
    from toolkit.planner.memory import Holding, Part
    from toolkit.planner.traffic import Exchange

_SHOWN = 3
_OF_THIS_MACHINE = ("folders_writable", "wandb_ready", "triton_has_a_compiler")
"""Rules about where a run writes and compiles, which a description does not."""
_OF_MODEL = ("architecture_readable", "tokenizer_readable", "weights_readable")
"""Rules about the files that may say what the model is."""


def dry_run(config: Config, environ: Mapping[str, str], argv: Sequence[str]) -> int:
    """Check and describe the run that ``config``, read from ``argv``, and the variables of a launch ask for.

    Raises:
        ConfigError: the run cannot be.
        DataError: the file that says what the model is cannot be read.
    """
    run = planned(config, environ, argv)
    config = run.config
    preflight.raise_problems(config, world_size=run.world_size, hardware=run.hardware, only=needed(run))
    if config.job.print_config:
        print(config.to_toml())
    print("dry    nothing is trained, and no corpus or checkpoint is read")
    print(preflight.describe(config, world_size=run.world_size, hardware=run.hardware))
    for problem in preflight.check(config, world_size=run.world_size, hardware=run.hardware):
        why = one_line(f"{problem.key} = {problem.value!r}: {problem.rule}")
        print(f"note   a start here would end: {why}")
    print("\n".join(_describe_mesh(run)))
    if run.stages:
        print("\n".join(_describe_stages(run)))
    from toolkit.distributed.process_group import DTYPES
    from toolkit.planner.fake_step import step_memory
    from toolkit.planner.memory import holding
    from toolkit.planner.traffic import step_traffic

    assert run.mesh and run.model, "the preflight found nothing wrong with the config"
    alike = distinct(run)
    for rank in shown_ranks(environ, run.world_size, ",".join(map(str, alike))):
        options: dict[str, Any] = {"param_dtype": DTYPES[run.precision], "target": run.hardware.device}
        found = holding(config, run.model, run.mesh, rank, param_dtype=options["param_dtype"])
        step = step_memory(config, run.model, run.mesh, rank, **options)
        sent = step_traffic(config, run.model, run.mesh, rank, **options)
        print("\n".join(_describe_rank(run, found, step, sent, alike.get(rank, []))), flush=True)
    return EXIT_FINISHED


def planned(config: Config, environ: Mapping[str, str], argv: Sequence[str]) -> PlannedRun:
    """The run of all nodes; where their number may change, of the most that a mesh of the list has."""
    device = config.training.device
    ranks, (least, most) = world_size(environ, device), node_range(environ)
    if config.parallelism.elastic_meshes and least < most:
        from toolkit.preflight.several_nodes import largest_mesh

        flags, ranks = largest_mesh(config, ranks // most, least, most)
        config = load_config([*argv, *flags])
    return PlannedRun(config, ranks, target(environ, device))


def needed(run: PlannedRun) -> list[str]:
    """The rules that a description cannot do without: those of the config, and those about the files that say
    what the model is, where nothing else does."""
    found = [it.check.__name__ for it in preflight.rules_of(run) if it.error is ConfigError]
    unknown = run.model is None or (needs_tokenizer(run.config) and run.vocabulary is None)
    return [name for name in found if name not in _OF_THIS_MACHINE] + (list(_OF_MODEL) if unknown else [])


def world_size(environ: Mapping[str, str], device: str) -> int:
    """NGPU × NNODES as of a launch, else WORLD_SIZE as of torchrun, else what is here."""
    here, most = detect(device).count, MAX_RANKS
    if environ.get("NGPU") or environ.get("NNODES"):
        return whole_number(environ, "NGPU", here, 1, most) * node_range(environ)[1]
    return whole_number(environ, "WORLD_SIZE", here, 1, most)


def target(environ: Mapping[str, str], device: str) -> Hardware:
    """Choose the hardware that the run is meant for: GPUs such as are here, or any where there is none; the
    CPU if that is the ``device``, or if an empty CUDA_VISIBLE_DEVICES hides the GPUs."""
    here = detect(device)
    if device == "cpu" or here.device == "cuda" or "CUDA_VISIBLE_DEVICES" in environ:
        return here
    name = "GPUs, of which none is here"
    return replace(here, device="cuda", name=name, native_bf16=True, capability=9.0)


# The mesh


def strides(layout: ParallelDims) -> dict[str, int]:
    """How far apart in rank the neighbours in each dimension lie, outermost first."""
    found, stride = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        found[name] = stride
        stride *= getattr(layout, name)
    return dict(reversed(found.items()))


def coordinates(layout: ParallelDims, rank: int) -> dict[str, int]:
    """Where ``rank`` is in each dimension."""
    return {name: rank // stride % getattr(layout, name) for name, stride in strides(layout).items()}


def _used(layout: ParallelDims) -> dict[str, int]:
    return {name: stride for name, stride in strides(layout).items() if getattr(layout, name) > 1}


def _describe_mesh(run: PlannedRun) -> Iterator[str]:
    assert run.mesh
    if run.world_size == 1:
        return
    used = _used(run.mesh)
    formula = " + ".join(name if stride == 1 else f"{stride}·{name}" for name, stride in used.items())
    yield f"\nrank = {formula}; rank 0 is with"
    for name, stride in used.items():
        size = getattr(run.mesh, name)
        yield f"  {name:<12} {size:>5}  {_few([str(place * stride) for place in range(size)])}"


def _few(items: Sequence[str]) -> str:
    """``items``, of many the first ones and the last."""
    return ", ".join(items if len(items) <= _SHOWN + 1 else [*items[:_SHOWN], "…", items[-1]])


# The pipeline


def _describe_stages(run: PlannedRun) -> Iterator[str]:
    assert run.stages and run.mesh
    stride = strides(run.mesh)["pp"]
    yield f"\n{'stage':>5}  {'first rank':>10}  {'parameters':>15}  modules"
    owner = {stage: place for place, stages in enumerate(run.stages.of_ranks) for stage in stages}
    for stage, modules in enumerate(run.stages.modules):
        numbers = f"{_parameters(run, modules):,}"
        yield f"{stage:>5}  {owner[stage] * stride:>10}  {numbers:>15}  {_modules(modules)}"


def _parameters(run: PlannedRun, modules: Sequence[str]) -> int:
    """Numbers in the parameters of a stage; a tied head on another than the embedding is a copy of it."""
    assert run.model
    tied = run.model.tie_embeddings and "tok_embeddings" in modules
    sizes = {
        "tok_embeddings": run.model.vocab_size * run.model.dim,
        "norm": run.model.dim,
        "output": 0 if tied else head_parameters(run.model),
    }
    blocks = table(run.model).block_sizes
    return sum(sizes[name] if name in sizes else blocks[int(name.partition(".")[2])] for name in modules)


def _modules(names: Sequence[str]) -> str:
    """Names of modules, those of blocks with their numbers in one."""
    layers = [int(name.partition(".")[2]) for name in names if name.startswith("layers.")]
    others = [name for name in names if not name.startswith("layers.")]
    first = [name for name in others if name == "tok_embeddings"]
    shown = [f"layers {_ranges(layers)} ({len(layers)})" if len(layers) > 1 else f"layer {_ranges(layers)}"]
    return ", ".join([*first, *(shown if layers else []), *(name for name in others if name not in first)])


def _ranges(numbers: Sequence[int]) -> str:
    """0–3, 7 for 0, 1, 2, 3, 7."""
    runs = [list(group) for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ends)


def distinct(run: PlannedRun) -> dict[int, list[int]]:
    """The first rank of each pipeline rank whose stages are unlike those before, and the ranks like it."""
    if run.stages is None:
        return {0: []}
    assert run.mesh
    stride, stages = strides(run.mesh)["pp"], run.stages
    found: dict[object, list[int]] = {}
    for place, held in enumerate(stages.of_ranks):
        kinds = tuple(
            tuple("layers" if name.startswith("layers.") else name for name in stages.modules[stage])
            for stage in held
        )
        found.setdefault(kinds, []).append(place * stride)
    return {ranks[0]: ranks[1:] for ranks in found.values()}


# A rank


def _describe_rank(
    run: PlannedRun, found: Holding, step: StepMemory, sent: Sequence[Exchange], alike: Sequence[int]
) -> Iterator[str]:
    assert run.mesh
    place = coordinates(run.mesh, found.rank)
    where = ", ".join(f"{name} {place[name]}" for name in _used(run.mesh))
    stages = ""
    if run.stages:
        held = run.stages.of_ranks[place["pp"]]
        stages = f", {'stage' if len(held) == 1 else 'stages'} {' and '.join(map(str, held))}"
    yield f"\nrank {found.rank}{f' ({where})' if where else ''}{stages}"
    if alike:
        yield f"  alike: the ranks {_few([str(rank) for rank in alike])}"
    for name, size, said in [*_memory(run, found), *_of_step(step), *_sent(sent)]:
        yield f"  {name:<23} {_size(size):>11}  {said}".rstrip()
    rows = list(_rows(found.parts))
    width = max(len(name) for name, _, _ in rows)
    for name, whole, local in rows:
        yield f"  {name:<{width}}  {whole:>15} → {local}"


def _memory(run: PlannedRun, found: Holding) -> Iterator[tuple[str, int, str]]:
    """Bytes held, and where."""
    training, options = run.config.training, run.config.parallelism
    assert run.mesh and run.batch
    where = "in CPU memory" if training.enable_cpu_offload else ""
    stored = found.parameter_bytes
    gradients, said = found.gradient_bytes, where
    if run.config.optimizer.early_step_in_backward and run.mesh.dp_replicate == 1:
        gradients = max(unit.stored_gradients for unit in found.units) * BYTES[training.dtype]
        said = "of one unit"
    kept = "linear layers in NF4" if run.config.finetune.quantizes else training.dtype
    yield "parameters", stored, ", ".join(filter(None, [kept, where]))
    yield "gradients", gradients, said
    yield "optimizer state", found.optimizer_bytes, where
    yield "together", stored + gradients + found.optimizer_bytes, "without activations"
    dtype = run.precision
    largest = max(found.units, key=lambda unit: unit.bytes)
    pipeline = run.mesh.pp > 1
    yield "largest unit", largest.bytes, f"{largest.name}, gathered in {dtype}"
    if pipeline or reshard_after_forward(options) == "never":
        said = "gathered, until the step ends" if pipeline else "gathered, until backward"
        yield "all units", sum(unit.bytes for unit in found.units), said
    if pipeline or (not options.fsdp_sync_each_batch and run.batch.accumulation > 1):
        reduced = training.mixed_precision_reduce
        whole = sum(unit.gradients for unit in found.units)
        yield "whole gradients", whole * BYTES[reduced], f"{reduced}, until the step's last micro-batch"


def _of_step(step: StepMemory) -> Iterator[tuple[str, int, str]]:
    """The most that a step takes, and for what."""
    yield "peak of a step", step.peak, f"in {step.moment}"
    for part, size in sorted(step.parts.items(), key=lambda it: -it[1]):
        yield f"  {part}", size, ""


def _sent(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, int, str]]:
    """Bytes that go out over each dimension in a step, without the few of the whole world."""
    from toolkit.planner.traffic import WORLD

    sizes: dict[str, Counter[str]] = {}
    for exchange in exchanges:
        if exchange.dimension != WORLD:
            operation = exchange.operation.replace("_", "-")
            sizes.setdefault(exchange.dimension, Counter())[operation] += round(exchange.sent)
    for dimension, by_operation in sizes.items():
        each = ", ".join(f"{_size(size)} {operation}" for operation, size in by_operation.items())
        yield f"sent over {dimension}", by_operation.total(), f"a step: {each}"


def _rows(parts: Sequence[Part]) -> Iterator[tuple[str, str, str]]:
    """Name, whole and local shape; blocks with the same shapes in one row."""
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
