"""``prepare-data``: every corpus of a config is tokenized ahead of time, and runs then do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from toolkit.cli import run_command
from toolkit.config import load_config
from toolkit.data import build_cache, content_hash
from toolkit.data.build import open_data
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FINISHED, DataError
from toolkit.io import block_hashes

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\[(\S+)\] (\S+) documents, (\S+) tokens, (\S+) bytes, (\S+) s, in (\S+)")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A mixture of two corpora, validated on a third; a run may tokenize none of them itself."""
    for name in ("code", "prose", "held_out"):
        rows = [json.dumps({"text": f"{name} {number} " * 40}) + "\n" for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    file = tmp_path / "run.toml"
    file.write_text(f"""
[model]
hf_assets_path = "{ROOT}/tests/assets/tokenizer"
[training]
local_batch_size = 0x10
[data]
cache_folder = "{tmp_path}/cache"
max_inline_gb = 1e-9
[data.mixture.code]
dataset_path = "{tmp_path}/code.jsonl"
[data.mixture.prose]
dataset_path = "{tmp_path}/prose.jsonl"
weight = 3
[validation]
enable = true
dataset_path = "{tmp_path}/held_out.jsonl"
""")
    return file


def test_all_corpora_are_built_and_a_run_builds_none(config_file: Path, tmp_path: Path) -> None:
    words = ["--job.config_file", str(config_file)]
    with pytest.raises(DataError, match="llama-toolkit prepare-data"):
        open_data(load_config(words), progress=False)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "toolkit", "prepare-data", *words, "--processes", "2"],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == EXIT_FINISHED, done.stderr
    assert " torch\n" not in done.stderr
    assert done.stderr.count("with 2 processes") == 3
    lines = {
        table: said for table, *said in (LINE.fullmatch(line).groups() for line in done.stdout.splitlines())
    }  # type: ignore[union-attr]
    assert list(lines) == ["data.mixture.code", "data.mixture.prose", "validation"]
    with (
        mock.patch.object(content_hash, "SETTLED_SECONDS", -1e9),  # new files count as settled
        mock.patch.object(build_cache, "build_cache", side_effect=AssertionError("built again")),
    ):
        assert run_command("prepare-data", words) == EXIT_FINISHED
        data = open_data(load_config(words), progress=False)
    caches = data.caches.values()
    for built, (documents, tokens, n_bytes, _, folder) in zip(caches, lines.values(), strict=True):
        assert (built.n_documents, built.n_tokens) == (int(documents), int(tokens.replace(",", "")))
        assert folder == str(built.folder)
        sizes = [(built.folder / name).stat().st_size for name in ("tokens.bin", "offsets.bin")]
        assert sum(sizes) == int(n_bytes.replace(",", ""))


def test_what_is_left_out_of_a_folder_is_told(
    config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clone").mkdir()
    rows = [{"text": f"{number} " * 40} for number in range(9)]
    (tmp_path / "clone" / "train.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "clone" / "test.json").write_text(json.dumps(rows[:2]))
    words = ["--job.config_file", str(config_file), "--data.mixture.code.dataset_path", f"{tmp_path}/clone"]
    assert run_command("prepare-data", words) == EXIT_FINISHED
    told = capfd.readouterr()
    assert "[data.mixture.code] 9 documents" in told.out
    assert "train.json (split train) is used, and skipped: test.json (split test)" in told.err
    assert run_command("prepare-data", [*words, "--data.mixture.code.dataset_split=test"]) == EXIT_FINISHED
    assert "[data.mixture.code] 2 documents" in capfd.readouterr().out


def test_a_second_time_it_finds_what_is_there(config_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"--job.config_file={config_file}", "--processes=1", "--data.max_inline_gb=1"]
    assert run_command("prepare-data", words) == EXIT_FINISHED
    first = capfd.readouterr()
    assert first.err.count("tokenizing") == 3
    assert run_command("prepare-data", words) == EXIT_FINISHED
    second = capfd.readouterr()
    assert "tokenizing" not in second.err and second.out.count("documents") == 3


def test_verify_reads_all_and_builds_again_what_is_damaged(
    config_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"--job.config_file={config_file}", "--processes=1"]
    assert run_command("prepare-data", words) == EXIT_FINISHED
    folders = [Path(line.rpartition(" in ")[2]) for line in capfd.readouterr().out.splitlines()]
    sound = (folders[1] / "tokens.bin").read_bytes()
    (folders[1] / "tokens.bin").write_bytes(sound[:-2] + b"\xff\xff")
    with mock.patch.object(block_hashes, "SAMPLED", 0):  # so small a cache is read whole at every start
        assert run_command("prepare-data", words) == EXIT_FINISHED
        assert "damaged" not in capfd.readouterr().err
        assert run_command("prepare-data", [*words, "--verify"]) == EXIT_FINISHED
    said = capfd.readouterr()
    assert said.err.count("tokens.bin is damaged") == 1 and said.out.count(", verified, in ") == 3
    assert (folders[1] / "tokens.bin").read_bytes() == sound


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--trainig.dataset=c4_test"], EXIT_CONFIG, "did you mean"),
        (["--process=3"], EXIT_CONFIG, "--process"),
        (["--data.streaming"], EXIT_CONFIG, "needs the lengths"),
        (["--data.mixture.code.dataset_split=test"], EXIT_CONFIG, "no split to select"),
        (["--data.mixture.code.dataset_path=none.txt"], EXIT_DATA, "no such file"),
        (["--model.hf_assets_path=none"], EXIT_DATA, "none"),
        (["--data.text_column=body"], EXIT_DATA, "it has 'text'"),
    ],
)
def test_a_mistake_ends_with_its_exit_code(
    config_file: Path, capfd: pytest.CaptureFixture[str], flags: list[str], code: int, said: str
) -> None:
    assert run_command("prepare-data", ["--job.config_file", str(config_file), *flags]) == code
    assert said in capfd.readouterr().err


def test_what_does_not_concern_data_is_not_checked(config_file: Path) -> None:
    words = ["--parallelism.tensor_parallel_degree=64", "--training.seq_len=100000", "--model.vocab_size=7"]
    assert run_command("prepare-data", [f"--job.config_file={config_file}", *words]) == EXIT_FINISHED


@pytest.mark.parametrize("words", [["--processes", "0"], ["--processes=two"], ["--processes"]])
def test_a_number_of_processes_is_asked_for(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command("prepare-data", words)
    assert caught.value.code == EXIT_CONFIG
    assert "--processes" in capfd.readouterr().err


def test_help_says_what_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command("prepare-data", ["--help"])
    said = capfd.readouterr().out
    assert caught.value.code == 0 and "--processes N" in said and "CONFIG [--table.key VALUE ...]" in said
