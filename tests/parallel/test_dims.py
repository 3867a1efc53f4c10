"""Strategies divide a world as they should, and a resolved config says the same as the one it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config import Config, load_config
from toolkit.config.parallelism import Parallelism
from toolkit.hardware import Hardware
from toolkit.parallel.dims import STRATEGIES, degrees, reshard_after_forward, strategy
from toolkit.preflight import check

CPU = Hardware("cpu", "CPU", 2, native_bf16=True)
TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"

# (strategy, replicas asked for) to (dp_replicate, dp_shard, resharding) on four ranks
MEANS = {
    ("FULL_SHARD", 1): (1, 4, "default"),
    ("SHARD_GRAD_OP", 1): (1, 4, "never"),
    ("NO_SHARD", 1): (4, 1, "default"),
    ("HYBRID_SHARD", 2): (2, 2, "default"),
    ("HYBRID_SHARD_ZERO2", 2): (2, 2, "never"),
    (None, 1): (1, 4, "default"),
    (None, 4): (4, 1, "default"),
}


@pytest.mark.parametrize(("asked", "meant"), MEANS.items())
def test_a_strategy_is_a_choice_of_degrees_and_resharding(
    asked: tuple[str | None, int], meant: tuple[int, int, str]
) -> None:
    name, replicas = asked
    number = STRATEGIES.index(name) + 1 if name else None
    for given in (name, number):
        options = Parallelism(sharding_strategy=given, data_parallel_replicate_degree=replicas)  # type: ignore[arg-type]
        mesh = degrees(options, 4)
        assert mesh is not None and strategy(options) == name
        assert (mesh.dp_replicate, mesh.dp_shard, reshard_after_forward(options)) == meant


def test_what_is_set_beside_a_strategy_and_agrees_with_it_stays() -> None:
    options = Parallelism(
        sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=2, fsdp_reshard_after_forward=2
    )
    assert reshard_after_forward(options) == 2
    shard = Parallelism(sharding_strategy="FULL_SHARD", data_parallel_shard_degree=4)
    assert degrees(shard, 6) is None


@pytest.mark.parametrize(
    ("name", "asked", "meant"),
    [
        (None, "default", "never"),
        (None, "always", "always"),
        (None, 2, 2),
        ("FULL_SHARD", "default", "default"),
        ("NO_SHARD", "default", "default"),
        ("SHARD_GRAD_OP", "default", "never"),
    ],
)
def test_a_pipeline_keeps_what_it_gathers_unless_it_is_told_otherwise(
    name: str | None, asked: str | int, meant: str | int
) -> None:
    # torchtitan's default: each micro-batch would gather the stage again.
    options = Parallelism(
        pipeline_parallel_degree=2,
        sharding_strategy=name,  # type: ignore[arg-type]
        fsdp_reshard_after_forward=asked,  # type: ignore[arg-type]
    )
    assert reshard_after_forward(options) == meant


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_config_that_a_run_writes_passes_the_preflight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There every key is set, the degrees too.
    monkeypatch.chdir(tmp_path)
    flags = [
        f"--model.hf_assets_path={TOKENIZER}",
        "--data.cache_folder=cache",
        "--training.seq_len=256",
        "--training.global_batch_size=16",
        f"--parallelism.sharding_strategy={name}",
        f"--parallelism.data_parallel_replicate_degree={2 if 'HYBRID' in name else 1}",
    ]
    (tmp_path / "config.toml").write_text(load_config(flags).to_toml())
    config: Config = load_config(["--job.config_file=config.toml"])
    assert check(config, world_size=4, hardware=CPU) == []
