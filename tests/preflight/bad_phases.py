"""Runs that break the rules of ``rules.phases``, and phases that break the rules of a run."""

from __future__ import annotations

from typing import Any

from tests.preflight.bad_runs import Bad, bad, save

START, LATER = "phases.long.start_step=100", "phases.more.start_step=200 phases.more.local_batch_size=4"
LONG = f"{START} phases.long.seq_len=512"
CODE = "data.mixture.code.dataset=embedded data.mixture.code"
WEB = "data.mixture.web.dataset=embedded_validation"
SAVED = "checkpoint.enable=true"


def _case(rule: str, flags: str, *says: str, **options: Any) -> Bad:
    """A run that saves checkpoints, so that it may have phases."""
    return bad(rule, f"{flags} {SAVED}", *says, **options)


def _saved(step: int, phase: str) -> Any:
    loader = {"phase": phase, "seq_len": 512 if phase else 256}
    return lambda folder: save(folder, step, loader=loader)


CASES: list[Bad] = [
    _case("phases_follow_one_another", "phases.long.seq_len=512", "set it from 1 to 9999",
          key="phases.long.start_step"),
    _case("phases_follow_one_another", f"training.steps=100 {LONG}", "the run has 100 steps",
          key="phases.long.start_step"),
    _case("phases_follow_one_another", f"{LONG} {LATER.replace('200', '100')}", "phase long starts there too",
          key="phases.more.start_step"),
    _case("phases_follow_one_another", START, "the phase changes nothing"),
    _case("phases_follow_one_another", f"{START} phases.long.seq_len=256", "the phase changes nothing"),
    _case("phases_weigh_the_mixture", f"phases.long.weights=web=1 {START}", "no corpus [data.mixture.web]"),
    _case("phases_weigh_the_mixture", f"phases.long.weights=web=1 {START} {CODE}.weight=1", "use code"),
    _case("phases_weigh_the_mixture", f"data.mixture.web.weight=0 {WEB} {LONG} {CODE}.weight=1",
          "no phase draws from this corpus"),
    _case("run_supports_phases", f"training.epochs=2 {LONG}", "set training.steps"),
    bad("run_supports_phases", f"checkpoint.enable=false {LONG}", "starts from the checkpoint before it"),
    _case("run_supports_phases", f"checkpoint.load_only=true {LONG}", "starts from the checkpoint before it"),
    _case("run_supports_phases", f"finetune.adapter=lora {START} phases.long.rope_theta=1e6",
          "changes its RoPE"),
    _case("run_supports_phases", f"checkpoint.load_step=5 {LONG}", "another job.dump_folder",
          prepare=_saved(5, "")),
    _case("run_supports_phases", f"lr_scheduler.decay_type=step {LONG}", "set lr_scheduler.step_size"),
    _case("run_supports_phases", f"data.streaming=true {LONG}", "use a token cache"),
    _case("resumed_phase_is_the_same", f"phases.long.start_step=100 {LONG}", "is of the first phase, and now",
          prepare=_saved(150, "")),
    _case("resumed_phase_is_the_same", f"phases.long.start_step=200 {LONG.replace('100', '200')}",
          "is of phase long, and now it is of the first phase", prepare=_saved(150, "long")),
]  # fmt: skip

OF_ONE_PHASE: list[Bad] = [
    _case("batch_divides", f"phases.long.global_batch_size=15 {START}", "data-parallel degree 2",
          key="training.global_batch_size", world=2),
    _case("sequence_fits_model", f"phases.long.seq_len=4096 {START} model.max_seq_len=2048", "at most 2048",
          key="training.seq_len"),
    _case("data_position_fits", f"phases.long.seq_len=1024 {START}", "was counted with 512",
          key="training.seq_len", prepare=_saved(150, "long")),
    _case("mixture_weights_fit", f"phases.long.weights=code=0 {START} {CODE}.weight=1",
          "no corpus has a weight above 0", key="data.mixture.code.weight"),
]  # fmt: skip
