"""The token cache: right, built once however many come, and never trusted when it is not whole."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.data.byte_tokenizer import ByteTokenizer, ModuleProbe
from toolkit.config import load_config
from toolkit.data import content_hash, sources, text_files, token_files
from toolkit.data import token_cache as cache_module
from toolkit.data.build import run_tokenizer
from toolkit.data.corpus import Corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache, open_cache
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.io import block_hashes

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {number}: " + "ab\n" * (number % 7) for number in range(60)]


@pytest.fixture
def source(tmp_path: Path) -> Corpus:
    """One JSON file and a text file of a few chunks, if chunks are small."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "b.txt").write_text("line\n" * 500)
    return Corpus("corpus", (tmp_path / "a.jsonl", tmp_path / "b.txt"), "text")


def _build(source: Corpus, tokenizer: ByteTokenizer, folder: Path, **options: int) -> TokenCache:
    return tokenize_corpus(source, tokenizer, cache_folder=folder, progress=False, **options)


def _documents(cache: TokenCache) -> list[list[int]]:
    return [part.tolist() for part in np.split(cache.tokens, cache.offsets[1:-1])]


def _expected(texts: list[str]) -> list[list[int]]:
    return [[256, *text.encode(), 257] for text in texts]


def _same(first: TokenCache, second: TokenCache) -> bool:
    return np.array_equal(first.tokens, second.tokens) and np.array_equal(first.offsets, second.offsets)


# --- content ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_documents_are_framed_and_in_order(tmp_path: Path, source: Corpus, processes: int) -> None:
    with mock.patch.object(text_files, "CHUNK_BYTES", 200):
        cache = _build(source, ByteTokenizer(), tmp_path / "cache", processes=processes)
    assert _documents(cache) == _expected([*TEXTS, "line\n" * 500])
    assert (cache.n_documents, cache.n_tokens) == (61, len(cache.tokens))
    assert cache.tokens.dtype == np.uint16 and cache.offsets.dtype == np.int64


def test_a_tokenizer_without_bos_or_eos_adds_none(tmp_path: Path, source: Corpus) -> None:
    cache = _build(source, ByteTokenizer(bos_id=None), tmp_path / "cache")
    assert _documents(cache)[0] == [*TEXTS[0].encode(), 257]
    cache = _build(source, ByteTokenizer(bos_id=None, eos_id=None, fingerprint="2"), tmp_path / "cache")
    assert _documents(cache)[0] == [*TEXTS[0].encode()]


def test_documents_begin_with_bos_or_not_as_the_config_has_it(tmp_path: Path, source: Corpus) -> None:
    def cache(*flags: str) -> TokenCache:
        return _build(source, run_tokenizer(load_config(list(flags))), tmp_path / "cache")  # type: ignore[arg-type]

    by_files, off = cache(), cache("--model.add_bos_token=false")
    assert [document[1:] for document in _documents(by_files)] == _documents(off)
    assert {document[0] for document in _documents(by_files)} == {3840}
    assert cache("--model.add_bos_token=true").fingerprint == by_files.fingerprint != off.fingerprint


