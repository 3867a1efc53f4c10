from __future__ import annotations

import base64
import itertools
import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from tests.data.unicode_strings import unicode_strings
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.files import find
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer, vocabulary_size
from toolkit.data.tokenizers.tiktoken_ranks import form_of, read_ranks, special_tokens
from toolkit.errors import DataError
from toolkit.models.llama.tokenizer import llama3_names

IN_TREE = Path(__file__).parents[1] / "assets"
TIKTOKEN = IN_TREE / "tokenizer/tokenizer.model"
SENTENCEPIECE = IN_TREE / "tokenizer_sentencepiece/tokenizer.model"
JSON = IN_TREE / "tokenizer_json/tokenizer.json"


def test_the_first_of_the_known_names_is_taken(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    shutil.copy(SENTENCEPIECE, tmp_path / "tokenizer.model")
    shutil.copy(TIKTOKEN, tmp_path / "original/tokenizer.model")
    shutil.copy(JSON, tmp_path)
    for kind, name in [
        ("sentencepiece", "tokenizer.model"),
        ("tiktoken", "original/tokenizer.model"),
        ("json", "tokenizer.json"),
    ]:
        tokenizer = load_tokenizer(str(tmp_path))
        assert (tokenizer.kind, tokenizer.path) == (kind, tmp_path / name)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("file", "kind"), [(TIKTOKEN, "tiktoken"), (SENTENCEPIECE, "sentencepiece"), (JSON, "json")]
)
def test_the_kind_is_told_by_content(tmp_path: Path, file: Path, kind: str) -> None:
    shutil.copy(file, tmp_path / "any.name")
    assert find(tmp_path / "any.name").kind == kind


def broken(tmp_path: Path, content: bytes, name: str = "tokenizer.model") -> Path:
    (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "tokenizer.model", "it is empty"),
        (b"\x80\x02}q\x00", "tokenizer.model", r"not a tokenizer of a known kind: it starts with b'\\x80"),
        (b"version https://git-lfs.github.com/spec/v1\n", "tokenizer.model", "git lfs pull"),
        (b"IQ== 0\nnonsense\n", "tokenizer.model", r"tokenizer.model:2: expected 'base64 rank'"),
        (b"IQ== 0\nIg== x\n", "tokenizer.model", r"tokenizer.model:2: expected"),
        (b"IQ== 0\nIg== 2\n", "tokenizer.model", "ranks are not 0 to 1"),
        (b"IQ== 0\nIQ== 1\n", "tokenizer.model", "ranks are not 0 to 1"),
        (SENTENCEPIECE.read_bytes()[:30_000], "tokenizer.model", "not a complete SentencePiece model"),
        (JSON.read_bytes()[:30_000], "tokenizer.json", "is not JSON"),
        (b'{"added_tokens": []}', "tokenizer.json", "not a tokenizer.json"),
        (b'{"model": {"vocab": {}, "type": "none"}}', "tokenizer.json", "cannot be read by tokenizers"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        load_tokenizer(broken(tmp_path, content, name))
    assert str(tmp_path / name) in str(raised.value)


def test_what_is_missing_and_what_is_accepted_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path, tmp_path / "none"):
        for use in (load_tokenizer, vocabulary_size):
            with pytest.raises(DataError) as raised:
                use(path)
            for part in (str(path), "tokenizer.model", "original/tokenizer.model", "tokenizer.json"):
                assert part in str(raised.value)
    with pytest.raises(DataError, match="it contains model.safetensors"):
        load_tokenizer(tmp_path)


def test_names_of_both_releases() -> None:
    older, newer = llama3_names(older=True), llama3_names()
    assert len(older) == len(set(older)) == len(newer) == len(set(newer)) == 256
    assert older[4] == "<|reserved_special_token_2|>" and older[255] == "<|reserved_special_token_250|>"
    assert newer[4] == "<|finetune_right_pad_id|>" and newer[255] == "<|reserved_special_token_247|>"
    for offset, name in [(0, "begin_of_text"), (6, "start_header_id"), (7, "end_header_id"), (9, "eot_id")]:
        assert older[offset] == newer[offset] == f"<|{name}|>"


