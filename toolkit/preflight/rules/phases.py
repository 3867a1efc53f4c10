"""Rules for phases: their order, and what a run in phases needs. Each phase is also checked as a run."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.phases import phase_after, run_phases
from toolkit.errors import DataError, Problem, quote
from toolkit.models.from_config import weights_folder
from toolkit.preflight.planned_run import PlannedRun, note, rule


@rule()
def phases_follow_one_another(run: PlannedRun) -> Iterator[Problem]:
    """Check that each phase has steps of its own and changes something."""
    phases, steps = run.config.phases, run.config.training.steps
    mixture, first = run.config.data.mixture, run.config.in_phase("")
    taken: dict[int, str] = {}
    for name, phase in phases.items():
        key, start = f"phases.{name}.start_step", phase.start_step
        if not 1 <= start < steps:
            rule = f"the run has {steps} steps (training.steps), of which the phase has none"
            yield run.problem(key, rule, f"set it from 1 to {steps - 1}", "training.steps")
        elif start in taken:
            yield run.problem(key, f"phase {taken[start]} starts there too", "set another step")
        elif phase.weights.keys() <= mixture.keys() and run.config.in_phase(name) == first:
            fix = "set seq_len, global_batch_size, weights or another key to another value, or remove it"
            yield run.problem(key, "the phase changes nothing", fix)
        taken.setdefault(start, name)


@rule()
def phases_weigh_the_mixture(run: PlannedRun) -> Iterator[Problem]:
    """Check that phases weigh corpora of the mixture, and that each corpus is drawn in some phase."""
    phases, mixture = run.config.phases, run.config.data.mixture
    fix = f"use {', '.join(mixture)}" if mixture else "add [data.mixture.NAME] for each corpus"
    for name, phase in phases.items():
        for corpus in sorted(phase.weights.keys() - mixture):
            yield run.problem(f"phases.{name}.weights", f"there is no corpus [data.mixture.{corpus}]", fix)
    drawn = {corpus for phase in phases.values() for corpus, weight in phase.weights.items() if weight}
    fix = "give it a weight in [phases.NAME] weights, or remove it"
    for corpus in sorted(mixture.keys() - run.config.data.weights - drawn):
        yield run.problem(f"data.mixture.{corpus}.weight", "no phase draws from this corpus", fix)


@rule()
def run_supports_phases(run: PlannedRun) -> Iterator[Problem]:
    """Check that the run counts steps and saves checkpoints, from which each phase starts."""
    config = run.config
    checkpoint, schedule = config.checkpoint, config.lr_scheduler
    wrong = {
        "training.epochs": (bool(config.training.epochs), "phases begin at steps; set training.steps"),
        "checkpoint.enable": (not checkpoint.enable, "each phase starts from the checkpoint before it"),
        "checkpoint.load_only": (checkpoint.load_only, "each phase starts from the checkpoint before it"),
        "checkpoint.load_step": (
            checkpoint.load_step != -1,
            "to branch off, set checkpoint.initial_load_path and initial_load_model_only = false in another "
            "job.dump_folder",
        ),
        "data.streaming": (config.data.streaming, "a stream cannot change its rows; use a token cache"),
        "lr_scheduler.decay_type": (
            schedule.decay_type == "step" and schedule.step_size is None,
            "an epoch has other lengths in each phase; set lr_scheduler.step_size",
        ),
        "finetune.adapter": (
            config.finetune.adds
            and weights_folder(config) is None
            and config.checkpoint.initial_load_path is None
            and any(phase.rope_theta or phase.rope_scaling_factor for phase in config.phases.values()),
            "an adapter of random weights is tied to their model, and a phase changes its RoPE",
        ),
        "finetune.objective": (config.finetune.stores_reference, "the stored reference is of one row length"),
    }
    for key, (is_wrong, why) in wrong.items():
        if is_wrong:
            yield run.problem(key, f"[phases] are set: {why}", "change it, or remove [phases]")


@rule(DataError)
def resumed_phase_is_the_same(run: PlannedRun) -> list[Problem]:
    """Check that the checkpoint was saved in the phase that now has its step."""
    config, start = run.config, run.start
    if start.manifest is None or not start.resumes or "dataloader" in start.excluded:
        return []
    step, saved = start.step, (start.manifest["run"].get("loader") or {}).get("phase", "")
    phase = phase_after(config, step)
    if saved == phase.name or (step == phase.start and saved == phase.previous):
        return []
    names = [f"phase {name}" if name else "the first phase" for name in (saved, phase.name)]
    key = f"phases.{phase.name or saved}.start_step" if phase.name or saved in config.phases else "phases"
    rule = f"step {step} of the checkpoint {start.loaded} is of {names[0]}, and now it is of {names[1]}"
    fix = f"restore the phases up to step {step}, or restart the data {start.anew('dataloader')}"
    return [run.problem(key, rule, fix)]


@note
def phase_notes(run: PlannedRun) -> Iterator[str]:
    """Note what each phase sets."""
    for phase in run_phases(run.config)[1:]:
        values = run.config.phases[phase.name].values().items()
        changes = ", ".join(f"{key} {quote(value)}" for key, value in values)
        yield f"phase {phase.name} from step {phase.start + 1} to {phase.end}: {changes}"