@pytest.mark.parametrize(("n_words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_two_bytes_where_they_fit(tmp_path: Path, source: Corpus, n_words: int, dtype: str) -> None:
    eos = n_words - 1
    cache = _build(source, ByteTokenizer(n_words=n_words, eos_id=eos), tmp_path / "cache")
    assert cache.tokens.dtype == dtype and int(cache.tokens[-1]) == eos


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="contains no text in its file\n  fix:"):
        _build(Corpus("nothing", (tmp_path / "a.txt",), "text"), ByteTokenizer(), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("*.building"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_in_the_text_is_the_first_one(tmp_path: Path, source: Corpus, processes: int) -> None:
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": 1}\n' + json.dumps({"text": "fine"}) * 9 + "\n{}\n")
    with (
        mock.patch.object(text_files, "CHUNK_BYTES", 60),
        pytest.raises(DataError, match=r"a.jsonl, line 61: column 'text' contains a JSON number"),
    ):
        _build(source, ByteTokenizer(), tmp_path / "cache", processes=processes)


def test_a_text_file_in_chunks_has_the_ids_of_the_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ROOT / "tests" / "assets" / "tokenizer")
    text = next(sources.open_corpus("embedded", None).chunks()).texts("text")[0]
    (tmp_path / "a.txt").write_text(text + "\n\n  Verse\n   and verse\n\n\nProse.\n" * 100)
    source = Corpus("text", (tmp_path / "a.txt",), "text")
    with mock.patch.object(text_files, "CHUNK_BYTES", 500):
        assert len(list(source.chunks())) > 10
        cache = _build(source, tokenizer, tmp_path / "cache")
    assert cache.tokens.tolist() == tokenizer.encode((tmp_path / "a.txt").read_text(), bos=True, eos=True)
    assert cache.n_documents == 1


# --- key -------------------------------------------------------------------------------------------


def test_the_key_is_content_tokenizer_and_column(tmp_path: Path, source: Corpus) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    tokenizer = ByteTokenizer(log=str(log))

    def builds(source: Corpus, tokenizer: ByteTokenizer) -> bool:
        before = log.stat().st_size if log.exists() else 0
        _build(source, tokenizer, folder)
        return log.stat().st_size > before

    assert builds(source, tokenizer)
    assert not builds(source, tokenizer)
    # The same content elsewhere is the same corpus.
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in source.files:
        (moved / file.name).write_bytes(file.read_bytes())
    assert not builds(replace(source, files=tuple(moved / file.name for file in source.files)), tokenizer)
    assert builds(replace(source, files=source.files[::-1]), tokenizer)
    assert builds(source, replace(tokenizer, fingerprint="other"))
    with open(source.files[0], "a") as file:
        file.write('{"text": "more", "other": "more"}\n')
    assert builds(source, tokenizer)
    only = replace(source, files=source.files[1:])
    assert builds(only, tokenizer)
    assert not builds(replace(only, text_column="other"), tokenizer)  # text files have no columns


def test_a_second_start_reads_no_text_and_a_change_is_seen(tmp_path: Path, source: Corpus) -> None:
    folder = tmp_path / "cache"
    old = (1e9, 1e9)
    with mock.patch.object(content_hash, "SETTLED_SECONDS", -1e9):  # let new files count as settled
        first = _build(source, ByteTokenizer(), folder)
        with mock.patch.object(content_hash, "_file_hash", side_effect=AssertionError):
            assert _build(source, ByteTokenizer(), folder).fingerprint == first.fingerprint
        # Same size and time of modification, other content: the status change time gives it away.
        os.utime(source.files[1], old)
        _build(source, ByteTokenizer(), folder)
        source.files[1].write_text("LINE\n" * 500)
        os.utime(source.files[1], old)
        assert _build(source, ByteTokenizer(), folder).fingerprint != first.fingerprint


def test_a_file_written_just_now_is_hashed_again(tmp_path: Path, source: Corpus) -> None:
    with mock.patch.object(content_hash, "SETTLED_SECONDS", 1e9):
        _build(source, ByteTokenizer(), tmp_path / "cache")
    with mock.patch.object(content_hash, "_file_hash", return_value="seen") as file_hash:
        _build(source, ByteTokenizer(), tmp_path / "cache")
    assert {call.args[0] for call in file_hash.call_args_list} == set(source.files)


# --- size ------------------------------------------------------------------------------------------


def test_a_large_corpus_is_refused_unread_and_opened_once_it_is_built(tmp_path: Path, source: Corpus) -> None:
    def opened(limit: float) -> TokenCache:
        return tokenize_corpus(
            source, ByteTokenizer(), cache_folder=tmp_path / "cache", progress=False, max_inline_gb=limit
        )

    limit = source.n_bytes / 1e9
    with (
        mock.patch.object(content_hash, "SETTLED_SECONDS", -1e9),  # let new files count as settled
        mock.patch.object(content_hash, "_file_hash", side_effect=AssertionError),
        pytest.raises(
            DataError, match=r"GB of text(?s:.*)`llama-toolkit prepare-data --job.config_file FILE"
        ),
    ):
        opened(limit * 0.99)
    with mock.patch.object(content_hash, "SETTLED_SECONDS", -1e9):
        assert opened(limit).n_documents == 61
        assert opened(0).n_documents == 61
        with open(source.files[1], "a") as file:
            file.write("more")
        with pytest.raises(DataError, match="GB of text that is not tokenized yet"):
            opened(limit)


def test_compressed_text_counts_thrice(tmp_path: Path, source: Corpus) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(b"x" * 1000)
    assert replace(source, files=(*source.files, path)).n_text_bytes == source.n_bytes + 3000


def test_files_that_settle_during_the_build_are_remembered(tmp_path: Path, source: Corpus) -> None:
    ages = iter([1e9, -1e9])  # too young at first, settled afterwards

    def hashes(*arguments: Any) -> list[str]:
        with mock.patch.object(content_hash, "SETTLED_SECONDS", next(ages)):
            return content_hash.content_hashes(*arguments)

    with mock.patch.object(cache_module, "content_hashes", side_effect=hashes):
        _build(source, ByteTokenizer(), tmp_path / "cache")
    assert content_hash.unread(source, tmp_path / "cache") == []


def test_hashes_that_another_process_remembers_meanwhile(tmp_path: Path, source: Corpus) -> None:
    folder = tmp_path / "cache"
    expected = content_hash.content_hashes(source, folder, False)
    stamps = [list(stamp) for stamp in content_hash.stamps(source)]
    record = {str(path): [stamp, "new"] for path, stamp in zip(source.files, stamps, strict=True)}
    # Nothing is known at the first look, and everything at the next.
    with mock.patch.object(content_hash, "_known", side_effect=[{}, record, record]):
        assert content_hash.content_hashes(source, folder, False) == expected


# --- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product(("tokens.bin", "offsets.bin", "meta.json"), ("truncated", "missing")),
        *product(("tokens.bin", "offsets.bin"), ("altered",)),
    ],
)
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, source: Corpus, name: str, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    good = _build(source, ByteTokenizer(), tmp_path / "cache")
    reference = pickle.loads(pickle.dumps(good))  # noqa: S301 (our own bytes)
    tokens, offsets = reference.tokens.copy(), reference.offsets.copy()
    file = good.folder / name
    if damage == "missing":
        file.unlink()
    elif damage == "altered":
        _alter(file, 64)
    else:
        os.truncate(file, file.stat().st_size - 8)
        with pytest.raises((DataError, ValueError)):
            open_cache(good.folder)
    again = tokenize_corpus(source, ByteTokenizer(), cache_folder=tmp_path / "cache")
    assert "tokenizing again" in capfd.readouterr().err
    assert np.array_equal(again.tokens, tokens) and np.array_equal(again.offsets, offsets)


