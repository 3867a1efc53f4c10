"""``llama-toolkit checkpoint``, on checkpoints that are sound, damaged, half there and different."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tampering import change_index
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import committed_steps
from toolkit.cli import run_command
from toolkit.commands import checkpoint
from toolkit.errors import EXIT_DATA, EXIT_ERROR, EXIT_FINISHED

ROOT = Path(__file__).parents[2]
CONFIG = "[optimizer]\nlr = {lr}\n[training]\nsteps = 10\n"


def _save(
    folder: Path, step: int, *, lr: float = 0.1, shift: float = 0.0, rows: int = 3, best: int | None = None
) -> None:
    tensors = {
        "model.weight": torch.arange(12.0).view(rows, -1) + shift,
        "model.half": torch.ones(2, dtype=torch.bfloat16),
    }
    run = {"config": CONFIG.format(lr=lr), "tokens": 100 * step, "mesh": "dp_shard 2", "model": {"dim": 4}}
    if best is not None:
        run |= {"config": f"{run['config']}[checkpoint]\nkeep_best = true\n", "best_step": best}
    CheckpointManager(folder, say=lambda text: None).save(step, tensors, run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 10):
        _save(tmp_path / "run" / "checkpoint", step)
    return tmp_path / "run" / "checkpoint"


def _call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = run_command("checkpoint", [str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_list_tells_what_is_there_and_what_only_looks_like_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "step-11").mkdir()
    (folder / "step-12.tmp-0a1b").mkdir()
    code, said = _call(capsys, "list", folder.parent)  # the folder of the run will do
    assert code == EXIT_FINISHED
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "10", "11", "step-12.tmp-0a1b:"]
    assert "1,000" in lines[4] and "dp_shard 2" in lines[4]
    assert "no checkpoint" in lines[5] and "killed" in lines[6]


def test_inspect_tells_the_run_and_its_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _call(capsys, "inspect", folder / "step-3", "--tensors")
    assert code == EXIT_FINISHED
    assert "tokens                 300" in said and "lr = 0.1" in said and "dim 4" in said
    weight = next(line for line in said.splitlines() if line.startswith("model.weight"))
    assert weight.split()[1:] == ["float32", "(3,", "4)", "in", "1", "part"]
    assert "bfloat16" in said


def test_a_folder_of_checkpoints_is_answered_with_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (folder, folder.parent):
        code, said = _call(capsys, "inspect", place)
        assert code == EXIT_DATA and f"choose one, for example {folder / 'step-10'}" in said


def test_verify_finds_a_flipped_bit_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(capsys, "verify", folder)[0] == EXIT_FINISHED
    shard = folder / "step-2" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, said = _call(capsys, "verify", folder)
    assert code == EXIT_DATA
    assert [line.rpartition(": ")[2] == "sound" for line in said.splitlines()].count(True) == 3
    assert "step-2: __0_0.distcp was altered" in said
    assert _call(capsys, "verify", folder / "step-3")[0] == EXIT_FINISHED
    assert _call(capsys, "verify", folder / "step-7")[0] == EXIT_DATA


def test_verify_reads_the_index_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = folder / "step-2"
    change_index(step, lambda index: index.state_dict_metadata["model.weight"].chunks.clear())
    code, said = _call(capsys, "verify", folder)
    assert code == EXIT_DATA
    [line] = [line for line in said.splitlines() if not line.endswith(": sound")]
    assert "the chunks of model.weight overlap or leave gaps in its shape (3, 4)" in line


def test_diff_names_settings_and_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save(folder, 4, lr=0.2, shift=0.5)
    _save(folder, 5, rows=4)
    code, said = _call(capsys, "diff", folder / "step-3", folder / "step-4")
    assert code == EXIT_ERROR
    assert "optimizer.lr: 0.1, 0.2" in said and "step: 3, 4" in said and "training.steps" not in said
    assert "model.weight: 12 of 12 values differ, by at most 0.5; the largest value is 11" in said
    assert "model.half" not in said
    assert (
        "model.weight: shape (3, 4), (4, 3)" in _call(capsys, "diff", folder / "step-3", folder / "step-5")[1]
    )
    assert _call(capsys, "diff", folder / "step-3", folder / "step-3") == (EXIT_FINISHED, "")


def test_prune_keeps_the_latest_and_every_nth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _call(capsys, "prune", folder, "--keep-latest", 1, "--keep-every", 2, "--dry-run")
    assert code == EXIT_FINISHED and committed_steps(folder) == [1, 2, 3, 10]
    assert said.splitlines() == ["would delete step-1", "would delete step-3", "2 of 4 kept"]
    assert _call(capsys, "prune", folder, "--keep-latest", 1, "--keep-every", 2)[0] == EXIT_FINISHED
    assert committed_steps(folder) == [2, 10]


def test_prune_keeps_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save(folder, 11, best=2)
    assert _call(capsys, "prune", folder, "--keep-latest", 1)[0] == EXIT_FINISHED
    assert committed_steps(folder) == [2, 11]


def test_prune_deletes_nothing_while_the_newest_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "step-10" / ".metadata").unlink()
    code, said = _call(capsys, "prune", folder, "--keep-latest", 1)
    assert code == EXIT_DATA and "nothing deleted" in said and ".metadata is missing" in said
    assert committed_steps(folder) == [1, 2, 3, 10]


def test_a_folder_without_checkpoints_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _call(capsys, "list", tmp_path)
    assert code == EXIT_DATA and "no step-N in it" in said
    (tmp_path / "step-7.tmp-0a1b").mkdir()
    code, said = _call(capsys, "verify", tmp_path)
    assert code == EXIT_DATA and f"there is no checkpoint in {tmp_path}" in said


def test_what_cannot_be_listed_or_deleted_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", _read_only)
        code, said = _call(capsys, "prune", folder, "--keep-latest", 1)
    assert code == EXIT_DATA and f"{folder / 'step-1'} could not be deleted: Read-only file system" in said
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", _read_only)
        code, said = _call(capsys, "list", folder)
    assert code == EXIT_DATA and f"{folder} cannot be listed" in said


def _read_only(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_runs_exports_are_no_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder.parent
    (run / "hf" / "step-1").mkdir(parents=True)
    assert checkpoint.checkpoints_in(run) == folder
    folder.rename(run.parent / "elsewhere")
    assert _call(capsys, "prune", run, "--keep-latest", 1)[0] == EXIT_DATA


def test_what_needs_no_tensor_needs_no_torch(folder: Path) -> None:
    code = f"import sys; from tools import checkpoint; checkpoint.main(['list', {str(folder)!r}]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