@pytest.mark.parametrize(
    ("file", "content", "older"),
    [
        ("config.json", {"model_type": "llama", "rope_scaling": None}, True),
        ("config.json", {"model_type": "llama", "rope_scaling": {"factor": 8.0}}, False),
        (
            "config.json",
            {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "factor": 8.0}},
            False,
        ),
        ("params.json", {"dim": 4096}, True),
        ("params.json", {"dim": 4096, "use_scaled_rope": True}, False),
        ("README.md", {}, False),
    ],
)
def test_the_folder_says_which_release(tmp_path: Path, file: str, content: dict, older: bool) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    shutil.copy(TIKTOKEN, tmp_path)
    files = find(tmp_path)
    names = special_tokens(form_of(128_000, files.path), 128_000, files.folder, {})
    assert names == {name: 128_000 + i for i, name in enumerate(llama3_names(older=older))}
    # A tokenizer that is not Meta's is of no release: the newer names, which have a padding token.
    assert load_tokenizer(tmp_path).pad_id == 3844


def test_tokenizer_config_names_tokens_roles_and_additions(tmp_path: Path) -> None:
    shutil.copy(TIKTOKEN, tmp_path)
    config = {
        "added_tokens_decoder": {"3844": {"content": "<|mine|>"}, "4096": {"content": "<|pad|>"}},
        "bos_token": {"content": "<|begin_of_text|>"},
        "eos_token": "<|eot_id|>",
        "pad_token": "<|pad|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens["<|mine|>"] == 3844
    assert "<|finetune_right_pad_id|>" not in tokenizer.special_tokens
    assert (tokenizer.pad_id, tokenizer.n_words, vocabulary_size(tmp_path)) == (4096, 4097, 4097)
    # The end of a document, where an instruct model's config names the end of a turn.
    assert tokenizer.eos_id == 3841 and 3849 in tokenizer.stop_ids
    assert tokenizer.decode([3844, 4096]) == "<|mine|><|pad|>"


def test_tokens_added_to_a_sentencepiece_model(tmp_path: Path) -> None:
    shutil.copy(SENTENCEPIECE, tmp_path)
    config = {"added_tokens_decoder": {"4096": {"content": "<pad>"}}, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.n_words, vocabulary_size(tmp_path)) == (4096, 4097, 4097)
    assert tokenizer.decode([*tokenizer.encode("a b"), 4096]) == "a b<pad>"
    assert tokenizer.decode([*tokenizer.encode("a b"), 4096], skip_special=True) == "a b"


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.json"])
def test_files_of_other_releases_name_tokens_roles_and_additions(tmp_path: Path, name: str) -> None:
    """As transformers reads them: of a folder whose tokenizer_config.json lists no added tokens."""
    shutil.copy(SENTENCEPIECE, tmp_path)
    config = {"eos_token": "</s>", "pad_token": "<unk>", "additional_special_tokens": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    added: dict[str, Any] = {"<|im_end|>": 4096, "<|im_start|>": 4097}
    if name == "tokenizer.json":
        added = {"added_tokens": [{"id": token, "content": said} for said, token in added.items()]}
    (tmp_path / name).write_text(json.dumps(added))
    roles = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "unk_token": "<unk>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    copies = [
        extend_tokenizer(tmp_path, tmp_path / "cache", template="{{ eos_token }}"),
        extend_tokenizer(tmp_path, tmp_path / "cache", tokens=["<|mine|>"]),
    ]
    for folder in (tmp_path, *copies):
        tokenizer = load_tokenizer(folder)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 4096, 0)
        assert tokenizer.special_tokens["<|im_start|>"] == 4097
        assert vocabulary_size(folder) == tokenizer.n_words == 4098 + (folder == copies[1])
    template = ChatTemplate(load_tokenizer(tmp_path), "<|im_start|>{{ eos_token }}")
    assert template.encode([{"role": "user", "content": "a"}]) == [4097, 4096]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    assert (load_tokenizer(tmp_path).eos_id, load_tokenizer(tmp_path).n_words) == (2, 4096)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": "x"}')
    with pytest.raises(DataError, match=r"added_tokens_decoder.x = .*: must be a token under its id"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_that_are_not_special_are_tokens_in_any_text(tmp_path: Path, special: bool) -> None:
    """Beside a SentencePiece model, as transformers saves both. The tokenizer.json is another one's."""
    shutil.copy(SENTENCEPIECE, tmp_path)
    described = json.loads(JSON.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"].append({"id": 4096, "content": "<think>", "special": special, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.kind == ("sentencepiece" if special else "json")
    assert (4096 in tokenizer.encode("a <think> b")) is not special
    assert tokenizer.n_words == vocabulary_size(tmp_path) == 4097


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    shutil.copy(TIKTOKEN, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)


def test_original_is_named_by_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    shutil.copy(TIKTOKEN, tmp_path / "original")
    config = {"added_tokens_decoder": {"3844": {"content": "<|mine|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "original/tokenizer.model"):
        assert load_tokenizer(path).special_tokens["<|mine|>"] == 3844


def test_special_tokens_start_after_the_ranks() -> None:
    form = form_of(300, Path("tokenizer.model"))
    assert list(special_tokens(form, 300, Path(), {}).values()) == list(range(300, 556))


ADDING = json.loads(JSON.read_bytes())["post_processor"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def folder_of(folder: Path, file: Path, **config: Any) -> Path:
    shutil.copy(file, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize(
    ("processor", "adds"),
    [
        (ADDING, True),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, ADDING]}, True),
        (BYTE_LEVEL, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_tokenizer_json_says_whether_a_text_begins_with_bos(
    tmp_path: Path, processor: dict[str, Any] | None, adds: bool, config: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    folder_of(tmp_path, JSON, tokenizer_class="GPT2Tokenizer", **names, **config)
    content = json.loads(JSON.read_bytes()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.adds_bos == adds
    ids = tokenizer.encode("It was", bos=tokenizer.adds_bos)
    assert ids == AutoTokenizer.from_pretrained(tmp_path)("It was").input_ids
    shutil.copy(TIKTOKEN, tmp_path)  # which is then read, and says nothing of it
    assert (load_tokenizer(tmp_path).kind, load_tokenizer(tmp_path).adds_bos) == ("tiktoken", adds)


@pytest.mark.parametrize("file", [SENTENCEPIECE, TIKTOKEN])
@pytest.mark.parametrize(
    ("config", "adds"), [({}, True), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)]
)
def test_without_tokenizer_json_its_config_says_it_and_else_llama_does(
    tmp_path: Path, file: Path, config: dict[str, Any], adds: bool
) -> None:
    assert load_tokenizer(folder_of(tmp_path, file, **config)).adds_bos == adds


def test_an_eos_after_the_text_that_is_bos_as_well_begins_none(tmp_path: Path) -> None:
    both = "<|end_of_text|>"
    folder_of(tmp_path, JSON, bos_token=both, eos_token=both)
    after = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": both, "type_id": 0}}]
    added = {both: {"id": both, "ids": [3841], "tokens": [both]}}
    processor = {"type": "TemplateProcessing", "single": after, "pair": ADDING["pair"]}
    processor["special_tokens"] = ADDING["special_tokens"] | added
    content = json.loads(JSON.read_bytes()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).bos_id == 3841 and not load_tokenizer(tmp_path).adds_bos


@pytest.mark.parametrize("processor", [None, ADDING])
def test_a_bos_that_is_null_is_none_unless_texts_begin_with_one(
    tmp_path: Path, processor: dict[str, Any] | None
) -> None:
    """A token with a name that BOS has elsewhere may end documents here."""
    content = json.loads(JSON.read_bytes()) | {"post_processor": processor}
    folder_of(tmp_path, JSON, bos_token=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id is None) == (processor is None) == (not tokenizer.adds_bos)
    assert load_tokenizer(tmp_path, add_bos=True).bos_id == 3840


def test_a_post_processor_of_no_known_kind_is_named(tmp_path: Path) -> None:
    shutil.copy(TIKTOKEN, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"post_processor": {"type": "Unheard"}}')
    with pytest.raises(DataError, match="tokenizer.json cannot be read by tokenizers"):
        load_tokenizer(tmp_path)


def test_bos_is_forced_on_or_off_and_changes_the_fingerprint() -> None:
    by_files, off, on = (load_tokenizer(JSON, add_bos=asked) for asked in (None, False, True))
    assert (by_files.adds_bos, off.adds_bos, on.adds_bos) == (True, False, True)
    assert by_files.fingerprint == on.fingerprint != off.fingerprint
    assert off.bos_id == on.bos_id  # chat formats take it from here


def test_a_bos_that_is_not_there_is_not_forced(tmp_path: Path) -> None:
    content = json.loads(JSON.read_bytes()) | {"added_tokens": [], "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert not load_tokenizer(tmp_path).adds_bos
    with pytest.raises(DataError, match="no BOS token"):
        load_tokenizer(tmp_path, add_bos=True)


LLAMA4_TOKENS = {
    "<|begin_of_text|>": 200_000, "<|fim_suffix|>": 200_004, "<|header_start|>": 200_005, "<|eot|>": 200_008,
    "<|finetune_right_pad|>": 200_018, "<|text_post_train_reserved_special_token_68|>": 200_079,
    "<|image_start|>": 200_080, "<|image|>": 200_090, "<|patch|>": 200_092,
    "<|vision_reserved_special_token_1047|>": 201_133, "<|reasoning_thinking_end|>": 201_143,
    "<|reserved_special_token_0|>": 201_144, "<|reserved_special_token_903|>": 202_047,
}  # fmt: skip
LLAMA4_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tiktoken_of(folder: Path, n_ranks: int, *tokens: bytes) -> Path:
    """A file of the 256 bytes, ``tokens`` and as many words of four letters as make ``n_ranks``."""
    words = map(bytes, itertools.product(string.ascii_lowercase.encode(), repeat=4))
    ranks = [*(bytes([byte]) for byte in range(256)), *tokens]
    ranks += itertools.islice(words, n_ranks - len(ranks))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


def test_llama_4s_file_has_its_word_pattern_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiktoken_of(tmp_path, 200_000, b"oW", b"n'", b"'t", b"./"))
    assert tokenizer.n_words == vocabulary_size(tmp_path) == 202_048
    assert LLAMA4_TOKENS.items() <= tokenizer.special_tokens.items()
    assert sorted(tokenizer.special_tokens.values()) == list(range(200_000, 202_048))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (200_000, 200_001, 200_018)
    assert tokenizer.stop_ids == (200_001, 200_007, 200_008)
    ranks = read_ranks((tmp_path / "tokenizer.model").read_bytes(), tmp_path)
    theirs = tiktoken.Encoding("theirs", pat_str=LLAMA4_WORDS, mergeable_ranks=ranks, special_tokens={})
    for text in ("helloWorld don't a./b", *unicode_strings(500, seed=4)):
        assert tokenizer.encode(text) == theirs.encode_ordinary(text)
    assert len(tokenizer.encode("oW")) == 2  # one word of Llama 3's pattern, two of this


@pytest.mark.parametrize("n_ranks", [128_001, 151_643, 199_998, 200_001, 100_256])
def test_ranks_of_another_model_are_refused(tmp_path: Path, n_ranks: int) -> None:
    tiktoken_of(tmp_path, n_ranks)
    for use in (load_tokenizer, vocabulary_size):
        with pytest.raises(DataError, match=f"has {n_ranks:,} tiktoken ranks.*128,000.*200,000") as raised:
            use(tmp_path)
        assert "fix:  use the tokenizer.json" in str(raised.value)


def test_ranks_of_another_word_pattern_are_refused(tmp_path: Path) -> None:
    assert load_tokenizer(tiktoken_of(tmp_path, 5_000, b"201")).n_words == 5_256
    with pytest.raises(DataError, match="has a token '2017', which spans words of Llama 3"):
        load_tokenizer(tiktoken_of(tmp_path, 5_000, b"20", b"17", b"2017"))
