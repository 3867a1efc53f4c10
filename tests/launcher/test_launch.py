"""The environment of a launch says what it may, and the rest is refused before any rank starts."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit.launch
from toolkit.errors import ConfigError
from toolkit.hardware import Hardware, _visible_gpus
from toolkit.launch import launch_from
from toolkit.launcher.environment import RankEnvironment, rank_environment, slurm_rank
from toolkit.launcher.node_link import Link

ROOT = Path(__file__).parents[2]
CPU = Hardware("cpu", "CPU", 2, native_bf16=False)
SMALL = [
    "--job.config_file=train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=1",
    "--model.n_heads=4", "--training.seq_len=64", "--training.global_batch_size=4",
    "--training.local_batch_size=2", "--training.dataset=embedded_validation", "--training.steps=3",
    "--validation.enable=false", "--metrics.log_freq=1",
]  # fmt: skip
GPUS = Hardware("cuda", "H100", 4, native_bf16=True)


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
    ("visible", "found"),
    [
        ("0,1", "ab"),
        ("0,", "a"),
        ("1,7,0", "b"),  # CUDA stops at what it does not know
        ("GPU-1,0", "ba"),
        ("GPU", ""),
    ],
)
def test_gpus_are_counted_as_cuda_does(visible: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    listing = "0, GPU-0f, a, 9.0, 81559\n1, GPU-1e, b, 9.0, 81559\n"
    done = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert "".join(name for name, _, _ in _visible_gpus()) == found


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"NGPU": "two"}, "NGPU"),
        ({"NGPU": "0"}, "NGPU"),
        ({"NGPU": "8"}, "NGPU"),
        ({"NNODES": "-1"}, "NNODES"),
        ({"NNODES": "2:"}, "NNODES"),
        ({"NNODES": "4:1"}, "NNODES"),
        ({"NNODES": "x:1"}, "NNODES"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2"}, "MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a:29501"}, "MASTER_ADDR"),
        ({"NODE_RANK": "1"}, "NODE_RANK"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"LOG_RANK": "all"}, "LOG_RANK"),
        ({"LOG_RANK": "4,5"}, "LOG_RANK"),
        ({"SHUTDOWN_TIMEOUT": "1.5h"}, "SHUTDOWN_TIMEOUT"),
        ({"SHUTDOWN_TIMEOUT": "9999999999"}, "SHUTDOWN_TIMEOUT"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(said, name):
    with pytest.raises(ConfigError) as caught:
        launch_from(said, GPUS)
    (problem,) = caught.value.problems
    assert problem.key == name and problem.value == said.get(name, "")
    assert problem.rule and problem.fix


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "a:29501"}, "set MASTER_ADDR=a MASTER_PORT=29501"),
        ({"NODE_RANK": "1"}, "set NNODES to the number of nodes, or unset NODE_RANK"),
    ],
)
def test_what_belongs_in_another_variable_is_told_which(said, fix):
    with pytest.raises(ConfigError) as caught:
        launch_from(said, GPUS)
    assert caught.value.problems[0].fix == fix


@pytest.mark.parametrize("address", ["node0", "10.0.0.1", "fe80::1", "::1"])
def test_an_address_is_taken_as_it_is(address):
    assert launch_from({"NNODES": "2", "MASTER_ADDR": address}, GPUS).master_addr == address


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


@pytest.mark.parametrize(
    ("flags", "said", "told"),
    [(["--training.stepz=5"], {}, "training.stepz"), (SMALL, {"NGPU": "many"}, "NGPU = 'many'")],
)
def test_node_0_is_told_of_a_node_that_does_not_come(flags, said, told, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        port = str(node_0.getsockname()[1])
        here = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (here | said).items():
            monkeypatch.setenv(name, value)
        assert toolkit.launch.main(flags) == 2
        node_0.settimeout(5)  # it has come by now, if it comes
        message = Link(node_0.accept()[0], 5).receive()
    assert (message["kind"], message["node"], message["code"]) == ("leave", 1, 2)
    assert told in message["text"]


def test_a_console_that_goes_ends_no_run(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.launch", *SMALL, f"--job.dump_folder={tmp_path}/run"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "NGPU": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("model")
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(timeout=120) == 0, told
    assert "standard output cannot be written" in told and "Traceback" not in told
    assert (tmp_path / "run/checkpoint/step-3").is_dir()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert sum("console_lost" in record for record in records) == 1


@pytest.mark.parametrize(
    ("program", "said", "name"),
    [
        ("toolkit.train", {"RANK": "abc"}, "RANK"),
        ("toolkit.train", {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ("toolkit.train", {"WORLD_SIZE": "2"}, "RANK"),
        ("toolkit.train", {"RANK": "3"}, "RANK"),  # left in a shell, without WORLD_SIZE
        ("toolkit.train", {"WORLD_SIZE": "2", "RANK": "5"}, "RANK"),
        ("toolkit.preflight", {"WORLD_SIZE": "-1"}, "WORLD_SIZE"),
        ("toolkit generate .", {"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ("toolkit chat .", {"RANK": "abc"}, "RANK"),
    ],
)
def test_a_process_that_cannot_know_its_place_says_so(program, said, name):
    result = subprocess.run(
        [sys.executable, "-m", *program.split()], cwd=ROOT, env=os.environ | said,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert f"{name} = '{said.get(name, '')}'" in result.stderr and "Traceback" not in result.stderr


def test_a_refusal_is_the_last_thing_that_torchrun_prints():
    words = ["--nproc_per_node=2", "--master_port=0", "-m", "toolkit.train", "--training.stepz=5"]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    _, cause = result.stderr.split("Root Cause (first observed failure)")
    assert "training.stepz" in cause and "fix:" in cause
    assert len(cause.splitlines()) < 15


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_one_that_is_not_set(value):
    environ = dict.fromkeys(["WORLD_SIZE", "RANK", "LOCAL_RANK"], value)
    assert rank_environment(environ) == RankEnvironment(0, 0, 1)


def test_a_rank_beyond_the_world_is_refused():
    with pytest.raises(ConfigError, match="below 2"):
        rank_environment({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_before_the_ranks_start_says_so_and_may_be_started_again(number, monkeypatch, capsys):
    monkeypatch.setattr(toolkit.launch, "open_data", lambda *_, **__: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert toolkit.launch.main([*SMALL, "--checkpoint.enable=false"]) == 75
    assert f"{number.name}: stopped before the ranks started" in capsys.readouterr().err
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("program", ["toolkit.launch", "toolkit.train"])
def test_an_interrupt_of_the_imports_shows_no_traceback(program):
    code = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "toolkit.config":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("{program}", run_name="__main__")
"""
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


