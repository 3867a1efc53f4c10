"""Finding text, cutting it into chunks, and saying where it is wrong."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpus_problem import check_source
from toolkit.data import text_files
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import SourceError
from toolkit.data.sources import EMBEDDED, open_corpus
from toolkit.errors import DataError


def _write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zst":
        data = pa.compress(data[:9], "zstd", asbytes=True) + pa.compress(
            data[9:], "zstd", asbytes=True
        )  # two frames
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(data))
    return path


def _rows(*texts: str) -> str:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)


def _documents(source: Corpus) -> list[str]:
    """The documents of a source, segments joined."""
    documents: list[str] = []
    for chunk in source.chunks():
        for number, text in enumerate(chunk.texts(source.text_column)):
            if chunk.opens or number > 0:
                documents.append("")
            documents[-1] += text
    return documents


# --- finding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_corpora_are_found_by_name_whatever_the_column(name: str) -> None:
    source = open_corpus(name, None, "content")
    documents = _documents(source)
    assert len(documents) >= 20 and all(documents)
    assert check_source(name, None) is None


def test_folders_globs_lists_and_files_give_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.txt.gz", "sub/d.jsonl.gz", "sub/e.json"):
        _write(tmp_path / name, _rows(name) if "json" in name else name)
    for name in (".hidden.txt", ".git/x.txt", "notes.md"):
        _write(tmp_path / name, "not a corpus")

    def found(path: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in open_corpus("x", path).files]

    assert found(str(tmp_path)) == ["a.jsonl", "b.txt", "sub/c.txt.gz", "sub/d.jsonl.gz", "sub/e.json"]
    assert found(f"{tmp_path}/sub/*.gz") == ["sub/c.txt.gz", "sub/d.jsonl.gz"]
    assert found(f"{tmp_path}/**/*.txt") == ["b.txt"]
    assert found(f"{tmp_path}/b.txt") == ["b.txt"]
    assert found(f"{tmp_path}/b.txt, {tmp_path}/sub,{tmp_path}/*.txt")[:2] == ["b.txt", "sub/c.txt.gz"]
    assert len(found(f"{tmp_path}/b.txt,{tmp_path}/*.txt")) == 1
    assert _documents(open_corpus("x", str(tmp_path))) == [
        "a.jsonl", "b.txt", "sub/c.txt.gz", "sub/d.jsonl.gz", "sub/e.json",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (closed := tmp_path / "closed").mkdir()
    scan = os.scandir

    def scandir(path: str) -> Any:
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(SourceError, match="closed cannot be read: Permission denied"):
        open_corpus("corpus", str(tmp_path), "text")


def test_a_path_with_a_comma_or_brackets_is_a_path(tmp_path: Path) -> None:
    odd = _write(tmp_path / "a,b[1].txt", "text")
    assert open_corpus("x", str(odd)).files == (odd,)


def test_what_cannot_be_a_corpus_is_refused_in_milliseconds(tmp_path: Path) -> None:
    _write(tmp_path / "corpus" / "a.jsonl", _rows("text"))
    _write(tmp_path / "notes" / "a.md", "text")
    cases = {
        ("c5", None, "text"): ("dataset", "no dataset of this name", "such as Salesforce/wikitext"),
        ("a/b/c", None, "text"): ("dataset", "a name of the form owner/name", "correct it"),
        ("c4_tset", None, "text"): ("dataset", "no dataset of this name", "did you mean c4_test?"),
        ("x", f"{tmp_path}/corpsu", "text"): ("dataset_path", "no such file", "did you mean"),
        ("x", f"{tmp_path}/a/b/c", "text"): ("dataset_path", "no such file", f"exists up to {tmp_path}"),
        ("x", "allenai/c4", "text"): ("dataset_path", "no such file", "set dataset = 'allenai/c4'"),
        ("x", f"{tmp_path}/*.parquet", "text"): ("dataset_path", "no file matches", "pattern"),
        ("x", f"{tmp_path}/notes", "text"): ("dataset_path", "contains no .txt", "check"),
        ("x", f"{tmp_path}/notes/a.md", "text"): (
            "dataset_path",
            "'a.md' is not a supported text file",
            ".jsonl",
        ),
        ("x", f"{tmp_path}/corpus", "content"): ("text_column", "it has 'id', 'text'", "text_column"),
        ("x", " , ", "text"): ("dataset_path", "contains no file name", "set a file"),
    }
    start = time.perf_counter()
    for arguments, (key, rule, fix) in cases.items():
        problem = check_source(*arguments)
        assert problem is not None and problem.key == key
        assert rule in problem.rule and fix in problem.fix
        with pytest.raises(DataError, match="fix:"):
            open_corpus(*arguments)
    # Milliseconds each; the bound is a tenth of a second because the machine may be busy.
    assert time.perf_counter() - start < 0.1 * len(cases)


# --- reading ---------------------------------------------------------------------------------------


PACKED = ["", ".gz", ".bz2", ".xz", ".zst"]


@pytest.mark.parametrize("suffix", [f".jsonl{packed}" for packed in PACKED])
def test_lines_of_json_are_documents(tmp_path: Path, suffix: str) -> None:
    texts = ["one", "zwei\nLinien \u2028 und \x85 keine", "", "三😀\r\n", " "]
    content = "\ufeff" + _rows(*texts).replace("\n", "\r\n") + "\n  \n" + _rows("last").rstrip("\n")
    source = open_corpus("x", str(_write(tmp_path / f"a{suffix}", content)))
    with mock.patch.object(text_files, "CHUNK_BYTES", 30):
        assert _documents(source) == [text for text in texts if text] + ["last"]
        assert len(list(source.chunks())) > 2


@given(text=st.text(alphabet="ab \n\té😀", max_size=300), size=st.integers(4, 60), compressed=st.booleans())
def test_a_text_file_is_one_document_whatever_it_is_cut_into(text: str, size: int, compressed: bool) -> None:
    data = text.encode()
    raw = io.BufferedReader(io.BytesIO(gzip.compress(data) if compressed else data))  # type: ignore[arg-type]
    chunks = list(text_files._file_chunks(Path("a.txt.gz" if compressed else "a.txt"), raw, size))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [chunk.opens for chunk in chunks] == [number == 0 for number in range(len(chunks))]
    assert [chunk.closes for chunk in chunks] == [number == len(chunks) - 1 for number in range(len(chunks))]
    for chunk in chunks:
        assert chunk.data.decode()  # cut between characters
        assert data[: chunk.offset].count(b"\n") + 1 == chunk.line
        assert len(chunk.data) <= 2 * size
    assert sum(chunk.n_file_bytes for chunk in chunks) == (raw.tell() if chunks else 0)


def test_a_text_file_is_cut_where_a_line_begins_with_a_letter(tmp_path: Path) -> None:
    text = "title\n\n  indented\nplain\n\n\nplain\n"
    source = open_corpus("x", str(_write(tmp_path / "a.txt", text)))
    with mock.patch.object(text_files, "CHUNK_BYTES", 12):
        assert [p.data.decode() for p in source.chunks()] == ["title\n\n  indented\n", "plain\n\n\nplain\n"]


def test_text_without_line_ends_is_cut_before_a_space(tmp_path: Path) -> None:
    source = open_corpus("x", str(_write(tmp_path / "a.txt", "some words in a long line")))
    with mock.patch.object(text_files, "CHUNK_BYTES", 6):
        assert [chunk.data.decode() for chunk in source.chunks()] == ["some words", " in a long", " line"]


def test_empty_files_hold_no_document(tmp_path: Path) -> None:
    for name, content in {"a.txt": "", "b.jsonl": "\n\n", "c.txt": "\ufeff", "d.jsonl.gz": ""}.items():
        _write(tmp_path / name, content)
    assert _documents(open_corpus("x", str(tmp_path))) == []


# --- mistakes in the text --------------------------------------------------------------------------

GOOD = _rows("good") * 40


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\n" * 9 + b"caf\xe9 au lait", r"a.txt, line 10 \(byte 48\): byte 0xe9 is not UTF-8"),
        *(
            (f"a.txt{packed}", b"fine\n" * 9 + b"\xff", rf"a.txt{packed}, line 10 \(byte 45\): byte 0xff")
            for packed in PACKED
        ),
        *(
            (f"a.jsonl{packed}", GOOD + '["text"]\n', rf"a.jsonl{packed}, line 41: a JSON array")
            for packed in PACKED
        ),
        ("a.jsonl", GOOD.encode() + b'{"text": "\xc3("}\n', r"a.jsonl, line 41 .*byte 0xc3 is not UTF-8"),
        ("a.jsonl", GOOD + '{"text": "open}\n', r"line 41: not valid JSON \(Unterminated string"),
        ("a.jsonl", GOOD + '["text"]\n', r"line 41: a JSON array"),
        ("a.jsonl", GOOD + '{"text": 1.5}\n', r"line 41: column 'text' contains a JSON number"),
        ("a.jsonl", GOOD + '{"text": {"a": 1}}\n', r"line 41: column 'text' contains a JSON object"),
        (
            "a.jsonl",
            GOOD + '{"Text": "x", "id": 1}\n',
            r"(?s)line 41 has no such column; it has 'Text', 'id'",
        ),
        ("a.jsonl", GOOD + '{"text": "\\ud83d"}\n', r"line 41: .*an unpaired surrogate, \\ud83d"),
        ("a.jsonl", GOOD + "[" * 100_000 + "\n", r"line 41: not valid JSON"),
    ],
)
def test_a_mistake_in_the_text_is_reported_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    source = open_corpus("x", str(_write(tmp_path / name, content)))
    with mock.patch.object(text_files, "CHUNK_BYTES", 100), pytest.raises(DataError, match=message):
        _documents(source)


@pytest.mark.parametrize("packed", PACKED[1:])
def test_a_text_file_may_be_compressed(tmp_path: Path, packed: str) -> None:
    path = _write(tmp_path / f"a.txt{packed}", "title\n\n  indented\nplain\n\n\nplain\n")
    with mock.patch.object(text_files, "CHUNK_BYTES", 12):
        chunks = list(open_corpus("x", str(path)).chunks())
    assert [p.data.decode() for p in chunks] == ["title\n\n  indented\n", "plain\n\n\nplain\n"]
    assert sum(chunk.n_file_bytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("packed", PACKED[1:])
def test_a_compressed_file_that_is_cut_or_is_none_is_named(tmp_path: Path, packed: str) -> None:
    whole = _write(tmp_path / f"a.jsonl{packed}", GOOD)
    whole.write_bytes(whole.read_bytes()[:-9])
    (tmp_path / f"b.jsonl{packed}").write_bytes(b"not compressed")
    for name in ("a", "b"):
        with pytest.raises(DataError, match=f"{name}.jsonl{packed}: cannot be read.*\n  fix:"):
            _documents(Corpus("x", (tmp_path / f"{name}.jsonl{packed}",), "text"))


def test_without_pyarrow_zst_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.txt.zst", "text")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = check_source("x", str(path))
    assert problem is not None and "a.txt.zst needs the package pyarrow" in problem.rule


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(GOOD.encode(), mtime=0)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "plain.txt.gz").write_bytes(b"not compressed")
    for name in ("cut.jsonl.gz", "plain.txt.gz"):
        with pytest.raises(DataError, match=f"{name}: cannot be read.*\n  fix:"):
            _documents(Corpus("x", (tmp_path / name,), "text"))
    problem = check_source("x", str(tmp_path / "plain.txt.gz").replace("plain.txt", "cut.jsonl"))
    assert problem is None  # the first line is sound; the rest is for the reading
    _write(tmp_path / "fake.jsonl", "x")
    (tmp_path / "fake.jsonl").rename(tmp_path / "fake.jsonl.gz")
    problem = check_source("x", str(tmp_path / "fake.jsonl.gz"))
    assert problem is not None and "cannot be read" in problem.rule
