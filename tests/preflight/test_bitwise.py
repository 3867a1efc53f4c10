"""A registered optimizer, which flags name only after an import, is rejected in a bitwise run."""

from __future__ import annotations

import pytest

from tests.preflight.bad_bitwise import ON
from tests.preflight.bad_runs import CPU, configure
from toolkit.preflight.planned_run import PlannedRun
from toolkit.preflight.rules.bitwise import bitwise_data_parallel_runs


@pytest.mark.parametrize(("name", "rejected"), [("AdamW8bit", False), ("Mine", True)])
def test_registered_optimizers_are_rejected(name: str, rejected: bool) -> None:
    config = configure([f"--{flag}" for flag in ON.split()])
    optimizer = config.optimizer.model_copy(update={"name": name})
    run = PlannedRun(config.model_copy(update={"optimizer": optimizer}), 1, CPU)
    said = [str(problem) for problem in bitwise_data_parallel_runs(run)]
    assert len(said) == rejected
    assert all("the update of a registered optimizer" in text for text in said)
