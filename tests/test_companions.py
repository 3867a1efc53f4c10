"""Which tokenizer belongs to weights that were found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.preflight.bad_weights import write_model
from toolkit.companions import tokenizer_companions, tokenizer_of
from toolkit.data.tokenizer import load_tokenizer
from toolkit.sources import open_source
from tools.convert_weights import main

TOKENIZER = Path("tests/assets/tokenizer").resolve()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = write_model(tmp_path)
    shutil.copy(next(TOKENIZER.glob("tokenizer.*")), model)
    return model


def test_a_converted_model_keeps_the_tokenizer_that_it_had(model: Path, tmp_path: Path) -> None:
    assert main(["hf-to-dcp", str(model), str(tmp_path / "converted")]) == 0
    assert tokenizer_of(open_source(tmp_path / "converted")) == model.resolve()


def test_a_hugging_face_folder_has_its_own_tokenizer_or_none(model: Path, tmp_path: Path) -> None:
    assert tokenizer_of(open_source(model)) == model
    (file,) = model.glob("tokenizer.*")
    shutil.move(file, tmp_path)
    assert tokenizer_of(open_source(model)) is None


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_json"])
def test_what_is_handed_on_says_as_the_run_whether_texts_begin_with_bos(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    given = TOKENIZER.parent / name
    assert load_tokenizer(given).adds_bos
    for file, content in tokenizer_companions(given, add_bos=False).files.items():
        (tmp_path / file).write_bytes(content)
    ours = load_tokenizer(tmp_path)
    assert not ours.adds_bos
    assert AutoTokenizer.from_pretrained(tmp_path)("It was").input_ids == ours.encode("It was")
    assert tokenizer_companions(given, add_bos=True).files == tokenizer_companions(given).files
