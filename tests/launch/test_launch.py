"""What the environment of a launch may say, and what is refused before any rank starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ConfigError
from toolkit.hardware import Hardware
from toolkit.launch import launch_from

ROOT = Path(__file__).parents[2]
CPU = Hardware("cpu", "CPU", 2, native_bf16=False, float8=False)
GPUS = Hardware("cuda", "H100", 4, native_bf16=True, float8=True)


def test_defaults_are_the_devices_here_and_rank_0_shown():
    launch = launch_from({}, GPUS)
    assert (launch.processes, launch.world_size, launch.shown) == (4, 4, frozenset({0}))
    assert launch_from({"NGPU": "3"}, CPU).processes == 3  # a CPU has room for any number
    assert launch_from({"NGPU": "", "LOG_RANK": ""}, GPUS) == launch  # as in a shell's ${LOG_RANK:-0}


def test_one_of_several_nodes():
    said = {"NGPU": "4", "NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node0", "LOG_RANK": "0, 9"}
    launch = launch_from(said, GPUS)
    assert list(launch.ranks) == [8, 9, 10, 11] and launch.world_size == 12
    assert (launch.master_addr, launch.master_port) == ("node0", 29500)
    assert launch.shown == {0, 9}


def test_a_single_node_meets_at_home_whatever_an_outer_job_exports():
    launch = launch_from({"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"}, CPU)
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 0)  # 0: a free one


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"NGPU": "two"}, "NGPU"),
        ({"NGPU": "0"}, "NGPU"),
        ({"NGPU": "8"}, "NGPU"),
        ({"NNODES": "-1"}, "NNODES"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2"}, "MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"LOG_RANK": "all"}, "LOG_RANK"),
        ({"LOG_RANK": "4,5"}, "LOG_RANK"),
        ({"SHUTDOWN_TIMEOUT": "1.5h"}, "SHUTDOWN_TIMEOUT"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(said, name):
    with pytest.raises(ConfigError) as caught:
        launch_from(said, GPUS)
    (problem,) = caught.value.problems
    assert problem.key == name and problem.value == said.get(name, "")
    assert problem.rule and problem.fix


def _launch(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the launcher; returns how it ended and the processor time, which other load does not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", "toolkit.launch", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_wrong_config_ends_before_any_rank_starts():
    result, seconds = _launch("--training.stepz", "5")
    assert result.returncode == 2
    assert result.stderr.count("error:") == 1 and "training.stepz" in result.stderr
    assert "starting" not in result.stderr and "Traceback" not in result.stderr
    assert seconds < 2  # a second, and the interpreter's start


def test_a_wrong_environment_ends_before_any_rank_starts():
    result, _ = _launch(NGPU="many")
    assert result.returncode == 2
    assert "NGPU = 'many'" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", "0")])
def test_a_rank_that_cannot_know_its_place_says_so(name, value):
    result = subprocess.run(
        [sys.executable, "-m", "toolkit.train"], cwd=ROOT, env=os.environ | {name: value},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2
    assert f"{name} = '{value}'" in result.stderr and "Traceback" not in result.stderr


def test_the_launcher_never_imports_torch():
    code = "import sys, toolkit.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
