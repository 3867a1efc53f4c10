"""Which tokenizer belongs to weights that were found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.preflight.bad_weights import write_model
from toolkit.cli import run_command
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.weights.hf_assets import tokenizer_companions, tokenizer_of
from toolkit.weights.open import open_weights

ASSETS = Path("tests/assets").resolve()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = write_model(tmp_path)
    shutil.copy(next((ASSETS / "tokenizer").glob("tokenizer.*")), model)
    return model


def test_a_converted_model_keeps_the_tokenizer_that_it_had(model: Path, tmp_path: Path) -> None:
    assert run_command("convert", ["hf-to-dcp", str(model), str(tmp_path / "converted")]) == 0
    assert tokenizer_of(open_weights(tmp_path / "converted")) == model.resolve()


def test_a_hugging_face_folder_has_its_own_tokenizer_or_none(model: Path, tmp_path: Path) -> None:
    assert tokenizer_of(open_weights(model)) == model
    (file,) = model.glob("tokenizer.*")
    shutil.move(file, tmp_path)
    assert tokenizer_of(open_weights(model)) is None


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_json"])
def test_what_is_handed_on_says_as_the_run_whether_texts_begin_with_bos(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    given = ASSETS / name
    assert load_tokenizer(given).adds_bos
    for file, content in tokenizer_companions(given, add_bos=False).files.items():
        (tmp_path / file).write_bytes(content)
    ours = load_tokenizer(tmp_path)
    assert not ours.adds_bos
    assert AutoTokenizer.from_pretrained(tmp_path)("It was").input_ids == ours.encode("It was")
    assert tokenizer_companions(given, add_bos=True).files == tokenizer_companions(given).files


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_text_ends_where_the_chat_template_ends_an_answer(tmp_path: Path, place: str) -> None:
    """Beside where the tokenizer's texts do; a template that is none is handed on without a word."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|done|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokens = ["<|assistant|>", "<|done|>"]
    original = ASSETS / "tokenizer_json"
    copy = extend_tokenizer(original, tmp_path, tokens=tokens)
    tokenizer = load_tokenizer(copy)
    alone = [*tokenizer.stop_ids]
    assert tokenizer_companions(copy).tokens.eos == (alone if len(alone) > 1 else tokenizer.eos_id)
    for text, added in (template, [tokenizer.special_tokens["<|done|>"]]), ("{% if %}", []):
        (copy / place).write_text(text)
        if place == "tokenizer_config.json":
            (copy / place).write_text(json.dumps({"chat_template": text}))
        stops = sorted([*alone, *added])
        assert tokenizer_companions(copy).tokens.eos == (stops if len(stops) > 1 else stops[0])


def test_metas_folder_keeps_beside_it_what_its_params_have_no_place_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids of BOS and EOS that are not the tokenizer's, and what says that texts begin with no BOS."""
    (model / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"bos_token_id": 7, "eos_token_id": 8}))
    (model / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert run_command("convert", ["hf-to-meta", str(model), str(tmp_path / "meta")]) == 0
    assert run_command("convert", ["meta-to-hf", str(tmp_path / "meta"), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["bos_token_id"], back["eos_token_id"]) == (7, [8, 9])
    assert "will find no" not in capsys.readouterr().out
    for folder in (model, tmp_path / "meta", tmp_path / "back"):
        assert not load_tokenizer(folder).adds_bos
    assert not (tmp_path / "meta" / "tokenizer.json").exists()  # made for transformers alone


def test_a_hugging_face_folder_without_tokenizer_and_ids_is_said_to_be(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.glob("tokenizer.*"):
        file.unlink()
    assert run_command("convert", ["hf-to-meta", str(model), str(tmp_path / "meta")]) == 0
    assert "Meta's programs will find no tokenizer.model next to it" in capsys.readouterr().out
    (tmp_path / "meta" / "generation_config.json").unlink()  # as Meta's own folders have none
    assert run_command("convert", ["meta-to-hf", str(tmp_path / "meta"), str(tmp_path / "back")]) == 0
    assert "transformers will find no tokenizer, no bos_token_id, no eos_token_id" in capsys.readouterr().out
    assert not (tmp_path / "back" / "generation_config.json").exists()
