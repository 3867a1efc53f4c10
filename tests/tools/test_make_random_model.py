"""tools/make_random_model: a folder that transformers loads, with the weights that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.preflight.bad_runs import TOKENIZER
from toolkit.errors import EXIT_DATA
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import hf_row_order
from toolkit.models.parameters import init_rule, table
from toolkit.models.registry import resolve
from toolkit.parallel.init_weights import initialize
from toolkit.weights import hf_write
from tools.make_random_model import main

# wq has 300 rows more than a block of BLOCK_ELEMENTS, and blocks that part heads.
SHAPE = {"dim": 360, "n_layers": 2, "n_heads": 10, "n_kv_heads": 5, "head_dim": 102, "ffn_dim": 500}


@pytest.mark.parametrize("name", ["llama2", "llama3.2"])
def test_weights_are_those_of_a_run_and_transformers_finds_them(name: str, tmp_path: Path) -> None:
    flags = [f"--set={key}={value}" for key, value in SHAPE.items()]
    out = tmp_path / "m"
    files = ["--tokenizer", str(TOKENIZER), "--max-bytes", "3000000"]
    assert main([str(out), "--name", name, "--flavor=debugmodel", "--seed=3", *flags, *files]) == 0

    model = Decoder(resolve(name, "debugmodel", tokenizer_vocab=4096, **SHAPE))
    initialize(model.named_parameters(), 3, lambda parameter: init_rule(parameter, model.args))
    rows, found = table(model.args), {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert found.keys() == {rows.to_hf(name) for name, _ in model.named_parameters()}
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / "tokenizer.model").is_file()
    for ours, parameter in model.named_parameters():
        expected = parameter.detach()
        if rows[ours].rotary:
            expected = expected[hf_row_order(range(len(expected)), SHAPE["head_dim"])]
        assert torch.equal(found[rows[ours].hf], expected.bfloat16()), ours

    _, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())


def test_files_have_no_fewer_bytes_than_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "m"), "--flavor=debugmodel", "--max-bytes=-1"])
    assert ended.value.code == 2 and "--max-bytes is 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("appears", ["before", "meanwhile"])
def test_a_folder_with_something_in_it_is_left_alone(
    appears: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save_file = tmp_path / "precious", hf_write.save_file

    def notes_appear(*arguments: Any, **options: Any) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes").write_text("mine")
        save_file(*arguments, **options)

    monkeypatch.setattr(hf_write, "save_file", notes_appear)
    if appears == "before":
        out.mkdir()
        (out / "notes").write_text("mine")
    assert main([str(out), "--flavor=debugmodel", "--set=vocab_size=96"]) == EXIT_DATA
    assert "exists: choose" in capsys.readouterr().err
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    assert len(list(tmp_path.iterdir())) == (1 if appears == "before" else 2)  # what is done is gone on with


def test_a_mistake_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m"), "--flavor=7b"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 7B?" in said and "error: --flavor = " in said
    assert list(tmp_path.iterdir()) == []
