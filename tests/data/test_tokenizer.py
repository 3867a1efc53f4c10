from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.unicode_strings import unicode_strings
from toolkit.data.tokenizers import tiktoken_tokenizer as module
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer, vocabulary_size
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

IN_TREE = Path(__file__).parents[1] / "assets"
REAL = os.environ.get("TOOLKIT_ASSETS")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

needs_assets = pytest.mark.skipif(REAL is None, reason="TOOLKIT_ASSETS is not set")
FILES = [
    pytest.param(IN_TREE / "tokenizer/tokenizer.model", id="tiktoken"),
    pytest.param(IN_TREE / "tokenizer_sentencepiece/tokenizer.model", id="sentencepiece"),
    pytest.param(IN_TREE / "tokenizer_json/tokenizer.json", id="json"),
]
REAL_FILES = [
    pytest.param(Path(REAL or "", "tokenizers", *parts), id="-".join(parts), marks=needs_assets)
    for parts in (
        ("llama3", "tokenizer.model"),
        ("llama2", "tokenizer.model"),
        ("hf_llama3_1", "tokenizer.json"),
    )
]


@pytest.fixture(scope="module", params=FILES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.param)


def library_encoder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Encoding by the library of the file's kind, called as its own documentation says."""
    if path.suffix == ".json":
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode_special_tokens = True
        return lambda text: backend.encode(text, add_special_tokens=False).ids
    if path.read_bytes()[:1] == b"\n":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    import tiktoken
    import tiktoken.load

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding(
        "reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
    ).encode_ordinary


@pytest.mark.parametrize("path", [*FILES, *REAL_FILES])
def test_ids_are_the_librarys_own_and_text_comes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, library = load_tokenizer(path), library_encoder(path, monkeypatch)
    strings = unicode_strings(10_000, seed=2)
    batch = tokenizer.encode_batch(strings)
    wrong = [
        text
        for text, ids in zip(strings, batch, strict=True)
        if ids != library(text) or tokenizer.encode(text) != ids or tokenizer.decode(ids) != text
    ]
    assert not wrong, f"{len(wrong)} strings, first {wrong[0]!r}"


def test_the_json_form_of_the_default_tokenizer_gives_its_ids() -> None:
    tiktoken, by_json = load_tokenizer(IN_TREE / "tokenizer"), load_tokenizer(IN_TREE / "tokenizer_json")
    strings = unicode_strings(3_000, seed=3)
    assert tiktoken.encode_batch(strings) == by_json.encode_batch(strings)
    assert tiktoken.special_tokens == by_json.special_tokens
    assert tiktoken.n_words == by_json.n_words == 4096


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text), default=0) < tokenizer.n_words


def test_names_of_special_tokens_in_text_are_text(tokenizer: Tokenizer) -> None:
    for name in tokenizer.special_tokens:
        ids = tokenizer.encode(f"a{name}b")
        assert not set(ids) & set(tokenizer.special_tokens.values()), name
        assert tokenizer.decode(ids) == f"a{name}b"