def _alter(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_a_start_looks_at_some_blocks_and_verify_at_all(tmp_path: Path, source: Corpus, name: str) -> None:
    with (
        mock.patch.multiple(block_hashes, BLOCK_BYTES=32, SAMPLED=3),
        mock.patch.object(token_files, "BLOCK_BYTES", 32),
    ):
        good = _build(source, ByteTokenizer(), tmp_path / "cache")
        size = (good.folder / name).stat().st_size
        looked_at = []
        for block in range(-(-size // 32)):
            _alter(good.folder / name, block * 32)
            with pytest.raises(DataError, match=f"{name} is damaged: its block at byte {block * 32:,} was"):
                open_cache(good.folder, verify=True)
            try:
                open_cache(good.folder)
            except DataError:
                looked_at.append(block)
            _alter(good.folder / name, block * 32)
        last = -(-size // 32) - 1
        assert looked_at == [0, last // 2, last]
        assert _same(open_cache(good.folder, verify=True), good)


def test_a_cache_of_before_hashes_is_built_again(
    tmp_path: Path, source: Corpus, capfd: pytest.CaptureFixture[str]
) -> None:
    good = _build(source, ByteTokenizer(), tmp_path / "cache")
    meta = json.loads((good.folder / "meta.json").read_text())
    (good.folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "blocks"}))
    again = tokenize_corpus(source, ByteTokenizer(), cache_folder=tmp_path / "cache")
    assert "was built by an older version" in capfd.readouterr().err
    assert json.loads((again.folder / "meta.json").read_text()) == meta


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, source: Corpus) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/self/nowhere")):
        with pytest.raises(DataError, match=r"(?s)cannot be used.*data\.cache_folder"):
            _build(source, ByteTokenizer(), place)


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, source: Corpus) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))  # Python turns SIGXFSZ into an OSError
    try:
        with pytest.raises(DataError, match=r"(?s)cannot be used.*has room"):
            _build(source, ByteTokenizer(), tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]
    assert _documents(_build(source, ByteTokenizer(), tmp_path / "cache"))[0] == _expected(TEXTS)[0]


