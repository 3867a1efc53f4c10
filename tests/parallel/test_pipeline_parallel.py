"""Pipelines alone; tests/integration/test_meshes.py shows that they give the gradients of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.models.small_llama import small
from tests.training import small_config, small_trainer
from toolkit.errors import ConfigError
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.pipeline_parallel import Pipeline, keep_stage

SHAPES: dict[str, dict[str, Any]] = {"loop": {"pipeline_parallel_schedule": "1F1B"}}
if SINCE_2_13:
    SHAPES["v"] = {"pipeline_parallel_schedule": "ZBVZeroBubble", "fsdp_reshard_after_forward": "never"}


def _stage(modules: list[str], **overrides: Any) -> list[str]:
    with torch.device("meta"):
        model = Decoder(small(n_layers=3, **overrides))
    keep_stage(model, modules)
    return sorted(
        {
            name.removesuffix(".weight").split(".attention")[0].split(".f")[0]
            for name, _ in model.named_parameters()
        }
    )


def test_a_stage_keeps_its_modules_under_their_names() -> None:
    assert _stage(["tok_embeddings", "layers.0"]) == ["layers.0", "tok_embeddings"]
    assert _stage(["layers.1"]) == ["layers.1"]
    assert _stage(["layers.2", "norm", "output"]) == ["layers.2", "norm", "output"]


def test_a_tied_head_apart_from_the_embedding_has_a_copy() -> None:
    assert _stage(["layers.2", "norm", "output"], tie_embeddings=True) == ["layers.2", "norm", "output"]
    whole = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output"]
    assert "output" not in _stage(whole, tie_embeddings=True)


def _config(folder: Path, name: str, tied: bool = False, **parallelism: Any) -> Any:
    precision = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float64")
    return small_config(
        folder / name,
        model={
            "dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "n_kv_heads": 2,
            "ffn_dim": 64,
            "tie_embeddings": tied,
        },
        training={"steps": 2, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 4, **precision},
        parallelism={
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            **parallelism,
        },
    )


def _copy_follows(folder: Path, name: str, **parallelism: Any) -> dict[str, Any]:
    """Say if the copy is the embedding, at the start, after two updates, and when refreshed."""
    trainer = small_trainer(_config(folder, name, tied=True, **parallelism))
    model_parts = trainer.model_parts
    assert isinstance(model_parts, Pipeline)

    def part(named: Any) -> Any:
        return next((p._local_tensor.clone() for n, p in named if n == "tok_embeddings.weight"), None)

    def parts() -> list[Any]:
        return [part(model_parts.named_parameters()), part(model_parts.tied_copies())]

    seen = [parts()]
    trainer.train()
    seen.append(parts())
    for _, parameter in model_parts.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter._local_tensor.data.add_(1.0)
    checkpointer = trainer._checkpointer()  # this run saves nothing by itself
    tensors = checkpointer.tensors(model_only=False)
    copies = checkpointer.tensors(model_only=False, copies=True)
    model_parts.refresh_tied_copies(tensors, copies)
    seen.append(parts())
    return {"seen": seen, "copies": sorted(copies), "saved": sorted(tensors)}


def _losses(folder: Path, name: str, **parallelism: Any) -> list[float]:
    trainer = small_trainer(_config(folder, name, **parallelism))
    trainer.train()
    return [record["loss"] for record in trainer.history]


def _from_file(folder: Path) -> tuple[list[float], list[float]]:
    """Losses by torch's schedule, and by its own actions from a file."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    made = folder / "schedule.csv"
    by_name = _losses(folder, "named", pipeline_parallel_schedule="Interleaved1F1B")
    trainer = small_trainer(_config(folder, "made", pipeline_parallel_schedule="Interleaved1F1B"))
    trainer.train()
    schedule = trainer.model_parts.schedule  # type: ignore[attr-defined]
    assert isinstance(schedule, ScheduleInterleaved1F1B)
    if torch.distributed.get_rank() == 0:
        schedule._dump_csv(str(made), format="compute_only")
    torch.distributed.barrier()
    by_file = _losses(
        folder,
        "filed",
        pipeline_parallel_schedule="PipelineScheduleMulti",
        pipeline_parallel_schedule_csv=str(made),
    )
    return by_name, by_file


# One stage a rank, two micro-batches.
_GOOD = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n"
_MALFORMED = {
    "no action": _GOOD.replace("1B1", "1X1"),
    "half an action": _GOOD.replace("1B1", "1B"),
    "missing": _GOOD.replace("1B1", ""),
    "twice": _GOOD.replace("1F1", "1F0"),
    "backward first": _GOOD.replace("1F0,1B0", "1B0,1F0"),
    "ranks that wait for one another": _GOOD.replace("0F0,0F1,,,0B0,0B1", "0F0,0B0,0F1,0B1").replace(
        "1F0,1B0,1F1,1B1", "1F0,1F1,1B0,1B1"
    ),
    "other ranks": "1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n",
}


def _refused(folder: Path) -> dict[str, str]:
    """Messages for files that are no schedule."""
    said, rank = {}, torch.distributed.get_rank()
    file = folder / f"of_{rank}.csv"
    file.write_text(_GOOD)
    trainer = small_trainer(_config(folder, "refused", pipeline_parallel_schedule_csv=str(file)))
    trainer.model_parts.new_schedule(2, 16)  # type: ignore[attr-defined]
    for name, text in _MALFORMED.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            trainer.model_parts.new_schedule(2, 16)  # type: ignore[attr-defined]
        said[name] = str(error.value).replace(str(file), "FILE")
    return said


def _all(folder: Path) -> dict[str, Any]:
    followed = {shape: _copy_follows(folder, shape, **options) for shape, options in SHAPES.items()}
    return {**followed, "file": _from_file(folder), "refused": _refused(folder)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_all, 2, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("name", _MALFORMED)
def test_a_file_that_is_no_schedule_is_refused_alike_on_every_rank(
    ranks: list[dict[str, Any]], name: str
) -> None:
    said = ranks[0]["refused"][name]
    assert said == ranks[1]["refused"][name] and "pipeline_parallel_schedule_csv = 'FILE'" in said
    assert "2 micro-batches through the stages 0 on rank 0, 1 on rank 1" in said


@pytest.mark.parametrize("shape", SHAPES)
def test_the_copy_of_a_tied_head_is_the_embedding_to_the_bit(ranks: list[dict[str, Any]], shape: str) -> None:
    last = 0 if shape == "v" else 1
    for moment in range(3):
        original, copy = ranks[0][shape]["seen"][moment][0], ranks[last][shape]["seen"][moment][1]
        assert torch.equal(original, copy)
    start, trained, changed = (ranks[0][shape]["seen"][moment][0] for moment in range(3))
    assert not torch.equal(start, trained) and torch.equal(trained + 1.0, changed)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_not_saved(ranks: list[dict[str, Any]], shape: str) -> None:
    saved = [name for rank in ranks for name in rank[shape]["saved"]]
    assert len(saved) == len(set(saved)) and "model.output.weight" not in saved
    copies = {name for rank in ranks for name in rank[shape]["copies"]}
    assert copies == {name for name in saved if "tok_embeddings" in name}


def test_a_schedule_from_a_file_is_the_schedule(ranks: list[dict[str, Any]]) -> None:
    by_name, by_file = ranks[0]["file"]
    assert len(by_name) == 2 and by_name == by_file
