"""Ranks that die, stop and loop in the middle of training: who is named, how soon all ends, what is left.

The fault is made where it is asked for, by a rank itself: a module that Python imports at its start
(``sitecustomize``) puts it into a method of the toolkit. So it does not depend on the moment of a signal.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import free_port
from tests.sabotage import sabotage
from toolkit.launcher.fault_reporter import PATIENCE_SECONDS
from toolkit.launcher.supervisor import Launch

ROOT = Path(__file__).parents[2]
TIMEOUT = 10  # of one wait for a peer, in steps that take tenths of a second: enough on a busy machine
TORCHRUN_SECONDS = 30  # that it gives ranks to end before it kills them
LOAD = 30  # seconds for what processes do beside waiting, on a busy machine
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),  # most of it for starting: four ranks import torch
]
SABOTAGED = """
def sabotaged(method):
    calls = 0

    def sabotage(*args):
        nonlocal calls
        calls += 1
        if calls == 2:
            with open(os.environ["FAULT_FILE"], "w") as file:
                file.write(str(time.monotonic()))
            FAULT
        return method(*args)

    return sabotage
"""
BACKWARD = "toolkit.parallel.pipeline_parallel:Pipeline.backward"
SAVE = "toolkit.checkpoint.dcp_storage:CommittingWriter.write_data"
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "looping": "exec('while True: time.sleep(0.01)', {'time': time})",
}
RUN = [
    "--job.config_file=train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=2",
    "--model.n_heads=4", "--training.seq_len=64", "--training.global_batch_size=4",
    "--training.local_batch_size=2", "--training.dataset=embedded_validation", "--training.steps=100000",
    "--validation.enable=false", "--checkpoint.enable=false", "--metrics.log_freq=1",
    "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_microbatch_size=1", f"--comm.train_timeout_seconds={TIMEOUT}",
]  # fmt: skip


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float  # since the fault


def _with_marker(marker: str) -> list[int]:
    """The processes that have inherited this from the launch."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _run(words: list[str], tmp_path: Path, fault: str, rank: int, *flags: str, at: str = BACKWARD) -> Ended:
    """Train on pp 2 × tp 2 with ``rank`` at fault in its second call of ``at``: of backward, in the second
    step, the first with the short time-out."""
    marker = f"FAULT_FILE={tmp_path}/fault"
    text = sabotage(at, SABOTAGED.replace("FAULT\n", FAULTS[fault] + "\n"), rank=rank)
    (tmp_path / "sitecustomize.py").write_text(text)
    name, _, value = marker.partition("=")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            *words,
            *RUN,
            *flags,
            f"--job.dump_folder={tmp_path}",
            f"--data.cache_folder={tmp_path}/cache",
        ],
        cwd=ROOT,
        env=os.environ | {name: value, "PYTHONPATH": path, "NGPU": "4", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=580)
        ended = time.monotonic()
        assert not _with_marker(marker), "a process is left"
    finally:
        for pid in _with_marker(marker):
            os.kill(pid, 9)
    started = float((tmp_path / "fault").read_text())
    return Ended(process.returncode, out, err, ended - started)


def _launch(tmp_path: Path, fault: str, rank: int, *flags: str, at: str = BACKWARD) -> Ended:
    ended = _run(["toolkit.launch"], tmp_path, fault, rank, *flags, at=at)
    assert ended.code == 1, ended.err
    assert ended.seconds < TIMEOUT + Launch(1).peer_grace + Launch(1).kill_grace + LOAD
    return ended


def test_a_killed_rank_is_named_and_ends_all_at_once(tmp_path: Path) -> None:
    ended = _launch(tmp_path, "killed", 3)
    local = rf"\(local rank 3 on {re.escape(socket.gethostname())}\)"
    assert re.search(rf"^launch: rank 3 {local} was ended by SIGKILL .* in step 2$", ended.err, re.MULTILINE)
    assert "Traceback" not in ended.err and "has not said" not in ended.err
    assert ended.err.count("communication failed") == 1  # of the shown rank


def test_a_stopped_rank_is_named_with_what_it_missed(tmp_path: Path) -> None:
    # The shown one, which also has the store.
    ended = _launch(tmp_path, "stopped", 0)
    said = (
        r"launch: rank 0 \(pp 0, tp 0\) did not take part in \w+ number \d+ of the group tp \(ranks 0, 1\), "
    )
    said += r"for which rank 1 waited \d+ s, in step 2; it is stopped"
    assert re.search(said, ended.err), ended.err
    # It waits for rank 0, the last one for rank 1.
    assert re.search(r"  rank 2 waited .*in a transfer of the group pp \(ranks 0, 2\)", ended.err), ended.err
    assert "Traceback" not in ended.err
    traces = {path.name for path in (tmp_path / "comm_traces").iterdir()}
    assert {"rank_1.json", "rank_2.json", "rank_3.json"} <= traces


@pytest.mark.slow
def test_a_rank_that_is_stopped_inside_a_save_is_named(tmp_path: Path) -> None:
    flags = ["--checkpoint.enable", "--checkpoint.interval=1", f"--comm.save_timeout_seconds={TIMEOUT}"]
    # What ranks wait for each other in steps would take too long.
    ended = _launch(tmp_path, "stopped", 3, *flags, "--comm.train_timeout_seconds=500", at=SAVE)
    said = (
        r"rank 3 \(pp 1, tp 1\) did not take part in \w+ number \d+ of the group files \(ranks 0, 1, 2, 3\), "
    )
    assert re.search(said + r"for which ranks 0, 1, 2 waited .* in step 2; it is stopped", ended.err), (
        ended.err
    )
    assert "Traceback" not in ended.err and "NOT SAVED" not in ended.out
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-?")] == ["step-1"]


@pytest.mark.slow
def test_a_looping_rank_says_where(tmp_path: Path) -> None:
    ended = _launch(tmp_path, "looping", 1)
    said = (
        r"launch: rank 1 \(pp 0, tp 1\) did not take part in \w+ number \d+ of the group tp \(ranks 0, 1\), "
    )
    said += r"for which rank 0 waited \d+ s, in step 2; it was in step 2, at toolkit/train_step\.py:\d+"
    assert re.search(said, ended.err), ended.err
    assert "SIGKILL" not in ended.err and "Traceback" not in ended.err


@pytest.mark.slow
def test_under_torchrun_the_survivors_name_the_stopped_rank(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--nproc_per_node=4", "--nnodes=1", "--rdzv_id=101"]
    words += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "-m", "toolkit.train"]
    ended = _run(words, tmp_path, "stopped", 2)
    assert ended.code == 1
    said = r"rank 2 \(pp 1, tp 0\) did not take part in \w+ number \d+ of the group tp \(ranks 2, 3\)"
    assert len(re.findall(said, ended.err)) == 1, ended.err
    assert ended.seconds < TIMEOUT + PATIENCE_SECONDS + TORCHRUN_SECONDS + LOAD