def test_a_built_cache_needs_no_writing(tmp_path: Path, source: Corpus) -> None:
    _build(source, ByteTokenizer(), tmp_path / "cache")
    with (
        mock.patch.object(Path, "mkdir", side_effect=PermissionError),
        mock.patch.object(content_hash, "remember", side_effect=PermissionError),
    ):
        assert _build(source, ByteTokenizer(), tmp_path / "cache").n_documents == 61


# --- several processes -----------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
from toolkit.data import corpus, text_files
from toolkit.data.token_cache import tokenize_corpus
from tests.data.byte_tokenizer import ByteTokenizer
files, tokenizer, folder, processes = json.loads(sys.argv[1])
text_files.CHUNK_BYTES = 200
source = corpus.Corpus("corpus", tuple(map(Path, files)), "text")
cache = tokenize_corpus(source, ByteTokenizer(**tokenizer), cache_folder=folder, processes=processes)
assert "torch" not in sys.modules
print(cache.fingerprint, cache.n_tokens)
"""


def _start(source: Corpus, folder: Path, processes: int = 1, **tokenizer: str) -> subprocess.Popen:
    arguments = json.dumps([list(map(str, source.files)), tokenizer, str(folder), processes])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def _gate(tmp_path: Path) -> Path:
    """A FIFO that holds the tokenizer at document 30 until somebody has opened and closed it for writing."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    return gate


