"""Which files of a folder are taken: the split that is asked for, as ``datasets`` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.corpus_problem import check_source
from tests.data.test_parquet import ROWS, write
from tests.preflight.bad_runs import CPU
from toolkit.config import load_config
from toolkit.data.file_kinds import SourceError
from toolkit.data.find_files import open_text
from toolkit.data.folder_files import splits_by_name
from toolkit.data.sources import open_corpus
from toolkit.preflight import check, notes

LAYOUTS = [
    ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"],
    ["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001-abc.parquet", "train.jsonl"],
    ["data/b-00000-of-00001.json", "data/test-00000-of-00001.json", "data/train-00000-of-00001.json"],
    ["train/a.jsonl", "sub/my test/deep/b.jsonl", "dev-2/c.jsonl", "train.jsonl", "d.jsonl"],
    ["en/train.jsonl", "en/x.eval-1.jsonl", "de/validation_b.jsonl", "de/other.jsonl", "de/training.jsonl"],
    [
        "val.jsonl",
        "valid.txt",
        "testing.json",
        "evaluation-3.json",
        "latest.json",
        "Train.json",
        "contest.txt",
    ],
    ["trainer.jsonl", "a/attest.jsonl", "devil.txt"],
    ["books/a.txt", "books/b.txt"],
    ["test/train-1.jsonl", "train/dev.jsonl"],
]


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_splits_are_those_of_datasets(names: list[str], tmp_path: Path) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    folder = tmp_path / "train" / "clone"  # whose own names count for nothing
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    patterns = data_files.get_data_patterns(str(folder))
    found = data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
    theirs = {
        str(split): sorted({Path(file).relative_to(folder).as_posix() for file in files})
        for split, files in found.items()
    }
    ours = splits_by_name(sorted(names))
    assert (ours or {"train": sorted(names)}) == theirs and list(ours) == list(theirs)[: len(ours)]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a dataset with two splits."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "clone" / f"{name}.parquet", ROWS[:20])
    write(tmp_path / "clone" / "extra.jsonl", ROWS[:20])
    for name in ("dataset_infos.json", "README.md", ".gitattributes", "LICENSE.txt", "raw.csv", "a.tar.gz"):
        (tmp_path / "clone" / name).write_text('{"default": {\n')
    return tmp_path / "clone"


def test_the_split_that_is_asked_for_is_taken(clone: Path) -> None:
    train, test = (open_corpus("x", str(clone), split=split) for split in ("train", "test"))
    assert [file.name[:11] for file in train.files] == ["train-00000", "train-00001"]
    assert [file.name for file in test.files] == ["test-00000-of-00001.parquet"]
    assert train.notes == (
        f"{clone}: train-00000-of-00002.parquet, train-00001-of-00002.parquet (split train) is used, and "
        "skipped: test-00000-of-00001.parquet (split test), extra.jsonl (no split), a.tar.gz, raw.csv "
        "(unsupported file type), LICENSE.txt, dataset_infos.json (no data)",
    )
    assert train.choices == {"split"}
    assert len(open_corpus("x", f"{clone}/*.parquet").files) == 3  # a glob names all that it matches
    problem = check_source("x", str(clone), split="validation")
    assert problem is not None and problem.key == "dataset_split" and "it has train, test" in problem.fix
    with pytest.raises(SourceError, match="has several splits: train, test"):
        open_text(str(clone))


def test_a_folder_without_splits_is_taken_whole_whatever_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", ROWS[:20])
    write(tmp_path / "a.jsonl", ROWS[:20])
    (tmp_path / "dataset_infos.json").write_text('{"default": {\n')
    for name in ("C.JSONL", "d.jsonl.zstd", "e.pq"):
        (tmp_path / name).touch()
    source = open_corpus("x", str(tmp_path), split="validation")
    assert [file.name for file in source.files] == ["a.jsonl", "b.parquet"] and not source.choices
    assert source.notes == (
        f"{tmp_path}: skipped: C.JSONL, d.jsonl.zstd, e.pq (unsupported file type), "
        "dataset_infos.json (no data)",
    )
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.csv").write_text("text\n")
    problem = check_source("x", str(tmp_path / "only"))
    assert problem is not None and "only a.csv" in problem.rule


def test_a_run_tells_what_it_takes_and_validates_on_another_split(clone: Path) -> None:
    options = {
        "training.dataset_path": clone,
        "validation.enable": "true",
        "validation.dataset_path": clone,
        "validation.dataset_split": "test",
    }

    def config(**more: str) -> list[str]:
        return [f"--{key}={value}" for key, value in (options | more).items()]

    said = notes(load_config(config()), world_size=1, hardware=CPU)
    assert [line.partition(" (split")[0] for line in said if "is used" in line] == [
        f"training.dataset_path {clone}: train-00000-of-00002.parquet, train-00001-of-00002.parquet",
        f"validation.dataset_path {clone}: test-00000-of-00001.parquet",
    ]
    wrong = config(**{"validation.dataset_split": "validation"})
    [problem] = [p for p in check(load_config(wrong), world_size=1, hardware=CPU) if "split" in p.key]
    assert problem.key == "validation.dataset_split" and "it has train, test" in problem.fix
    alone = config(**{"training.dataset_path": f"{clone}/extra.jsonl", "training.dataset_split": "test"})
    [problem] = [p for p in check(load_config(alone), world_size=1, hardware=CPU) if "split" in p.key]
    assert problem.key == "training.dataset_split" and "has no split to select" in problem.rule
