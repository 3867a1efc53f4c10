"""``llama-toolkit evaluate`` from its command line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.checkpoint.manifest import MANIFEST, build_manifest, read_manifest
from toolkit.cli import run_command
from toolkit.commands.evaluations import validation_result
from toolkit.config import load_config
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FINISHED
from toolkit.evaluation.perplexity import Evaluator
from toolkit.generation.load import load_model

ASSETS = Path(os.environ.get("TOOLKIT_ASSETS", ""))
needs_assets = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
CONVERSATIONS = str(Path(__file__).parents[1] / "assets" / "chat" / "sums.held_out.jsonl")
STORIES = str(ASSETS / "stories260K" / "hf")


def _trained_and_evaluated(folder: str, conversations: str = "") -> tuple[float, int, float]:
    """A run's own validation loss; the tokens and loss of what it saved, on the same ranks."""
    validation = {"enable": True, "freq": 2, "seq_len": 64, "local_batch_size": 4, "samples": 30}
    if conversations:
        validation |= {"format": "messages", "dataset_path": conversations, "seq_len": 128}
    config = small_config(
        folder,
        training={"steps": 2},
        checkpoint={"enable": True, "interval": 2},
        validation=validation,
    )
    trainer = small_trainer(config)
    trainer.train()
    [recorded] = [line["validation_loss"] for line in trainer.history if "validation_loss" in line]
    Path(folder, "config.toml").write_text(config.to_toml())
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    same = load_config(["--job.config_file", f"{folder}/config.toml"])
    loss = validation_result(loaded, Evaluator(loaded.model, mesh=loaded.mesh), same)
    return recorded, loss.tokens, loss.mean


def test_the_validation_loss_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = tmp_path / "run", tmp_path / "results.json"
    (recorded, tokens, loss), *_ = run_world(_trained_and_evaluated, 2, str(run))
    assert loss == pytest.approx(recorded, rel=1e-6)
    arguments = [str(run), "--config", str(run / "config.toml"), "--dtype", "float32"]
    assert run_command("evaluate", [*arguments, "--output", str(output)]) == EXIT_FINISHED
    found = json.loads(output.read_bytes())["validation"]
    assert (found["tokens"], found["loss"]) == (tokens, pytest.approx(recorded, rel=1e-6))
    assert f"loss {found['loss']:.5f}" in capsys.readouterr().out
    # The text that was trained on need not be here. Flags change the config; its mistakes are the user's.
    assert run_command("evaluate", [*arguments, "--training.dataset_path", "/nowhere/a.txt"]) == EXIT_FINISHED
    assert (
        run_command("evaluate", [*arguments, "--validation.samples", "8", "--output", str(output)])
        == EXIT_FINISHED
    )
    assert json.loads(output.read_bytes())["validation"]["tokens"] < tokens
    capsys.readouterr()
    assert (
        run_command("evaluate", [*arguments, "--validation.samples", "-1", "--validation.steps", "2"])
        == EXIT_FINISHED
    )
    assert "batches of each rank, here 8 samples at most in all" in capsys.readouterr().out
    assert run_command("evaluate", [*arguments, "--validation.sample", "8"]) == EXIT_CONFIG
    assert "did you mean" in capsys.readouterr().err
    assert run_command("evaluate", [*arguments, "--validation.seq_len", "1000000"]) == EXIT_CONFIG
    assert "validation.seq_len" in capsys.readouterr().err


def test_the_validation_loss_on_conversations(tmp_path: Path) -> None:
    """With weights, which change it, and without."""
    rows = [json.loads(line) for line in Path(CONVERSATIONS).read_text().splitlines()]
    weighted = tmp_path / "weighted.jsonl"
    weighted.write_text(
        "".join(json.dumps(row | {"weight": 1e-6 + at % 3}) + "\n" for at, row in enumerate(rows))
    )
    found = []
    for file in (CONVERSATIONS, str(weighted)):
        place = tmp_path / str(len(found))
        [(recorded, tokens, loss)] = run_world(_trained_and_evaluated, 1, str(place), file)
        assert loss == pytest.approx(recorded, rel=1e-6)
        found.append((tokens, loss))
    (tokens, plain), (tokens_of_weighted, loss) = found
    assert tokens_of_weighted == tokens and abs(loss - plain) > 1e-4


