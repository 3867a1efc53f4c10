"""Scores on tasks during training: the same on every mesh, and lm-eval's own of the exported model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.evaluation.task_files import write_task
from tests.helpers import run_world
from tests.training import MESHES, small_config, small_trainer
from toolkit.checkpoint.manifest import committed_steps, read_manifest
from toolkit.errors import ConfigError

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
STORIES = Path(os.environ.get("TOOLKIT_ASSETS", ""), "stories260K")
FILES = STORIES / "hf"
TASKS = ["tiny_choices", "tiny_texts", "tiny_words"]
CHOICES = [
    ("Once upon a time, there was a little girl named", "Lily.", "Tax.", "Max and he liked"),
    ("Tom had a red ball. He liked to", "play with it.", "eat the sky.", "in"),
    ("The sun was hot, so they went to swim in the", "lake.", "car.", "park."),
    ("The cat said", "meow", "hello", "that"),
    ("Mia was sad because", "she lost her toy", "it", "of tax"),
]
WORDS = [
    ("Once upon a", "time"),
    ("there was a little girl named", "Lily"),
    ("The end of", "tax"),
    ("Ben", "had"),
]
LAYOUTS = MESHES | {"cp": {"context_parallel_degree": 2}}


def write_tasks(folder: Path) -> None:
    """A task of each kind that needs only likelihoods: choices, whole texts, and next words."""

    write_task(
        folder,
        "tiny_choices",
        [{"context": context, "choices": choices} for context, *choices in CHOICES],
        "acc acc_norm",
        output_type="multiple_choice",
        target_delimiter=" ",
        doc_to_text="{{context}}",
        doc_to_choice="{{choices}}",
        doc_to_target="0",
    )
    texts = [" ".join(["Mia had a toy."] * 90), "Tim went to the park. He saw a big dog.", "The end."]
    write_task(
        folder,
        "tiny_texts",
        [{"text": text} for text in texts],
        "byte_perplexity bits_per_byte",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
    )
    write_task(
        folder,
        "tiny_words",
        [{"context": context, "word": word} for context, word in WORDS],
        "perplexity acc",
        output_type="loglikelihood",
        doc_to_text="{{context}}",
        doc_to_target=" {{word}}",
    )


def prepare(
    folder: Path, tasks: Path, *, steps: int = 2, mesh: dict[str, Any] | None = None, **tables: Any
) -> Any:
    """A trainer that fine-tunes stories260K, with tasks after each step."""
    checkpoint = {"enable": True, "interval": 1, "initial_load_in_hf": True, "initial_load_path": str(FILES)}
    unset = dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"))
    model = {**unset, "hf_assets_path": str(FILES), "add_bos_token": False}
    evaluation = {"tasks": TASKS, "task_folder": str(tasks), "freq": 1, "batch_size": 3}
    return small_trainer(
        small_config(
            folder,
            model=model,
            training={"steps": steps},
            optimizer={"lr": 1e-4},
            parallelism=mesh or {},
            checkpoint=checkpoint | tables.pop("checkpoint", {}),
            evaluation=evaluation | tables.pop("evaluation", {}),
            metrics={"enable_tensorboard": True},
            **tables,
        )
    )


def scores(trainer: Any) -> list[dict[str, float]]:
    found = [{key: it[key] for key in it if key.startswith("eval/")} for it in trainer.history]
    return [it for it in found if it]


def _on_each_mesh(folder: str, layouts: list[str]) -> dict[str, list[dict[str, float]]]:
    found = {}
    for layout in layouts:
        checkpoint = {"last_save_in_hf": layout == "fsdp"}
        mesh = LAYOUTS.get(layout)
        trainer = prepare(Path(folder, layout), Path(folder, "tasks"), mesh=mesh, checkpoint=checkpoint)
        trainer.train()
        found[layout] = scores(trainer)
        last = dist.get_world_size() - 1
        stopped = trainer.evaluation.run(trainer.train_state, stop=lambda last=last: dist.get_rank() == last)
        assert stopped is None, "one rank was asked to stop"
        assert all(model.training for model in trainer.model_parts.models)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks")
    return folder


def test_every_mesh_scores_as_one_process_and_as_lm_eval(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = run_world(_on_each_mesh, 2, str(folder), list(LAYOUTS))
    assert first == other
    [alone] = run_world(_on_each_mesh, 1, str(folder), ["one process"])
    [before, expected] = alone["one process"]
    assert 0 < expected["eval/tiny_choices/acc"] < 1
    assert 0 < expected["eval/tiny_words/acc"] < 1
    assert before != expected
    for layout, found in first.items():
        for step, values in enumerate((before, expected)):
            assert found[step] == pytest.approx(values, rel=1e-3), (layout, step)
    assert _of_lm_eval(folder, monkeypatch) == pytest.approx(first["fsdp"][-1], rel=1e-4)
    records = [json.loads(line) for line in (folder / "fsdp" / "metrics.jsonl").read_text().splitlines()]
    assert {"step": 2, **first["fsdp"][-1]} in records


def _of_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """lm-eval's own adapter on the weights that were exported after the last step."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, LlamaTokenizer

    # It would list this machine's packages and graphics drivers for its log.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    model = AutoModelForCausalLM.from_pretrained(folder / "fsdp" / "hf" / "step-2")
    (folder / "tokenizer").mkdir()
    shutil.copy(FILES / "tokenizer.model", folder / "tokenizer")
    tokenizer = LlamaTokenizer.from_pretrained(folder / "tokenizer", legacy=True)
    tokenizer.pad_token = tokenizer.unk_token
    adapter = HFLM(
        model, tokenizer=tokenizer, device="cpu", batch_size=2, add_bos_token=False, logits_cache=False
    )
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = simple_evaluate(adapter, tasks=TASKS, task_manager=manager, log_samples=False, bootstrap_iters=0)
    return {
        f"eval/{task}/{key.removesuffix(',none')}": value
        for task, values in found["results"].items()
        for key, value in values.items()
        if key.endswith(",none") and "_stderr" not in key
    }


