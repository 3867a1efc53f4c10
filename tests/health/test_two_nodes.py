"""Two nodes train, of which one has a rank that is slow, has a NaN, and hangs: it is named each time."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.nodes import cluster, eventually, why_not
from tests.sabotage import sabotage

ROOT = Path(__file__).parents[2]
SABOTAGED = """
def sabotaged(call):
    calls, seconds, launcher = 0, 0.0, os.getppid()

    def step(self, batches, **options):
        nonlocal calls, seconds
        calls += 1
        started = time.monotonic()
        if calls in (4, 5):  # which takes three times as long as the one before, and more
            time.sleep(max(0.5, 2.5 * seconds))
        if calls == 7:
            self.model_parts.models[0].layers["1"].feed_forward.w2.register_forward_hook(
                lambda module, args, output: output * float("nan") if calls == 7 else None
            )
        while calls == 9:
            time.sleep(0.01)
            if os.getppid() != launcher:
                os._exit(1)
        result = call(self, batches, **options)
        seconds = time.monotonic() - started
        return result

    return step
"""
RUN = [
    "--job.config_file=train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=2",
    "--model.n_heads=4", "--training.seq_len=64", "--training.global_batch_size=4",
    "--training.local_batch_size=2", "--training.dataset=embedded_validation", "--training.steps=100",
    "--validation.enable=false", "--checkpoint.enable=false", "--metrics.log_freq=1",
    "--comm.train_timeout_seconds=6", "--health.straggler_factor=2", "--health.nan_policy=skip",
    "--health.heartbeat_seconds=0.001",
]  # fmt: skip


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(300)
def test_slow_unsound_and_hung_ranks_are_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        sabotage("toolkit.train_step:TrainStep.__call__", SABOTAGED, rank=1)
    )
    flags = [*RUN, f"--job.dump_folder={tmp_path}/run", f"--data.cache_folder={tmp_path}/cache"]
    with cluster(2, tmp_path / "logs") as made:
        started = [node.launch(*flags, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") for node in made.nodes]
        codes = [one.wait(280) for one in started]
        assert eventually(lambda: not any(node.processes() for node in made.nodes), 10)
    told = started[0].text
    assert codes == [1, 1], told
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Whether the other one is slow at some moment depends on what else the machine does.
    slow = [line for line in lines if line.get("straggler") == 1 and line["step"] in (4, 5)]
    assert slow and "rank 1 on host1 takes" in slow[0]["reason"], told
    (skipped,) = [line for line in lines if line.get("event") == "SKIPPED"]
    assert skipped["step"] == 7
    assert "began in layers.1.feed_forward.w2 on rank 1 (dp_shard 1), micro-batch 1" in skipped["reason"]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 9)]
    assert re.search(r"rank 1 .*did not take part in .*, for which rank 0 waited \d+ s, in step 9", told), (
        told
    )
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert (beat["step"], beat["state"], beat["rank"], beat["host"]) == (8, "failed", 0, "host0")
