"""Every check of a run that needs no process group and no torch: ``python -m toolkit.preflight CONFIG.toml``.

Each rule is a function registered by ``@rule`` in one of the ``rules_*`` files; ``RULES`` has them all.
A mistake in the config ends in exit code 2. A tokenizer, corpus or checkpoint that cannot be used ends
in 3 when nothing in the config itself is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from toolkit.config import Config
from toolkit.errors import ConfigError, Problem, one_line
from toolkit.hardware import Hardware, detect
from toolkit.models.llama.presets import parameter_count
from toolkit.parallel.dims import Degrees, strategy_in_effect
from toolkit.preflight import (
    rules_attention,
    rules_checkpoint,
    rules_corpora,
    rules_files,
    rules_memory,
    rules_mesh,
    rules_mixture,
    rules_model,
    rules_observing,
    rules_optim,
    rules_options,
    rules_pipeline,
    rules_sharding,
    rules_stages,
    rules_tensor,
    rules_weights,
)
from toolkit.preflight.facts import RULES, Rule, Run

__all__ = ["RULES", "check", "describe", "notes", "run", "summary"]

# What was asked for, what it is, where it runs, what it reads: the order in which a reader wants problems.
_ORDER = (
    rules_options,
    rules_optim,
    rules_memory,
    rules_observing,
    rules_model,
    rules_attention,
    rules_mesh,
    rules_tensor,
    rules_stages,
    rules_pipeline,
    rules_sharding,
    rules_files,
    rules_corpora,
    rules_mixture,
    rules_checkpoint,
    rules_weights,
)


def check(config: Config, *, world_size: int, hardware: Hardware) -> list[Problem]:
    """Return every rule that ``config`` breaks on ``world_size`` ranks of ``hardware``."""
    return [problem for _, problem in _broken(Run(config, world_size, hardware))]


def run(
    config: Config, *, world_size: int, hardware: Hardware | None = None, only: Collection[str] = ()
) -> None:
    """Check ``config``; without ``hardware``, for the devices that are here; ``only`` names rules.

    Raises:
        ConfigError: a rule about the config itself is broken; it names the others as well.
        DataError, CheckpointError: only tokenizer, corpus or checkpoint cannot be used.
    """
    broken = _broken(Run(config, world_size, hardware or detect(config.training.device)), only)
    problems = [problem for _, problem in broken]
    errors = [rule.error for rule, _ in broken]
    if ConfigError in errors:
        raise ConfigError(problems)
    if errors:
        raise errors[0]("\n".join(map(str, problems)))  # type: ignore[arg-type]  # ConfigError went above


def check_and_tell(config: Config, *, world_size: int, hardware: Hardware, tell: bool = True) -> None:
    """:func:`run`; then, where ``tell``, print what is about to run.

    Raises:
        ConfigError, DataError, CheckpointError: as :func:`run` does.
    """
    run(config, world_size=world_size, hardware=hardware)
    if not tell:
        return
    if config.job.print_config:
        print(config.to_toml())
    print(describe(config, world_size=world_size, hardware=hardware), flush=True)


def _broken(facts: Run, only: Collection[str] = ()) -> list[tuple[Rule, Problem]]:
    rules = [rule for file in _ORDER for rule in RULES.values() if rule.check.__module__ == file.__name__]
    chosen = [rule for rule in rules if not only or rule.check.__name__ in only]
    return [(rule, problem) for rule in chosen for problem in rule.check(facts)]


def notes(config: Config, *, world_size: int, hardware: Hardware) -> list[str]:
    """Say what is allowed but may surprise."""
    facts = Run(config, world_size, hardware)
    training = config.training
    said = [
        *rules_options.options_notes(facts),
        *rules_optim.optim_notes(facts),
        *rules_attention.attention_notes(facts),
        *rules_tensor.tensor_notes(facts),
        *rules_pipeline.pipeline_notes(facts),
        *rules_sharding.sharding_notes(facts),
        *rules_corpora.corpora_notes(facts),
        *rules_mixture.mixture_notes(facts),
        *rules_observing.observing_notes(facts),
        *rules_checkpoint.checkpoint_notes(facts),
        *rules_weights.weights_notes(facts),
    ]
    if facts.mesh and facts.batch:
        total, local, per_rank = facts.batch.total, facts.batch.local, facts.batch.total // facts.mesh.dp
        if training.global_batch_size == -1:
            said.append(
                f"training.global_batch_size is -1, which on this mesh is {total}; "
                f"set it to {total} to have the same run on any mesh"
            )
        if facts.pp == 1 and local < min(training.local_batch_size, per_rank):
            said.append(
                f"the {per_rank} samples of a rank are taken {local} at a time: "
                f"training.local_batch_size {training.local_batch_size} does not divide them"
            )
    validation = config.validation
    if facts.mesh and validation.enable and validation.steps != -1:
        samples = validation.steps * validation.local_batch_size * facts.mesh.dp
        said.append(
            f"validation.steps are batches of each rank, on this mesh {samples} samples in all; set "
            f"validation.samples to {samples} in its place to have the same loss on any mesh"
        )
    if training.mixed_precision_output != "auto":
        said.append("training.mixed_precision_output is for logits, of which a training hands out none")
    if config.compile.enable:
        said.append(
            "the first step compiles, some minutes at most; the code is kept in compile.cache_folder "
            f"({config.compile.cache_folder}) for the next start"
        )
    asks_bf16 = "bfloat16" in (training.dtype, training.mixed_precision_param)
    if asks_bf16 and hardware.device == "cpu" and not hardware.native_bf16:
        said.append("this CPU does not multiply bfloat16 natively: float32 is faster here")
    return said


def summary(config: Config, *, world_size: int, hardware: Hardware) -> str:
    """Describe a run that passed :func:`check`: model, mesh, techniques, batch."""
    facts = Run(config, world_size, hardware)
    model, mesh, batch = facts.model, facts.mesh, facts.batch
    assert model is not None and mesh is not None and batch is not None
    cut = f"{mesh.dp} data-parallel × {batch.local} local × {batch.accumulation} accumulated"
    if facts.pp > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
        cut = f"{mesh.dp} data-parallel × {facts.micro_batches} micro-batches of {size}"
    return "\n".join(
        [
            f"model  {facts.model_named}, {parameter_count(model):,} parameters",
            f"mesh   {mesh} on {hardware.name}",
            f"with   {', '.join(_techniques(facts, mesh))}",
            f"batch  {batch.total} samples ({cut}) of {config.training.seq_len} tokens",
        ]
    )


def _techniques(facts: Run, mesh: Degrees) -> Iterator[str]:
    """How the model is sharded, computed and made to fit."""
    options, checkpointing = facts.config.parallelism, facts.config.activation_checkpoint
    yield strategy_in_effect(options, mesh)
    if mesh.pp > 1:
        file = options.pipeline_parallel_schedule_csv
        yield f"schedule {f'of {file}' if file else options.pipeline_parallel_schedule}"
    every = checkpointing.selective_ac_option
    modes = {
        "none": "all activations kept",
        "full": "every block recomputed",
        "selective": "recomputed by operator" if every == "op" else f"one block of {every} recomputed",
        "memory_budget": f"recomputed to a memory budget of {checkpointing.memory_budget:g}",
    }
    yield modes[checkpointing.mode]
    yield f"{rules_attention.attention_of(facts)} attention"
    yield "compiled" if facts.config.compile.enable else "eager"


def describe(config: Config, *, world_size: int, hardware: Hardware) -> str:
    """:func:`summary`, and a line for each of :func:`notes`."""
    said = notes(config, world_size=world_size, hardware=hardware)
    return "\n".join(
        [summary(config, world_size=world_size, hardware=hardware), *(f"note   {one_line(n)}" for n in said)]
    )