def test_many_processes_on_a_cold_cache_build_it_once(tmp_path: Path, source: Corpus) -> None:
    gate, log = _gate(tmp_path), tmp_path / "log"
    jobs = [
        _start(source, tmp_path / "cache", log=str(log), stop_at="document 30", gate=str(gate))
        for _ in range(10)
    ]
    try:
        first_lines = [job.stderr.readline() for job in jobs]  # all have come before the first may go on
        os.close(os.open(gate, os.O_WRONLY))
        outputs = [job.communicate(timeout=60)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert sum(line.startswith("tokenizing corpus") for line in first_lines) == 1
    assert sum(line.startswith("waiting for ") for line in first_lines) == 9, first_lines
    assert [job.returncode for job in jobs] == [0] * 10
    assert len(set(outputs)) == 1
    with mock.patch.object(text_files, "CHUNK_BYTES", 200):
        assert log.stat().st_size == sum(
            len(chunk.texts("text")) for chunk in source.chunks()
        )  # every text was encoded once


@pytest.mark.parametrize("processes", [1, 2])
def test_a_build_that_was_killed_is_not_trusted(tmp_path: Path, source: Corpus, processes: int) -> None:
    gate, folder = _gate(tmp_path), tmp_path / "cache"
    job = _start(source, folder, processes, stop_at="document 30", gate=str(gate))
    held = os.open(gate, os.O_WRONLY)  # returns when the build has come to document 30
    os.kill(job.pid, signal.SIGKILL)
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
    names = sorted(path.suffix for path in (folder / "tokens").iterdir())
    assert names == [".building", ".lock"]
    os.close(held)
    # The pipe reaches its end when the last helper, which shares it, has gone too.
    job.communicate(timeout=60)
    building = next((folder / "tokens").glob("*.building"))
    (building / "stray").write_text("left over")
    cache = _build(source, ByteTokenizer(), folder)
    assert _same(cache, _build(source, ByteTokenizer(), tmp_path / "other"))
    assert sorted(path.name for path in cache.folder.iterdir()) == ["meta.json", "offsets.bin", "tokens.bin"]
    assert not building.exists()


def test_a_build_removes_what_others_left_but_not_what_others_build(tmp_path: Path, source: Corpus) -> None:
    gate, folder = _gate(tmp_path), tmp_path / "cache"
    job = _start(source, folder, stop_at="document 30", gate=str(gate))
    held = os.open(gate, os.O_WRONLY)  # that build has come to document 30
    (building,) = (folder / "tokens").glob("*.building")
    leftover = folder / "tokens" / "0123.building"
    leftover.mkdir()
    (leftover / "tokens.bin").write_text("left over")
    _build(source, ByteTokenizer(fingerprint="other"), folder)
    assert building.exists() and not leftover.exists()
    os.close(held)
    job.communicate(timeout=60)
    assert job.returncode == 0


def test_helpers_import_no_torch(tmp_path: Path, source: Corpus) -> None:
    import torch  # noqa: F401  (the parent has it, as a trainer would)

    cache = _build(source, ModuleProbe(forbidden="torch"), tmp_path / "cache", processes=2)
    assert set(cache.tokens.tolist()) == {0}


def test_a_helper_that_dies_ends_the_build_with_a_message(tmp_path: Path, source: Corpus) -> None:
    with pytest.raises(DataError, match="was killed by signal 9"):
        _build(source, ModuleProbe(forbidden="torch", kill=True), tmp_path / "cache", processes=2)
    assert not list((tmp_path / "cache" / "tokens").glob("*.building"))


def test_text_that_changes_before_it_is_tokenized_is_not_kept_under_the_old_key(
    tmp_path: Path, source: Corpus
) -> None:
    calls = []

    def hashes(*arguments: Any) -> list[str]:
        found = content_hash.content_hashes(*arguments)
        if not calls:  # as while another process holds the lock
            source.files[1].write_text("LINE\n" * 500)
        calls.append(found)
        return found

    with (
        mock.patch.object(cache_module, "content_hashes", side_effect=hashes),
        pytest.raises(DataError, match="changed while it was tokenized"),
    ):
        _build(source, ByteTokenizer(), tmp_path / "cache")
    source.files[1].write_text("line\n" * 500)
    assert (
        _documents(_build(source, ByteTokenizer(), tmp_path / "cache"))[-1] == _expected(["line\n" * 500])[0]
    )


def test_a_change_that_no_stamp_shows_is_seen_by_reading_again(tmp_path: Path, source: Corpus) -> None:
    """The change keeps the size, and is within the resolution of a time stamp."""
    stamps = content_hash.stamps(source)

    class Meddler(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            source.files[1].write_text("LINE\n" * 500)
            return super().encode(text)

    with (
        mock.patch.object(cache_module, "stamps", return_value=stamps),
        mock.patch.object(content_hash, "stamps", return_value=stamps),
        mock.patch.object(content_hash, "SETTLED_SECONDS", 1e9),
        pytest.raises(DataError, match="changed while it was tokenized"),
    ):
        _build(source, Meddler(), tmp_path / "cache")


def test_a_corpus_that_changes_meanwhile_is_refused(tmp_path: Path, source: Corpus) -> None:
    class Meddler(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            with open(source.files[1], "a") as file:
                file.write("more")
            return super().encode(text)

    with pytest.raises(DataError, match="changed while it was tokenized"):
        _build(source, Meddler(), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
