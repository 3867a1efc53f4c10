"""A run's adapter is handed on whole from any layout, taken up again, used, merged and uploaded."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.finetune.adapters import OfModel, check_close, logits
from tests.helpers import run_world
from tests.models.small_llama import build
from tests.preflight.bad_runs import CPU as CPU_ONLY
from tests.training import small_config, small_trainer
from toolkit.cli import run_command
from toolkit.config import Config
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError
from toolkit.finetune import export
from toolkit.finetune.open_adapter import open_adapter_on
from toolkit.generation.load import load_model
from toolkit.models.registry import resolve
from toolkit.preflight import check, notes
from toolkit.trainer import Trainer
from toolkit.weights.hf_write import SpecialTokens, write_hf
from toolkit.weights.hub_upload import push_folder
from toolkit.weights.open import open_weights
from toolkit.weights.views import Cast

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests/assets/tokenizer"
SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 160}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {
        "adapter": "lora",
        "trainable": ["norm.weight"],
        "trainable_token_indices": [105, 4000],
        "lora": {"target_modules": ["all-linear"]},
    },
    "dora": {"adapter": "lora", "lora": {"rank": 4, "target_modules": ["wq", "w2"], "use_dora": True}},
    "prefix": {"adapter": "prefix_tuning", "prefix_tuning": {"num_virtual_tokens": 4}},
    "prompt": {
        "adapter": "llama_adapter",
        "llama_adapter": {"adapter_len": 4, "adapter_layers": 1, "gate": "layer"},
    },
}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
    "fsdp": {},
}
TOKENS = torch.arange(60).view(2, 30) * 7 % 4000
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def _config(folder: Path, at: str, kind: str, **tables: dict[str, Any]) -> Config:
    """Two steps from a base on disk."""
    checkpoint = {
        "enable": True,
        "initial_load_in_hf": True,
        "initial_load_path": str(folder / "base"),
        "last_save_in_hf": True,
    }
    return small_config(
        folder / at,
        model={"tokenizer_path": str(TOKENIZER)} | tables.pop("model", {}),
        training={"steps": 2},
        optimizer={"lr": 1e-2},
        finetune=KINDS[kind] | tables.pop("finetune", {}),
        checkpoint=checkpoint | tables.pop("checkpoint", {}),
        **tables,
    )


def _train(config: Config) -> Trainer:
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer


def _runs(base: str, layouts: list[str]) -> None:
    for layout in layouts:
        for kind in KINDS:
            parallelism = LAYOUTS.get(layout, {})
            _train(_config(Path(base), f"{kind} {layout}", kind, parallelism=parallelism))


def _others(base: str) -> dict[str, Any]:
    """Runs of one rank that go on from what another has left, or hand it on otherwise."""
    folder, found = Path(base), {}
    for kind in ("lora", "prefix"):
        for form in ("hf", "checkpoint"):
            start = {"adapter_path": str(folder / f"{kind} one" / form / "step-2")}
            trainer = small_trainer(_config(folder, f"{kind} from {form}", kind, finetune=start))
            found[f"{kind} {form}"] = {
                name: parameter.full_tensor().detach()
                for name, parameter in trainer.model_parts.named_parameters()
                if isinstance(parameter, DTensor) and parameter.requires_grad
            }
    merged = {"export_max_bytes": 400_000, "export_dtype": "float32"}
    _train(_config(folder, "merged", "dora", checkpoint=merged, finetune={"merge_on_export": True}))
    other = {"initial_load_path": str(folder / "other")}
    start = {"adapter_path": str(folder / "lora one/hf/step-2")}
    try:
        small_trainer(_config(folder, "other", "lora", checkpoint=other, finetune=start))
    except DataError as error:
        found["another base"] = str(error)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("runs")
    args = resolve("llama3.1", "debugmodel", vocab_size=4352, **SHAPE)
    for name, scale in (("base", 1.0), ("other", 1.1)):
        (at / name).mkdir()
        model = build(args, torch.float32)
        with torch.no_grad():
            model.tok_embeddings.weight.mul_(scale)
        source = OfModel(model, at / name)
        write_hf(source, at / name, tokens=SpecialTokens(), others={}, ranks=Ranks(alone=True), replace=True)
    run_world(_runs, 1, str(at), ["one"], timeout=120)
    run_world(_runs, 2, str(at), list(LAYOUTS), timeout=170)
    return at


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_complete_at_any_layout(folder: Path, kind: str) -> None:
    """Its file has what one process has trained, to the rounding of two steps."""
    expected = load_file(folder / f"{kind} one/hf/step-2/adapter_model.safetensors")
    for layout in LAYOUTS:
        found = load_file(folder / f"{kind} {layout}/hf/step-2/adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{layout} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_our_tools_have_the_trained_model(folder: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = folder / f"{kind} tp"
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(run / "hf/step-2", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    expected = logits(theirs, TOKENS)
    assert (expected - logits(base, TOKENS)).abs().max() > 1e-4 * expected.abs().max()
    for place in (run, run / "hf/step-2"):
        loaded = load_model(place, **CPU)
        check_close(logits(loaded.model, TOKENS), expected)
        assert loaded.tokenizer is not None and loaded.seq_len == (64 if place == run else None)


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Any]:
    [found] = run_world(_others, 1, str(folder), timeout=120)
    return found


@pytest.mark.parametrize("kind", ["lora", "prefix"])
@pytest.mark.parametrize("form", ["hf", "checkpoint"])
def test_a_run_starts_from_an_adapter(folder: Path, others: dict[str, Any], kind: str, form: str) -> None:
    saved = open_adapter_on(folder / f"{kind} one/checkpoint/step-2", open_weights(folder / "base"))
    found = others[f"{kind} {form}"]
    assert found.keys() == saved.values.keys()
    for name, value in saved.values.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_other_weights_is_refused(folder: Path, others: dict[str, Any]) -> None:
    assert "was trained on other weights" in others["another base"]
    for form in ("hf", "checkpoint"):
        with pytest.raises(DataError, match="was trained on other weights"):
            load_model(folder / "other", **CPU, adapters={"a": folder / f"dora one/{form}/step-2"})


def test_a_merged_export_is_the_model_of_transformers(folder: Path, others: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    exported = folder / "merged/hf/step-2"
    assert len(list(exported.glob("model-*-of-*.safetensors"))) > 1
    assert (exported / "tokenizer.json").exists() and not (exported / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    check_close(logits(model, TOKENS), logits(load_model(folder / "dora one", **CPU).model, TOKENS))


def test_a_merged_export_in_fp32_is_not_rounded_as_its_base_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export, "open_weights", lambda place, verify: Cast(open_weights(place, verify=verify), torch.bfloat16)
    )
    step, options = folder / "dora one/checkpoint/step-2", {"tokenizer_path": TOKENIZER, "max_bytes": 10**9}
    ranks = Ranks(alone=True)
    export.export_merged(step, tmp_path / "out", dtype=torch.float32, ranks=ranks, **options)
    weight = open_weights(tmp_path / "out").read("layers.0.attention.wq.weight")
    assert not weight.equal(weight.bfloat16().float())


def test_conversions_of_an_adapter_are_of_the_merged_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(folder / "dora one")
    assert run_command("convert", ["dcp-to-hf", run, str(tmp_path / "hf"), "--max-bytes", "0"]) == 0
    assert [file.name for file in (tmp_path / "hf").glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "hf/tokenizer.json").exists()
    found = load_model(tmp_path / "hf", **CPU).model
    check_close(logits(found, TOKENS), logits(load_model(run, **CPU).model, TOKENS))
    assert run_command("convert", ["dcp-to-hf", str(folder / "prefix one"), str(tmp_path / "no")]) == 3
    assert "cannot be merged" in capsys.readouterr().err


def test_evaluation_is_of_the_adapted_model(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the sea was calm and the ship went on " * 30)
    base, adapted, named = (tmp_path / name for name in ("base", "adapted", "named"))
    words = ["--text", str(text), "--dtype=float32", "--seq-len=64", f"--tokenizer={TOKENIZER}", "--output"]
    run = str(folder / "prefix one")
    assert run_command("evaluate", [str(folder / "base"), *words, str(base)]) == 0
    assert run_command("evaluate", [run, *words, str(adapted)]) == 0
    assert run_command("evaluate", [str(folder / "base"), "--adapter", run, *words, str(named)]) == 0
    losses = [json.loads(file.read_text())["text"]["loss"] for file in (base, adapted, named)]
    assert losses[0] != losses[1] == losses[2]


class Hub:
    """A Hub that notes what is asked of it."""

    asked: list[tuple[str, Any]] = []
    there: set[str] = set()
    fails = ""

    def create_repo(self, repository: str, **options: Any) -> str:
        self.asked.append((repository, options))
        return f"https://huggingface.co/{repository}"

    def upload_folder(
        self, *, folder_path: Path, repo_id: str, commit_message: str, delete_patterns: Sequence[str] = ()
    ) -> None:
        if self.fails:
            raise OSError(self.fails)
        files = sorted(file.name for file in Path(folder_path).iterdir())
        gone = {name for name in self.there for pattern in delete_patterns if fnmatch(name, pattern)}
        Hub.there = self.there - gone | {*files}
        self.asked.append((repo_id, files))


def test_the_last_folder_is_uploaded_and_no_token_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Hub))
    monkeypatch.setattr(Hub, "asked", [])
    push = {"push_to_hub": "me/tale", "hf_export_interval": 1, "interval": 1}
    with _alone():
        small_trainer(_config(folder, "pushed", "dora", checkpoint=push)).train()
    [(name, options), (again, files)] = Hub.asked
    assert name == again == "me/tale" and options == {"private": True, "exist_ok": True}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(files)
    assert "uploaded it to https://huggingface.co/me/tale" in capsys.readouterr().out
    shutil.rmtree(folder / "pushed")
    Hub.asked.clear()
    monkeypatch.setattr(Hub, "fails", "401 for the header Bearer hf_SecretOfMine")
    with _alone(), pytest.raises(CheckpointError, match="hf upload me/tale") as raised:
        small_trainer(_config(folder, "pushed", "dora", checkpoint=push)).train()
    assert "SecretOfMine" not in str(raised.value) + "".join(capsys.readouterr())
    monkeypatch.setattr(Hub, "fails", "")
    with _alone():  # the same command makes up for it
        small_trainer(_config(folder, "pushed", "dora", checkpoint=push)).train()
    assert Hub.asked[-1] == (again, files)


def test_an_upload_leaves_no_weights_of_another_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read a single file in place of several, whichever is older."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Hub))
    monkeypatch.setattr(Hub, "there", {"README.md", "tokenizer.json", "runs/model.safetensors"})
    kept = {*Hub.there}
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    exports = (
        {"config.json", "generation_config.json", "model.safetensors"},
        {"config.json", "model.safetensors.index.json", *shards},
        {"adapter_config.json", "adapter_model.safetensors"},
        {"config.json", "model.safetensors"},
    )
    for number, files in enumerate(exports):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in files:
            (folder / name).touch()
        push_folder(folder, "me/tale")
        assert Hub.there == kept | files


def test_an_upload_without_its_package_is_refused_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.preflight.rules.weights.find_spec", lambda name: None)
    config = _config(folder, "never", "dora", checkpoint={"push_to_hub": "me/tale"})
    [problem] = check(config, world_size=1, hardware=CPU_ONLY)
    assert "huggingface_hub is not installed" in str(problem) and ".[hf]" in str(problem)


def test_a_note_tells_what_of_the_model_peft_will_not_hear_of(folder: Path) -> None:
    def told(**tables: dict[str, Any]) -> str:
        return "\n".join(notes(_config(folder, "never", "dora", **tables), world_size=1, hardware=CPU_ONLY))

    other = {"rope_theta": 7e4}
    assert "does not record rope_theta" in told(model=other)
    assert "does not record" not in told() + told(model=other, finetune={"merge_on_export": True})
    assert "does not record" not in told(finetune={"classification": {"num_labels": 2}})
    named = told(finetune={"classification": {"num_labels": 2, "label_names": ["no", "yes"]}})
    assert "does not record finetune.classification.label_names, which" in named


@contextlib.contextmanager
def _alone() -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
