"""Scores on tasks in the training loop: the same on every mesh, and those of lm-eval on the exported model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers import run_world
from tests.training import MESHES, small_config, small_trainer
from toolkit.checkpoint.manifest import committed_steps, read_manifest
from toolkit.errors import ConfigError

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
STORIES = Path(os.environ.get("TOOLKIT_ASSETS", ""), "stories260K")
FILES = STORIES / "hf"
TASKS = ["tiny_choices", "tiny_texts", "tiny_words"]
LAYOUTS = MESHES | {"cp": {"context_parallel_degree": 2}}


def write_tasks(folder: Path) -> None:
    """A task of each kind that needs only likelihoods: choices, whole texts, and next words."""

    def task(name: str, docs: list[dict[str, Any]], metrics: str, **settings: Any) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(folder / f"{name}.jsonl")}},
            "validation_split": "validation",
            "target_delimiter": " ",
            "metric_list": [{"metric": metric} for metric in metrics.split()],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | settings))

    names = ["Lily", "Tim", "Ben", "Mia", "Tom"]
    task(
        "tiny_choices",
        [{"context": f"Once upon a time, {name} went to", "choices": ["the park.", "invoice tax", "a"]}
         for name in names],
        "acc acc_norm",
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="{{choices}}",
        doc_to_target="0",
    )  # fmt: skip
    texts = ["Mia had a toy. " * 200, *(f"{name} was very happy. The end." for name in names)]
    task(
        "tiny_texts",
        [{"text": text} for text in texts],
        "byte_perplexity bits_per_byte",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
    )
    words = [("Once upon a", "time"), ("Lily was very", "happy"), ("The end of", "tax"), ("Tim and", "his")]
    task(
        "tiny_words",
        [{"context": context, "word": word} for context, word in words],
        "perplexity acc",
        output_type="loglikelihood",
        doc_to_text="{{context}}",
        doc_to_target="{{word}}",
    )


def run(folder: Path, tasks: Path, *, steps: int = 2, mesh: dict[str, Any] | None = None, **tables: Any) -> Any:
    checkpoint = {"enable": True, "interval": 1, "initial_load_in_hf": True, "initial_load_path": str(FILES)}
    unset = dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"))
    model = {**unset, "hf_assets_path": str(FILES), "add_bos_token": False}
    evaluation = {"tasks": TASKS, "task_folder": str(tasks), "freq": 1, "batch_size": 3, "few_shot": 1}
    trainer = small_trainer(
        small_config(
            folder,
            model=model,
            training={"steps": steps},
            parallelism=mesh or {},
            checkpoint=checkpoint | tables.pop("checkpoint", {}),
            evaluation=evaluation | tables.pop("evaluation", {}),
            metrics={"enable_tensorboard": True},
            **tables,
        )
    )
    trainer.train()
    return trainer


def scores(trainer: Any) -> list[dict[str, float]]:
    found = [{key: it[key] for key in it if key.startswith("eval/")} for it in trainer.history]
    return [it for it in found if it]