def test_names_of_special_tokens_are_text_in_other_processes_too(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 (our own bytes)
    for name in tokenizer.special_tokens:
        assert copy.encode(f"a{name}b") == tokenizer.encode(f"a{name}b"), name


def test_bos_and_eos_stand_where_asked_for_and_once(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Call me Ishmael.")
    assert tokenizer.bos_id not in plain and tokenizer.eos_id not in plain
    assert tokenizer.encode("Call me Ishmael.", bos=True, eos=True) == [
        tokenizer.bos_id,
        *plain,
        tokenizer.eos_id,
    ]
    assert tokenizer.encode("", bos=True) == [tokenizer.bos_id]
    assert tokenizer.encode("") == []


def test_special_tokens_decode_by_name_or_not_at_all(tokenizer: Tokenizer) -> None:
    name = {token: name for name, token in tokenizer.special_tokens.items()}
    ids = tokenizer.encode("one two", bos=True, eos=True)
    space = " " if tokenizer.kind == "sentencepiece" else ""
    assert tokenizer.decode(ids) == f"{name[ids[0]]}{space}one two{name[ids[-1]]}"
    assert tokenizer.decode(ids, skip_special=True) == "one two"


def test_lone_surrogates_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud83d\ude00b\ud800c") == tokenizer.encode("a\U0001f600b\ufffdc")
    assert tokenizer.encode_batch(["\udc00x"]) == [tokenizer.encode("\ufffdx")]


@pytest.mark.parametrize("token", [-1, 4096])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(DataError, match=rf"{token} is not in .* 4,096 tokens"):
        tokenizer.decode([5, token])


def test_a_size_is_known_without_building_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert vocabulary_size(tokenizer.path) == tokenizer.n_words == 4096


@needs_assets
@pytest.mark.parametrize(
    ("name", "size"), [("llama3", 128_256), ("hf_llama3_1", 128_256), ("llama2", 32_000)]
)
def test_sizes_of_metas_files(name: str, size: int) -> None:
    assert vocabulary_size(Path(REAL or "", "tokenizers", name)) == size


def test_roles() -> None:
    llama3, llama2 = (
        load_tokenizer(IN_TREE / "tokenizer"),
        load_tokenizer(IN_TREE / "tokenizer_sentencepiece"),
    )
    # 3,840 ranks, then Llama 3.1's tokens: begin_of_text 0, end_of_text 1, pad 4, eom 8, eot 9.
    assert (llama3.bos_id, llama3.eos_id, llama3.pad_id) == (3840, 3841, 3844)
    assert llama3.stop_ids == (3841, 3848, 3849)
    assert llama3.special_tokens["<|reserved_special_token_247|>"] == 4095
    assert (llama2.bos_id, llama2.eos_id, llama2.pad_id, llama2.stop_ids) == (1, 2, None, (2,))
    assert llama2.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_a_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    original = IN_TREE / "tokenizer/tokenizer.model"
    shutil.copy(original, tmp_path / "copy.model")
    (tmp_path / "other.model").write_bytes(original.read_bytes().replace(b" 3839\n", b" 3839\r\n"))
    fingerprint = load_tokenizer(original).fingerprint
    assert load_tokenizer(tmp_path / "copy.model").fingerprint == fingerprint
    assert load_tokenizer(tmp_path / "other.model").fingerprint != fingerprint
    assert load_tokenizer(IN_TREE / "tokenizer_json").fingerprint != fingerprint


def test_truncation_and_padding_of_a_json_file_do_not_apply(tmp_path: Path) -> None:
    content = json.loads((IN_TREE / "tokenizer_json/tokenizer.json").read_bytes())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "Some years ago, never mind how long precisely"
    ids = load_tokenizer(IN_TREE / "tokenizer_json").encode(text)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == ids and tokenizer.encode_batch([text]) == [ids]


def metas_cuts(text: str, max_characters: int, max_run: int) -> list[str]:
    """Chunks that Meta's code hands to tiktoken, restated character by character from its description."""
    chunks = []
    for start in range(0, len(text), max_characters):
        chunk, run = "", 0
        for character in text[start : start + max_characters]:
            same = bool(chunk) and chunk[-1].isspace() == character.isspace()
            run = run + 1 if same else 1
            if run > max_run:
                chunks.append(chunk)
                chunk, run = "", 1
            chunk += character
        chunks.append(chunk)
    return chunks


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.tuples(st.sampled_from("a \n\x1c\u3000é"), st.integers(1, 20)), max_size=12),
    limits=st.tuples(st.integers(9, 60), st.integers(2, 9)),
)
def test_long_input_is_cut_where_metas_code_cuts(
    text: list[tuple[str, int]], limits: tuple[int, int]
) -> None:
    joined = "".join(character * count for character, count in text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHARACTERS", limits[0])
        patch.setattr(module, "MAX_RUN", limits[1])
        assert list(module._chunks(joined)) == metas_cuts(joined, *limits)


@pytest.mark.parametrize("text", ["a" * 60_000, " " * 30_000 + "x", "ab " * 150_000])
def test_long_input_to_tiktoken(text: str) -> None:
    tokenizer = load_tokenizer(IN_TREE / "tokenizer")
    chunks = metas_cuts(text, 400_000, 25_000)
    assert len(chunks) > 1
    ids = tokenizer.encode(text)
    assert ids == [token for chunk in chunks for token in tokenizer._encoding.encode_ordinary(chunk)]
    assert tokenizer.decode(ids) == text


def test_import_is_light() -> None:
    heavy = "{'torch', 'numpy', 'tiktoken', 'sentencepiece', 'tokenizers'}"
    code = f"import sys, toolkit.data.tokenizers.load_tokenizer; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
