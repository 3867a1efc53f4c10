"""The check of a cluster: one table, and a verdict that names what is wrong with whom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nodes import PORT, cluster, why_not
from toolkit.cli import run_command
from toolkit.commands import check_cluster
from toolkit.commands.check_cluster import Link, Node

ROOT = Path(__file__).parents[2]
NODE = Node("a", [0, 1], "H100, 80 GiB", {"torch": "2.13", "NCCL": "2.27.5"}, 0.0, 9e8, 2e9, "")
CONFIG = ["train_configs/debug_model.toml", "--mib=1", "--parallelism.tensor_parallel_degree=2"]


def test_machines_that_are_alike_have_no_problems() -> None:
    nodes = [NODE, replace(NODE, host="b", ranks=[2, 3], clock=0.2, write=5e8)]
    links = [Link("tp", 2, 1e11, [0, 1], 1.9e11)]
    assert check_cluster.problems(nodes, links) == []
    text = check_cluster.table(nodes, links)
    assert "torch 2.13" in text and re.search(r"^b +2-3 +H100, 80 GiB +\+0.200 s +500 MB/s", text, re.M)
    assert re.search(r"^tp +2 +100.00 GB/s +190.00 GB/s +0, 1$", text, re.M)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"versions": {"torch": "2.12", "NCCL": "2.27.5"}}, "b is unlike a: torch 2.12 (there 2.13)"),
        ({"device": "A100, 40 GiB"}, "b has A100, 40 GiB, and a has H100, 80 GiB"),
        ({"ranks": [2]}, "b has 1 ranks, and a has 2"),
        ({"clock": -7.5}, "the clock of b is 7.5 s behind that of a"),
        ({"write": 0.0, "trouble": "No space left"}, "the storage of b fails: No space left"),
        ({"write": 1e8}, "the storage of b takes 100 MB/s, in the median 900"),
    ],
)
def test_what_is_wrong_is_named(other: dict, told: str) -> None:
    second, third = replace(NODE, host="b", ranks=[2, 3]), replace(NODE, host="c", ranks=[4, 5])
    (problem,) = check_cluster.problems([NODE, replace(second, **other), third], [])
    assert problem.startswith(told)


def test_a_slow_group_is_named() -> None:
    (problem,) = check_cluster.problems([NODE], [Link("dp_shard", 2, 1e9, [1, 3], 1e10)])
    assert problem == "the dp_shard group of ranks 1, 3 is 10.0 times as slow as the median"


@pytest.mark.parametrize("mib", ["0", "-3"])
def test_it_writes_something(mib: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("check-cluster", [CONFIG[0], "--mib", mib])
    assert ended.value.code == 2 and "--mib: must be a whole number of at least 1" in capsys.readouterr().err


def test_storage_is_measured_and_left_clean(tmp_path: Path) -> None:
    write, read, trouble = check_cluster.storage(tmp_path / "new", 4 << 20)
    assert write > 0 and read > 0 and trouble == ""
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    write, read, trouble = check_cluster.storage(tmp_path / "file", 1 << 20)
    assert (write, read) == (0.0, 0.0) and "file" in trouble


def test_ranks_of_one_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "check-cluster", *CONFIG, f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"NGPU": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tp +2 +[\d.]+ GB/s +[\d.]+ GB/s +0, 1$", done.stdout, re.M)
    assert done.stdout.endswith("verdict: 1 machine, 2 ranks: all well\n")


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_machines(tmp_path: Path) -> None:
    words = ["-m", "toolkit", "check-cluster", *CONFIG, "--parallelism.tensor_parallel_degree=1"]
    with cluster(2, tmp_path / "logs") as made:
        environ = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "host0", "MASTER_PORT": str(PORT)}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        started = [
            node.start(
                sys.executable, *words, f"--job.dump_folder={tmp_path}/run", **environ, NODE_RANK=str(number)
            )
            for number, node in enumerate(made.nodes)
        ]
        codes = [one.wait(150) for one in started]
    text = started[0].text
    assert codes == [0, 0], text
    assert re.search(r"^host0 +0 .*\nhost1 +1 ", text, re.M), text
    assert re.search(r"^dp_shard +2 ", text, re.M)
    assert "verdict: 2 machines, 2 ranks: all well" in text
