"""A launch whose number of nodes may change: what it needs, and the meshes that its ranks take."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nodes import TINY
from toolkit.config import load_config
from toolkit.errors import ConfigError
from toolkit.hardware import Hardware
from toolkit.launch import launch_from, main
from toolkit.launcher.node_terms import terms_from
from toolkit.preflight.several_nodes import at_full_size, layouts, run_nodes

CPU = Hardware("cpu", "CPU", 1, native_bf16=False)
MESHES = "--parallelism.elastic_meshes"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    said = {"NNODES": "2:4", "NGPU": "1", "MASTER_ADDR": "first"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    return said


def test_a_range_of_nodes_is_read(asked: dict[str, str]) -> None:
    launch = launch_from(asked, CPU)
    terms = terms_from(asked, launch)
    assert (launch.nodes, terms.least, terms.most, terms.restarts, terms.elastic) == (4, 2, 4, 3, True)
    fixed = terms_from(asked | {"NNODES": "4"}, launch)
    assert (fixed.least, fixed.restarts, fixed.elastic) == (4, 0, False)
    assert [terms_from(asked | {"NNODES": text}, launch).asked for text in (" 4", "02: 4")] == ["4", "2:4"]
    with pytest.raises(ConfigError, match="NODE_TIMEOUT"):
        terms_from(asked | {"NODE_TIMEOUT": "9999999999"}, launch)
    for wrong in ("5:4", "0:4", ":4", "x:4"):
        with pytest.raises(ConfigError, match="NNODES"):
            terms_from(asked | {"NNODES": wrong}, launch)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--checkpoint.no-enable"], "set checkpoint.enable = true"),
        (["--checkpoint.load_step=4"], "with NNODES = 2:4 all start again from"),
        (["--training.global_batch_size=-1"], "training.global_batch_size = -1"),
        ([f"{MESHES}=dp_shard=5,dp_shard=1"], "none of these meshes has 4 ranks"),
    ],
)
def test_what_such_a_run_needs(asked: dict[str, str], flags: list[str], said: str) -> None:
    argv = [*TINY, *flags]
    with pytest.raises(ConfigError, match=said):
        at_full_size(load_config(argv), argv, launch_from(asked, CPU))


def test_the_degrees_hold_for_every_number_that_they_fit(asked: dict[str, str]) -> None:
    launch = launch_from(asked | {"NNODES": "2:5"}, CPU)
    assert at_full_size(load_config(TINY), TINY, launch) == ([*TINY], 5)
    flags = layouts(load_config(TINY), TINY, launch, CPU)
    assert [flags(nodes) for nodes in (2, 3, 4)] == [[], [], []]
    os.environ["NNODES"] = "2:6"
    flags = layouts(load_config(TINY), TINY, launch_from(asked | {"NNODES": "2:6"}, CPU), CPU)
    with pytest.raises(ConfigError, match="global_batch_size"):
        flags(5)  # of a batch of 12


def test_a_list_of_meshes_names_the_sizes(asked: dict[str, str]) -> None:
    argv = [*TINY, f"{MESHES}=dp_shard=2 tp=2,dp_shard=2"]
    launch = launch_from(asked, CPU)
    words, world_size = at_full_size(load_config(argv), argv, launch)
    config = load_config(words)
    assert (world_size, config.parallelism.tensor_parallel_degree) == (4, 2)
    flags = layouts(config, argv, launch, CPU)
    assert "--parallelism.data_parallel_shard_degree=2" in flags(2)
    assert "--parallelism.tensor_parallel_degree=1" in flags(2)
    with pytest.raises(ConfigError, match="none of these meshes has 3 ranks"):
        flags(3)


def test_nodes_beyond_the_largest_mesh_stand_by(asked: dict[str, str]) -> None:
    argv = [*TINY, f"{MESHES}=dp_shard=2,dp_shard=3,dp_shard=5"]
    launch = launch_from(asked, CPU)
    words, world_size = at_full_size(load_config(argv), argv, launch)
    assert (world_size, load_config(words).parallelism.data_parallel_shard_degree) == (3, 3)
    assert "--parallelism.data_parallel_shard_degree=3" in layouts(load_config(words), argv, launch, CPU)(3)


def test_a_launch_forecasts_the_mesh_that_its_ranks_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher hands on the words and the size of the largest mesh; nothing is started here."""
    seen: list[tuple[list[str], int]] = []

    class Told(Exception):
        pass

    def forecast(words: list[str], world_size: int, **_: object) -> None:
        seen.append((words, world_size))
        raise Told

    monkeypatch.setattr("toolkit.launcher.forecast.Forecast", forecast)
    monkeypatch.setattr("toolkit.preflight.detect", lambda _: replace(CPU, memory=1))
    argv = [*TINY, f"--job.dump_folder={tmp_path}", f"{MESHES}=dp_shard=3,dp_shard=2"]
    with pytest.raises(Told):
        main(argv)
    assert [(load_config(words).parallelism.data_parallel_shard_degree, size) for words, size in seen] == [
        (3, 3)
    ]


def test_a_least_number_that_cannot_train_is_refused(asked: dict[str, str]) -> None:
    argv = [*TINY, f"{MESHES}=dp_shard=4"]
    launch = launch_from(asked, CPU)
    config = load_config(at_full_size(load_config(argv), argv, launch)[0])
    with pytest.raises(ConfigError, match="2 nodes are allowed, and cannot train: .*none of these meshes"):
        run_nodes([], config, argv, launch, CPU, lambda: None)
