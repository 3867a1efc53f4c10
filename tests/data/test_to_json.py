"""The tokenizer.json made of a tiktoken file, beside the one that Meta published for the same tokenizer."""

import json
import os
from pathlib import Path

import pytest

from toolkit.data.tokenizers.files import find
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.to_json import tokenizer_json

ASSETS = Path(os.environ.get("TOOLKIT_ASSETS", ""))
needs_assets = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")


def _made(path: Path) -> dict[str, bytes]:
    return tokenizer_json(load_tokenizer(path), find(path).content)


@needs_assets
def test_it_is_metas_own_save_for_what_has_no_effect() -> None:
    theirs = json.loads((ASSETS / "tokenizers" / "hf_llama3_1" / "tokenizer.json").read_bytes())
    ours = json.loads(_made(ASSETS / "tokenizers" / "llama3")["tokenizer.json"])
    assert ours["model"]["vocab"] == theirs["model"]["vocab"]
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    for key in ("pre_tokenizer", "decoder", "normalizer"):
        assert ours[key] == theirs[key]
    assert ours["post_processor"] == theirs["post_processor"]["processors"][1]
    assert [token["id"] for token in ours["added_tokens"]] == [
        token["id"] for token in theirs["added_tokens"]
    ]


def test_transformers_reads_it_and_gives_tiktokens_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = Path(__file__).parents[1] / "assets" / "tokenizer"
    ours = load_tokenizer(folder)
    for name, content in _made(folder).items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.n_words
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for part in (text, "naïve 北京  \n\n\t 12345 it's ✓", ""):
        assert theirs(part)["input_ids"] == ours.encode(part, bos=True)
        assert theirs.decode(theirs(part)["input_ids"], skip_special_tokens=True) == part