def test_windows_are_of_the_length_of_the_training(tmp_path: Path) -> None:
    """Or of 4096 tokens where the context is longer, unless asked otherwise."""
    run, text, output = tmp_path / "run", tmp_path / "story.txt", tmp_path / "results.json"
    text.write_text("Once upon a time. " * 40)
    run_world(_trained_and_evaluated, 1, str(run))
    asked = [str(run), "--text", str(text), "--dtype", "float32", "--output", str(output)]
    found = []
    for words in ([], ["--seq-len", "32"]):
        assert run_command("evaluate", [*asked, *words]) == EXIT_FINISHED
        found.append(json.loads(output.read_bytes())["text"]["seq_len"])
    assert found == [small_config(str(run)).training.seq_len, 32]
    step = run / "checkpoint" / "step-2"
    manifest = read_manifest(step)
    manifest["run"]["model"]["max_seq_len"], manifest["run"]["config"] = 131072, ""
    counted = {"tensor_count": manifest["tensors"]["count"], "tensor_bytes": manifest["tensors"]["bytes"]}
    anew = build_manifest(step=2, files=manifest["files"], run=manifest["run"], **counted)
    (step / MANIFEST).write_text(json.dumps(anew))
    tokenizer = str(Path(__file__).parents[1] / "assets" / "tokenizer")
    assert run_command("evaluate", [*asked, "--tokenizer", tokenizer]) == EXIT_FINISHED
    assert json.loads(output.read_bytes())["text"]["seq_len"] == 4096


@needs_assets
def test_perplexity_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = json.loads((ASSETS / "stories260K" / "reference_fp32.json").read_bytes())
    text, output = tmp_path / "story.txt", tmp_path / "results.json"
    text.write_text(reference["story"])
    asked = [STORIES, "--text", str(text), "--dtype", "float32", "--output", str(output)]
    assert run_command("evaluate", asked) == EXIT_FINISHED
    found = json.loads(output.read_bytes())["text"]
    assert found["loss"] == pytest.approx(reference["story_loss"], abs=2e-6)
    assert found["perplexity"] == pytest.approx(math.exp(reference["story_loss"]), abs=1e-5)
    assert f"perplexity {found['perplexity']:.4f}" in capsys.readouterr().out
    assert run_command("evaluate", [*asked, "--seq-len", "32", "--stride", "8"]) == EXIT_FINISHED
    assert json.loads(output.read_bytes())["text"]["loss"] > found["loss"]


@needs_assets
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--text", "nowhere.txt"], EXIT_DATA, "--text = 'nowhere.txt'"),
        (["--text", "ROWS"], EXIT_DATA, "fix:  set --text-column to the column with the text"),
        (["--text", "STORY", "--text-column", "body"], EXIT_CONFIG, "--text-column = 'body'"),
        (["--text", "STORY", "--tp", "3"], EXIT_CONFIG, "--tp = 3"),
        (["--config", "nowhere.toml"], EXIT_CONFIG, "nowhere.toml"),
        (
            ["--config", "train_configs/debug_model.toml", "--finetune.objective", "dpo"],
            EXIT_CONFIG,
            "pairs of answers have no next-token loss",
        ),
        (["--text", "STORY", "--seq-len", "513"], EXIT_CONFIG, "at most 512"),
        (["--text", "STORY", "--seq-len", "32", "--stride", "64"], EXIT_CONFIG, "--stride"),
        (["--text", "STORY", "--tokenizer", "nowhere"], EXIT_DATA, "nowhere"),
        (["--text", "STORY", "--output", "/proc/nowhere"], EXIT_DATA, "cannot write"),
    ],
)
def test_mistakes(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"STORY": tmp_path / "story.md", "ROWS": tmp_path / "rows.jsonl"}  # text of any suffix
    files["STORY"].write_text("Once upon a time")
    files["ROWS"].write_text('{"body": "Once upon a time"}\n')
    words = [str(files.get(word, word)) for word in arguments]
    assert run_command("evaluate", [STORIES, "--dtype", "float32", *words]) == code
    assert says in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Once upon a time")
    for output, why in ((tmp_path, "it is a folder"), (tmp_path / "none" / "a.json", "is not there")):
        assert (
            run_command("evaluate", ["no model", "--text", str(story), "--output", str(output)]) == EXIT_DATA
        )
        error = capsys.readouterr().err
        assert f"cannot write {output}" in error and why in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--text", "a.txt", "--training.steps", "3"],
        ["--text", "a.txt", "--limit", "3"],
        ["--config", "a.toml", "--text-column", "body"],
        ["--config", "a.toml", "--seq-len", "8"],
        ["--config", "a.toml", "--batch-size", "2"],
        ["--tasks", " ,"],
        ["--tasks", "arc_easy", "--few-shot", "-1"],
    ],
)
def test_arguments_that_say_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("evaluate", ["model", *arguments])
    assert ended.value.code == EXIT_CONFIG
    assert "--config" in capsys.readouterr().err
