"""Adapters in use: generation through a cache, several on one base, over ranks, and merged by the tools."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.adapters import KINDS, OfModel, adapted, adapter_of, check_close, logits
from tests.helpers import run_world
from tests.models.small_llama import build, small
from tests.training import small_config
from toolkit.cli import run_command
from toolkit.config.finetune import Finetune
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.finetune.base import base_of
from toolkit.finetune.peft_folder import write_peft
from toolkit.generation.adapters import attach
from toolkit.generation.generator import Generator
from toolkit.generation.load import load_model
from toolkit.models.common.decoder import Decoder
from toolkit.weights import hf_write
from toolkit.weights.convert import prepare
from toolkit.weights.hf_write import SpecialTokens, write_hf
from toolkit.weights.open import open_weights

ARGS = small(n_kv_heads=2, head_dim=8, vocab_size=4352)
TOKENIZER = Path(__file__).parents[1] / "assets/tokenizer"
NEW = 20
BY_HEAD = {"adapter": "llama_adapter", "llama_adapter": {"adapter_len": 4, "adapter_layers": 2}}
IN_ATTENTION = {"prefix": KINDS["prefix"], "gate of all": KINDS["adaption prompt"], "gates": BY_HEAD}
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4000, (length,), generator=generator).tolist() for length in (1, 7, 20)]


def _strong(model: Decoder) -> Decoder:
    """Blocks that add more than a new model's do, so that texts vary."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wo.weight", "w2.weight")):
                parameter.mul_(8)
    return model


