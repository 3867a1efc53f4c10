import errno
import json
import os

import pytest

from toolkit.checkpoint import manifest as module
from toolkit.checkpoint.manifest import (
    MANIFEST,
    build_manifest,
    check_files,
    committed_steps,
    invalid_steps,
    read_manifest,
    step_folder,
)
from toolkit.errors import CheckpointError

OF_ABC = {
    "blake3": "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
    "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
}
ABC = {"bytes": 3, "blake3": OF_ABC["blake3"]}


def _commit(folder, step, entry=ABC):
    path = step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"abc")
    files = {"__0_0.distcp": entry}
    run = {"tokens": 5, "cuts": (2, 1), "by_rank": {0: "a", 10: "b", 9: "c"}}
    manifest = build_manifest(step=step, files=files, tensor_count=1, tensor_bytes=3, run=run)
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


def _change(path, change):
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_round_trip(tmp_path):
    manifest = read_manifest(_commit(tmp_path, 7))
    assert manifest["step"] == 7
    assert manifest["run"] == {"tokens": 5, "cuts": [2, 1], "by_rank": {"0": "a", "10": "b", "9": "c"}}
    assert manifest["tensors"] == {"count": 1, "bytes": 3}


@pytest.mark.parametrize(
    "entry", [{"bytes": 3}, {"bytes": 3, "crc32": "352441c2"}, {"bytes": 3, "blake3": 1}]
)
def test_a_file_whose_hash_is_not_known_is_refused(tmp_path, entry):
    with pytest.raises(CheckpointError, match="no known hash"):
        read_manifest(_commit(tmp_path, 7, entry))


def test_only_committed_steps_exist(tmp_path):
    for step in (100, 9, 20):
        _commit(tmp_path, step)
    (tmp_path / "step-30").mkdir()  # no manifest
    (tmp_path / "step-40.tmp-ab12cd34").mkdir()
    (tmp_path / "step-50").write_text("a file")
    (_commit(tmp_path, 60) / MANIFEST).write_text('{"format": "llama')  # cut short
    assert committed_steps(tmp_path) == [9, 20, 100]
    assert committed_steps(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["run"].update(tokens=6), "altered"),
        (lambda m: m.pop("files"), "files is missing"),
        (lambda m: m.update(version=3), "version 3"),
        (lambda m: m.update(format="another"), "not a manifest of this toolkit"),
    ],
)
def test_an_altered_manifest_is_refused(tmp_path, change, said):
    path = _commit(tmp_path, 7)
    _change(path, change)
    with pytest.raises(CheckpointError, match=said) as error:
        read_manifest(path)
    assert str(path / MANIFEST) in str(error.value)


def test_what_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    """It may be the newest checkpoint, without which a run would start from an older one, or anew."""
    _commit(tmp_path, 7)
    path = _commit(tmp_path, 8)
    _change(path, lambda manifest: manifest.update(version=3))
    with pytest.raises(CheckpointError, match=f"{path / MANIFEST} has version 3(?s:.*)move {path} away"):
        committed_steps(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "read_bytes", _denied)
        with pytest.raises(CheckpointError, match="step-7/manifest.json cannot be read: Permission"):
            committed_steps(tmp_path)
        assert list(invalid_steps(tmp_path)) == [7, 8]
    monkeypatch.setattr(type(tmp_path), "iterdir", _denied)
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be listed: Permission denied"):
        committed_steps(tmp_path)


def _denied(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "sub/__0_0.distcp", "manifest.json"])
def test_no_file_lies_outside_the_folder(tmp_path, name):
    path = _commit(tmp_path, 7)
    manifest = build_manifest(step=7, files={name: ABC}, tensor_count=1, tensor_bytes=3, run={})
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no checkpoint has"):
        read_manifest(path)


def test_what_is_not_a_checkpoint_is_said(tmp_path):
    _commit(tmp_path, 7)
    _commit(tmp_path, 8)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_manifest(tmp_path / "step-9")
    with pytest.raises(CheckpointError, match="folder of checkpoints.*step-8"):
        read_manifest(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / ".metadata").touch()
    with pytest.raises(CheckpointError, match="another program"):
        read_manifest(other)


def test_a_step_folder_under_another_number_is_refused(tmp_path):
    _commit(tmp_path, 7).rename(tmp_path / "step-8")
    with pytest.raises(CheckpointError, match="of step 7"):
        read_manifest(tmp_path / "step-8")
    (tmp_path / "step-8").rename(tmp_path / "best")
    assert read_manifest(tmp_path / "best")["step"] == 7


@pytest.mark.parametrize("name", OF_ABC)
def test_files_are_checked_by_size_and_hash(tmp_path, name):
    path = _commit(tmp_path, 7, {"bytes": 3, name: OF_ABC[name]})
    files = read_manifest(path)["files"]
    assert check_files(path, files, verify=True) == []
    (path / "__0_0.distcp").write_bytes(b"abd")
    assert check_files(path, files, verify=False) == []
    assert "its hash is not that" in check_files(path, files, verify=True)[0]
    (path / "__0_0.distcp").write_bytes(b"ab")
    assert check_files(path, files, verify=False) == ["__0_0.distcp has 2 bytes instead of 3"]
    (path / "__0_0.distcp").unlink()
    assert check_files(path, files, verify=False) == ["__0_0.distcp is missing"]
