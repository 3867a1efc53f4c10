"""Datasets of Hugging Face: folders of save_to_disk, and the hub as the package's own cache stands for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from tests.data.byte_tokenizer import ByteTokenizer
from tests.data.corpus_problem import check_source
from tests.data.test_parquet import ROWS, TEMPLATE, TEXTS, build, files_of, texts_of, write
from toolkit.data import text_files
from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

ROOT = Path(__file__).parents[2]

# A dataset repository with a train and a test split, as the package's cache keeps it once it is downloaded.
PREPARE = """
import json, os, sys, datasets
rows = [{"text": text} for text in json.loads(sys.argv[1])]
os.makedirs("pages/data")
for split, part in {"train": rows, "test": rows[:7]}.items():
    with open(f"pages/data/{split}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in part)
whole = datasets.load_dataset("./pages")
os.rename("hf/pages", "hf/owner___pages")
whole["train"].save_to_disk("one", num_shards=3)
whole.save_to_disk("both")
"""

FETCH = """
import json, sys
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.sources import open_corpus
from toolkit.errors import DataError
from tests.data.byte_tokenizer import ByteTokenizer
for name, split in json.loads(sys.argv[1]):
    source = open_corpus(name, None, split=split)
    try:
        cache = tokenize_corpus(source, ByteTokenizer(), cache_folder="cache", progress=True)
    except DataError as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps([cache.n_documents, str(cache.folder)]))
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts as ``one`` and ``both`` by save_to_disk, and in ``hf``, the cache of the package."""
    folder = tmp_path_factory.mktemp("hub")
    run(folder, PREPARE, TEXTS)
    return folder


def run(folder: Path, program: str, argument: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf_home"),
        "HF_DATASETS_CACHE": str(folder / "hf"),
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-c", program, json.dumps(argument)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


# --- save_to_disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "both"])
def test_a_saved_dataset_gives_the_token_files_of_its_json_lines(
    place: Path, tmp_path: Path, name: str
) -> None:
    expected = build(write(tmp_path / "a.jsonl", ROWS), "text", tmp_path / "cache")
    with mock.patch.object(text_files, "CHUNK_BYTES", 700):
        assert files_of(build(place / name, "text", tmp_path / "cache", processes=2)) == files_of(expected)


def test_a_template_over_a_saved_dataset(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    lines = write(tmp_path / "lines" / "a.jsonl", ROWS)
    assert texts_of(tmp_path, TEMPLATE) == texts_of(lines, TEMPLATE)
    cache = tmp_path / "cache"
    assert files_of(build(tmp_path, TEMPLATE, cache)) == files_of(build(lines, TEMPLATE, cache))
    problem = check_source("x", str(tmp_path), "content")
    assert problem is not None and "it has 'id', 'text', 'question', 'answer'" in problem.rule


def test_the_split_of_a_saved_dataset(place: Path) -> None:
    assert open_corpus("x", str(place / "both"), split="test").files[0].parent.name == "test"
    problem = check_source("x", str(place / "both"), split="validation")
    assert problem is not None and problem.key == "dataset_split" and problem.value == "validation"
    assert "it has train, test" in problem.fix
    assert open_corpus("x", str(place / "both")).choices == {"split"}
    assert open_corpus("x", str(place / "one")).choices == open_corpus("c4_test", None).choices == set()
    assert open_corpus("c4", None).choices == open_corpus("a/b", None).choices == {"subset", "split"}


def test_a_saved_dataset_that_is_not_whole_is_refused(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(place / "one", folder)
    shard = next(folder.glob("data-00001*"))
    shard.write_bytes(b"damaged" * 9)
    with pytest.raises(DataError, match="data-00001.*cannot be read"):
        texts_of(folder)
    shard.unlink()
    problem = check_source("x", str(folder))
    assert problem is not None and "data-00001" in problem.rule and "is missing" in problem.rule
    (folder / "state.json").write_text("{")
    problem = check_source("x", str(folder))
    assert problem is not None and "is not a complete dataset" in problem.rule


# --- the hub ---------------------------------------------------------------------------------------


def test_a_dataset_of_the_hub_is_fetched_once(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "hf", tmp_path / "hf")
    wanted = [
        ["owner/pages", "train"],
        ["owner/pages", "train[2:5]"],
        ["owner/pages", "dev"],
        ["owner/none", "train"],
    ]
    first = run(tmp_path, FETCH, wanted)
    train, part, no_split, no_dataset = map(json.loads, first.stdout.splitlines())
    assert first.stderr.count("from the Hugging Face Hub") == 4
    expected = build(place / "one", "text", tmp_path / "other")
    assert train[0] == expected.n_documents and files_of(_cache(train)) == files_of(expected)
    assert part[0] == 2  # of three rows one is null
    assert (
        "owner/pages (dev) cannot be fetched" in no_split
        and "correct dataset_subset or dataset_split" in no_split
    )
    assert "owner/none (train) cannot be fetched" in no_dataset and "with network access" in no_dataset
    # What is tokenized needs neither the files nor the hub nor the package.
    shutil.rmtree(tmp_path / "hf")
    program = FETCH.replace("import json, sys", "import json, sys; sys.modules['datasets.load'] = None")
    again = run(tmp_path, program + "assert 'datasets' not in sys.modules", wanted[:2])
    assert [json.loads(line) for line in again.stdout.splitlines()] == [train, part]
    assert "Hugging Face" not in again.stderr


def _cache(said: list[Any]) -> TokenCache:
    return SimpleNamespace(folder=Path(said[1]))  # type: ignore[return-value]


def _pretend(monkeypatch: pytest.MonkeyPatch, **builder: Any) -> mock.Mock:
    """A package ``datasets`` whose builder does what is given."""
    package = mock.Mock()
    package.__spec__ = mock.Mock()  # so that it counts as installed
    package.load_dataset_builder = mock.Mock(**builder)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


@pytest.mark.parametrize(
    ("error", "said", "fix"),
    [
        (ConnectionError("Couldn't reach 'owner/x' on the Hub"), "Couldn't reach", "set dataset_path"),
        (FileNotFoundError("Dataset 'owner/x' doesn't exist"), "doesn't exist", "hf auth login"),
        (ValueError("BuilderConfig 'de' not found. Available: ['en']"), "['en']", "correct dataset_subset"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts", "set dataset_path"),
    ],
)
def test_what_the_hub_does_not_give_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, fix: str
) -> None:
    _pretend(monkeypatch, side_effect=error)
    with pytest.raises(DataError, match=r"owner/x de \(train\) cannot be fetched") as caught:
        tokenize_corpus(
            open_corpus("owner/x", None, subset="de"), ByteTokenizer(), cache_folder=tmp_path, progress=False
        )
    assert said in str(caught.value) and fix in str(caught.value).partition("fix:")[2]


def test_c4_is_known_and_too_large_to_be_fetched_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = mock.Mock()
    builder.info.splits = {"train": SimpleNamespace(num_bytes=800_000_000_000)}
    package = _pretend(monkeypatch, return_value=builder)
    source = open_corpus("c4", None)
    with pytest.raises(DataError, match=r"allenai/c4 en \(train\)(?s:.*)800 GB(?s:.*)toolkit prepare-data"):
        tokenize_corpus(source, ByteTokenizer(), cache_folder=tmp_path, progress=False, max_inline_gb=10)
    package.load_dataset_builder.assert_called_once_with("allenai/c4", "en")
    builder.download_and_prepare.assert_not_called()
    assert package.config.HF_DATASETS_TRUST_REMOTE_CODE is False


def test_files_that_are_gone_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"text": ["one", "two"]})

    def prepare() -> None:
        with (
            pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)

    builder = mock.Mock()
    builder.info.splits = {"train": SimpleNamespace(num_bytes=6)}
    builder.download_and_prepare = prepare
    builder.as_dataset.return_value = SimpleNamespace(
        cache_files=[{"filename": str(tmp_path / "a.arrow")}], _fingerprint="revision"
    )
    package = _pretend(monkeypatch, return_value=builder)

    def documents(tokenizer: ByteTokenizer) -> int:
        return tokenize_corpus(
            open_corpus("owner/x", None), tokenizer, cache_folder=tmp_path / "cache", progress=False
        ).n_documents

    assert documents(ByteTokenizer()) == 2
    (tmp_path / "a.arrow").unlink()
    assert documents(ByteTokenizer()) == 2
    assert package.load_dataset_builder.call_count == 1
    assert documents(ByteTokenizer(fingerprint="other")) == 2
    assert package.load_dataset_builder.call_count == 2


def test_names_that_are_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "folder").mkdir(parents=True)
    problem = check_source("own/folder", None)
    assert problem is not None and problem.key == "dataset" and "dataset_path = 'own/folder'" in problem.fix
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = check_source("c4", None)
    assert problem is not None and "'.[hf]'" in problem.fix and problem.value == "c4"