def _by_whole_forwards(model: Decoder, prompt: list[int]) -> list[int]:
    """Greedy, without a cache."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(logits(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", IN_ATTENTION)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_changes_no_token(kind: str, compiled: bool, tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(IN_ATTENTION[kind]), ARGS, tmp_path)
    model = _strong(build(ARGS, torch.float32))
    plain = _by_whole_forwards(model, _prompts()[1])
    attach(model, adapter)
    expected = [_by_whole_forwards(model, prompt) for prompt in _prompts()]
    # As for torch.compile, whose buffers stay in place from one text to the next.
    generator = Generator(model, compiler=(lambda model: model) if compiled else None)
    for _ in range(2):
        assert generator.generate(_prompts(), max_new_tokens=NEW) == expected
        assert [generator.generate([prompt], max_new_tokens=NEW)[0] for prompt in _prompts()] == expected
    assert expected[1] != plain


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and adapters of several kinds on it, as PEFT's folders."""
    at = tmp_path_factory.mktemp("adapters")
    _write_base(at / "base", _strong(build(ARGS, torch.float32)))
    found = {"base": at / "base"}
    for kind in ("lora", "dora", "prefix", "adaption prompt"):
        adapter = adapter_of(Finetune.model_validate(KINDS[kind]), ARGS, at / f"of {kind}")
        found[kind] = at / kind
        base = {"place": str(at / "base")}
        adapter = type(adapter)(adapter.place, ARGS, adapter.options, adapter.values, base)
        write_peft(adapter, found[kind], dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    return found


def _write_base(folder: Path, model: Decoder) -> None:
    folder.mkdir()
    source = OfModel(model, folder)
    write_hf(source, folder, tokens=SpecialTokens(), others={}, ranks=Ranks(alone=True), replace=True)


def _texts(folders: dict[str, Path], tp: int, order: list[str | None]) -> dict[str | None, Any]:
    named = {kind: path for kind, path in folders.items() if kind != "base"}
    loaded = load_model(folders["base"], **CPU, tp=tp, adapters=named)
    found = {}
    for kind in order:
        loaded.select(kind)
        found[kind] = loaded.generator().generate(_prompts(), max_new_tokens=NEW)
    return found


def _on_ranks(folders: dict[str, Path], order: list[str | None]) -> list[dict[str | None, Any]]:
    """Split by tp, and by FSDP."""
    return [_texts(folders, tp, order) for tp in (2, 1)]


def _alone(folder: Path) -> Any:
    return load_model(folder, **CPU).generator().generate(_prompts(), max_new_tokens=NEW)


def test_adapters_take_turns_on_one_base_in_any_order_and_on_any_ranks(folders: dict[str, Path]) -> None:
    expected = {kind: _alone(folder) for kind, folder in folders.items() if kind != "base"}
    expected |= {None: _alone(folders["base"])}
    texts = list(expected.values())
    assert all(text not in texts[:number] for number, text in enumerate(texts))
    order = ["dora", None, "prefix", "lora", "adaption prompt", "dora", "lora", None]
    assert _texts(folders, 1, order) == expected
    for found in run_world(_on_ranks, 2, folders, order[:5]):
        assert found == [{kind: expected[kind] for kind in order[:5]}] * 2


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_merge_is_a_model_of_transformers(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    words = ["merge", str(folders["base"]), str(folders[kind]), str(tmp_path / "out")]
    assert run_command("convert", [*words, "--max-bytes", "100000"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    adapter = adapter_of(Finetune.model_validate(KINDS[kind]), ARGS, tmp_path)
    tokens = torch.tensor(_prompts()[2:])
    check_close(logits(theirs, tokens), logits(adapted(adapter, _strong), tokens))


def test_a_merge_ends_texts_as_the_adapter_was_trained_to(folders: dict[str, Path], tmp_path: Path) -> None:
    base, trained = (shutil.copytree(folders[kind], tmp_path / kind) for kind in ("base", "lora"))
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert prepare("merge", base, tmp_path / "out", adapter=trained).companions.tokens.eos == 2
    shutil.copytree(TOKENIZER, trained, dirs_exist_ok=True)
    ids = load_tokenizer(TOKENIZER).stop_ids
    assert prepare("merge", base, tmp_path / "out", adapter=trained).companions.tokens.eos == [*ids]


def test_an_update_in_fp32_is_not_rounded_to_the_dtype_of_its_base(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    _write_base(tmp_path / "base", build(ARGS, torch.bfloat16))
    options = {"adapter": folders["lora"], "dtype": torch.float32}
    source = prepare("merge", tmp_path / "base", tmp_path / "out", **options).source
    adapter = adapter_of(Finetune.model_validate(KINDS["lora"]), ARGS, tmp_path)
    loaded = load_model(tmp_path / "base", **CPU, adapters={"a": folders["lora"]}).model
    name = "layers.1.attention.wq"
    a, b = (adapter.values[f"{name}.lora_{part}"] for part in "ab")
    expected = open_weights(tmp_path / "base").read(f"{name}.weight").float() + 4 * b @ a
    for found in (source.read(f"{name}.weight"), loaded.get_parameter(f"{name}.weight")):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_merge_does_not_go_on_with_that_of_another_adapter(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge(kind: str, name: str) -> int:
        words = ["merge", str(folders["base"]), str(folders[kind]), str(tmp_path / name)]
        return run_command("convert", [*words, "--max-bytes=100000"])

    def two_files(*rest: Any) -> None:  # of which one has updated weights
        if len(list(tmp_path.glob("out.tmp-*/*.safetensors"))) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*rest)

    save = hf_write._save
    with monkeypatch.context() as patched:
        patched.setattr(hf_write, "_save", two_files)
        assert merge("lora", "out") != 0
    assert len(list(tmp_path.glob("out.tmp-*/*.safetensors"))) == 2
    assert merge("dora", "out") == merge("dora", "alone") == 0
    for file in (tmp_path / "alone").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_what_cannot_be_merged_is_told(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert run_command("convert", ["merge", str(folders["base"]), str(folders["prefix"]), out]) == 3
    assert "prefix cannot be merged" in capsys.readouterr().err
    assert run_command("convert", ["dcp-to-hf", str(folders["lora"]), out]) == 3
    assert f"use merge BASE {folders['lora']} OUT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_base_is_remembered_wherever_a_program_runs(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders["base"].parent)
    options = {"enable": True, "initial_load_in_hf": True, "initial_load_path": "base"}
    assert base_of(small_config(tmp_path, checkpoint=options), {})["place"] == str(folders["base"].resolve())


def test_an_adapter_without_its_base_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in folders["lora"].iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    config = json.loads((moved / "adapter_config.json").read_text())
    for place, said in ((str(tmp_path / "gone"), "whose base cannot be opened"), (None, "is not recorded")):
        (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": place}))
        with pytest.raises(DataError, match=said) as raised:
            load_model(moved, **CPU)
        assert f"--adapter {moved} (llama-toolkit convert: merge BASE {moved} OUT)" in str(raised.value)


def test_chat_switches_adapters(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "/adapter nobody",
        "the same",
        "/reset",
        "/adapter b",
        "the same",
        "/reset",
        "/adapter",
        "the same",
    ]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("\n".join([*lines, "/reset", "/adapter a", "the same"]) + "\n")
    )
    assert run_command("chat", [*_words(folders), "--format=llama3", "--max-new-tokens=12"]) == 0
    out, err = capsys.readouterr()
    first, second, base, again = out.strip("\n").split("\n")
    assert first == again and len({first, second, base}) == 3
    assert "no adapter is called nobody: there are a, b" in err and "without an adapter" in err


def test_generate_takes_adapters_in_turn(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command("generate", [*_words(folders), "--prompt=the same", "--json", "--max-new-tokens=12"]) == 0
    )
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["adapter"], second["adapter"]) == ("a", "b") and first["tokens"] != second["tokens"]
    twice = [f"--adapter={folders['lora']}"] * 2
    assert run_command("generate", [*_words(folders), *twice, "--prompt=the same"]) == 2
    assert "name it: --adapter NAME=FOLDER" in capsys.readouterr().err
    assert run_command("generate", [str(folders["lora"]), f"--adapter={folders['dora']}", "--prompt=x"]) == 3
    assert "is itself an adapter" in capsys.readouterr().err
    assert run_command("generate", [str(folders["base"]), f"--adapter={folders['base']}", "--prompt=x"]) == 3
    assert "is not an adapter" in capsys.readouterr().err


def _words(folders: dict[str, Path]) -> list[str]:
    named = [f"--adapter={name}={folders[kind]}" for name, kind in (("a", "lora"), ("b", "prefix"))]
    return [str(folders["base"]), "--dtype=float32", "--temperature=0", f"--tokenizer={TOKENIZER}", *named]
