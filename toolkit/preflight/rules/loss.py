"""Rules about the loss of a token."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule


@rule()
def loss_of_tokens(run: PlannedRun) -> list[Problem]:
    """Losses of tokens are what a language model learns from."""
    config = run.config
    tuned = config.finetune
    if tuned.objective == "sft" and not tuned.classification.num_labels:
        return []
    other = "classes" if tuned.classification.num_labels else f'finetune.objective = "{tuned.objective}"'
    return [
        run.problem(field.key, f"the loss of {other} is another", "leave it out")
        for field in config.present_fields()
        if field.key.startswith("loss.") and config.value(field.key) != field.default
    ]