def test_the_launcher_never_imports_torch():
    code = "import sys, toolkit.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


SRUN = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "rack2-gpu[03-04],login",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
"""The variables of one of the tasks that srun starts."""


@pytest.mark.parametrize(
    ("host", "nodes"),
    [
        ("rack2-gpu03", "rack2-gpu[03-04],login"),
        ("gpu7", "gpu7,gpu[1-3]"),
        ("a1b02", "a[1-2]b[02,05]"),
        ("node9", "node[9,12-13]"),
    ],
)
def test_tasks_of_srun_are_ranks_that_meet_on_the_first_host(host, nodes):
    found = slurm_rank(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert rank_environment(found) == RankEnvironment(rank=3, local_rank=1, world_size=4)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (host, str(20000 + 70125 % 20000))
    assert found["LOCAL_WORLD_SIZE"] == "2"


def test_tasks_of_srun_keep_what_is_set():
    said = {"MASTER_ADDR": "there", "MASTER_PORT": "5", "CUDA_VISIBLE_DEVICES": "3"}
    found = slurm_rank(SRUN | said)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["LOCAL_RANK"]) == ("there", "5", "0")
    assert slurm_rank(SRUN | {"SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # of torchrun or of toolkit.launch, under one task a node
        {"WORLD_SIZE": "1"},  # asked for
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
    ],
)
def test_other_processes_of_a_slurm_job_are_no_such_tasks(said):
    assert slurm_rank(SRUN | said) == {}


def test_a_shell_at_a_terminal_is_no_such_task(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert slurm_rank(SRUN) == {}


def test_tasks_of_srun_that_would_each_launch_a_run_are_refused():
    with pytest.raises(ConfigError, match="srun starts 4 tasks, and each would launch a run of its own"):
        launch_from(SRUN, CPU)
    assert launch_from(SRUN | {"NNODES": "1"}, CPU).nodes == 1
    assert launch_from(SRUN | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, CPU).node_rank == 1
    assert launch_from({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, CPU).nodes == 1