def _best(folder: str) -> list[tuple[list[int], int, float]]:
    """Steps that are kept, the best one and its value, after 3 steps and after 5."""
    accuracy = {1: 0.2, 2: 0.6, 3: 0.4, 4: 0.6, 5: 0.8}
    found = []
    for steps in (3, 4, 5):
        saving = {"keep_best": True, "keep_best_metric": "eval/tiny_choices/acc", "keep_latest_k": 1}
        evaluation = {"tasks": ["tiny_choices"]}
        trainer = prepare(
            Path(folder, "best"), Path(folder, "tasks"), steps=steps, checkpoint=saving, evaluation=evaluation
        )
        state, run_tasks = trainer.train_state, trainer.evaluation._tasks.run

        def results(model: Any, state: Any = state, run_tasks: Any = run_tasks) -> Any:
            found = run_tasks(model)
            found["results"]["tiny_choices"]["acc,none"] = accuracy[state.step]
            return found

        trainer.evaluation._tasks.run = results
        trainer.train()
        dist.barrier()  # rank 0 has deleted the checkpoints that are not kept
        written = read_manifest(trainer.checkpointer.step_folder)["run"]
        kept = committed_steps(trainer.checkpointer.manager.folder)
        found.append((kept, written["best_step"], written["best_validation"]))
    return found


def test_the_step_with_the_best_score_is_kept_and_resumed(folder: Path) -> None:
    """Higher is better; of equal scores the first one is the best."""
    expected = [([2, 3], 2, -0.6), ([2, 4], 2, -0.6), ([5], 5, -0.8)]
    assert run_world(_best, 2, str(folder)) == [expected] * 2


def _refused(folder: str) -> list[str]:
    """Errors about tasks and metrics that only show when a task is loaded."""
    import yaml  # comes with lm-eval

    told = []
    for metric in ("eval/tiny_choices/exact_match", "eval/none/acc"):
        saving = {"keep_best": True, "keep_best_metric": metric}
        with pytest.raises(ConfigError) as raised:
            prepare(Path(folder, "refused"), Path(folder, "tasks"), checkpoint=saving)
        told.append(str(raised.value))
    task = yaml.safe_load(Path(folder, "tasks", "tiny_words.yaml").read_text())
    other = Path(folder, "generating")
    other.mkdir()
    task |= {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    (other / "tiny_words.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(ConfigError) as raised:
        prepare(Path(folder, "refused"), other, evaluation={"tasks": ["tiny_words"]})
    return [*told, str(raised.value)]


def test_what_cannot_be_scored_is_told_before_the_first_step(folder: Path) -> None:
    [[no_metric, no_task, generates]] = run_world(_refused, 1, str(folder))
    assert "checkpoint.keep_best_metric = 'eval/tiny_choices/exact_match'" in no_metric
    assert "checkpoint.keep_best_metric = 'eval/none/acc'" in no_task
    assert "evaluation.tasks = 'tiny_words'" in generates and "generates text" in generates
