"""Perplexity on text that a fine-tune does not learn, before and after: what it forgets."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.mesh_runs import write_pairs
from tests.meshes import PAIR_TEMPLATE
from tests.preflight.bad_runs import CPU, configure
from tests.training import small_config, small_trainer
from toolkit.data.build import open_corpora, run_tokenizer
from toolkit.data.run_data import BASE_CORPUS
from toolkit.preflight import check

EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
LORA = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "prefix": {"adapter": "prefix_tuning", "prefix_tuning": {"num_virtual_tokens": 4}},
    "dpo": LORA | {"objective": "dpo"},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
}
ON_TWO = [("full", "fsdp"), ("lora", "tp"), ("prefix", "pp"), ("dpo", "fsdp"), ("dpo", "pp")]


def _run(folder: Path, name: str, at: str, **tables: dict[str, Any]) -> dict[str, Any]:
    """The losses that are compared, by step, and what was printed."""
    data: dict[str, Any] = {"dataset": "embedded_validation"}
    if name == "dpo":
        data = {"dataset_path": write_pairs(folder / "pairs.jsonl", 40), "format": "preference"}
    samples = {"seq_len": 32, "local_batch_size": 2, "samples": 7}  # which no number of ranks divides
    trainer = small_trainer(
        small_config(
            folder / at,
            data={"chat_template": PAIR_TEMPLATE} if name == "dpo" else {},
            finetune=RUNS[name] | tables.pop("finetune", {}),
            model={"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96},
            training={"steps": 2, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2, **EXACT}
            | data
            | tables.pop("training", {}),
            optimizer={"lr": 1e-2},
            lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
            validation={"enable": True, "freq": 1, "base_corpus": {"dataset_path": str(folder / "known.txt")}}
            | data
            | samples
            | tables.pop("validation", {}),
            checkpoint={"enable": True, "interval": 1} | tables.pop("checkpoint", {}),
            **tables,
        )
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    key = "base_corpus_loss"
    return {
        "known": {record["step"]: record[key] for record in trainer.history if key in record},
        "validated": {it["step"]: it["validation_loss"] for it in trainer.history if "validation_loss" in it},
        "told": printed.getvalue().splitlines(),
    }


def _from(folder: Path) -> dict[str, Any]:
    return {"initial_load_path": str(folder / "base/checkpoint/step-1")}


def _one(base: str) -> dict[str, Any]:
    folder = Path(base)
    found = {"base": _run(folder, "full", "base", training={"steps": 1})}
    for name in RUNS:
        found[name] = _run(folder, name, f"{name} one", checkpoint=_from(folder))
    same = {"dataset_path": str(folder / "known.txt"), "base_corpus": {}}
    found["validated on it"] = _run(folder, "lora", "same", validation=same, checkpoint=_from(folder))
    # three resumptions of the first half: as it was, on other text, and with other samples of it
    for at, validation in {
        "again": {},
        "other text": {"base_corpus": {"dataset": "embedded_validation"}},
        "fewer": {"samples": 5},
    }.items():
        _run(folder, "lora", at, training={"steps": 1}, checkpoint=_from(folder))
        found[at] = _run(folder, "lora", at, validation=validation, checkpoint=_from(folder))
    return found


def _two(base: str) -> dict[str, Any]:
    folder = Path(base)
    return {
        f"{name} {layout}": _run(
            folder, name, f"{name} {layout}", checkpoint=_from(folder), parallelism=LAYOUTS[layout]
        )
        for name, layout in ON_TWO
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forgetting")
    (folder / "known.txt").write_text("".join(f"{number} men went to sea. " for number in range(300)))
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return run_world(_one, 1, str(folder), timeout=170)[0]


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_world(_two, 2, str(folder), timeout=170)


@pytest.mark.parametrize("name", RUNS)
def test_it_is_measured_before_the_first_step_and_after_the_last(one: dict[str, Any], name: str) -> None:
    """Before, every kind of run has the model that it begins with: adapters begin by changing nothing, save
    for a prefix, which is drawn."""
    found = one[name]
    assert list(found["known"]) == [0, 2] and list(found["validated"]) == [0, 1, 2]
    before, after = found["known"].values()
    assert before != after
    if name != "prefix":
        assert before == pytest.approx(one["full"]["known"][0], rel=1e-12)
    [line] = [line for line in found["told"] if line.startswith("  base corpus")]
    assert f"{before:.3f} → {after:.3f} (perplexity {math.exp(before):.2f} → {math.exp(after):.2f})" in line


def test_it_is_the_loss_that_a_validation_on_this_text_has(one: dict[str, Any]) -> None:
    as_validation = one["validated on it"]["validated"]
    assert one["lora"]["known"] == {step: as_validation[step] for step in (0, 2)}
    assert not one["validated on it"]["known"]


def test_a_run_that_begins_with_nothing_learnt_has_nothing_to_forget(one: dict[str, Any]) -> None:
    assert list(one["base"]["known"]) == [1]


@pytest.mark.parametrize(("name", "layout"), ON_TWO)
def test_every_mesh_has_that_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], name: str, layout: str
) -> None:
    for rank in two:
        assert rank[f"{name} {layout}"]["known"] == pytest.approx(one[name]["known"], rel=1e-10)


def test_a_resumed_run_tells_what_was_before_its_first_step(one: dict[str, Any]) -> None:
    def told(name: str) -> list[str]:
        return [line for line in one[name]["told"] if re.match("  (base corpus|validation loss)", line)]

    assert list(one["again"]["known"]) == [2]
    assert len(told("again")) == 2 and told("again") == told("lora")


def test_another_text_is_not_compared(one: dict[str, Any]) -> None:
    for name, compared in {"other text": [True, False], "fewer": [False, False]}.items():
        lines = [line for line in one[name]["told"] if re.match("  (validation loss|base corpus)", line)]
        assert ["→" in line for line in lines] == compared


def test_it_goes_to_the_files_that_metrics_are_in(folder: Path, one: dict[str, Any]) -> None:
    records = [json.loads(line) for line in (folder / "lora one/metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if "base_corpus_loss" in record]
    assert [record["step"] for record in found] == [0, 2]
    for record in found:
        assert record["base_corpus_perplexity"] == pytest.approx(math.exp(record["base_corpus_loss"]))


def test_the_size_of_the_adapter_is_told(folder: Path, one: dict[str, Any]) -> None:
    """In bytes of its tensors, fp64 here."""
    manifest = json.loads((folder / "prefix one/checkpoint/step-2/manifest.json").read_text())
    [line] = [line for line in one["prefix"]["told"] if line.startswith("  trained")]
    trained = int(re.search(r"([\d,]+) of", line)[1].replace(",", ""))
    assert f"adapter of {8 * trained:,} bytes" in line
    assert 8 * trained <= manifest["tensors"]["bytes"]


@pytest.mark.parametrize("learnt", ["messages", "preference"])
def test_it_is_text_whatever_is_learnt(tmp_path: Path, learnt: str) -> None:
    asked, answered = ({"role": role, "content": role} for role in ("user", "assistant"))
    rows = {
        "messages": {"messages": [asked, answered]},
        "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[learnt]) + "\n")
    (tmp_path / "known.jsonl").write_text(json.dumps({"text": "the sea"}) + "\n")
    config = configure(
        [
            f"--data.format={learnt}", f"--training.dataset_path={tmp_path}/rows.jsonl",
            "--data.chat_template=llama3", f"--data.cache_folder={tmp_path}/cache",
            f"--job.dump_folder={tmp_path}/run", "--finetune.adapter=lora", "--validation.enable",
            f"--validation.dataset_path={tmp_path}/rows.jsonl", "--validation.seq_len=256",
            f"--validation.base_corpus.dataset_path={tmp_path}/known.jsonl",
            f"--finetune.objective={'dpo' if learnt == 'preference' else 'sft'}",
        ]
    )  # fmt: skip
    assert check(config, world_size=1, hardware=CPU) == []
    cache = dict(open_corpora(config, run_tokenizer(config), progress=False, max_inline_gb=1))[BASE_CORPUS]
    assert cache.mask is None and cache.n_documents == 1
