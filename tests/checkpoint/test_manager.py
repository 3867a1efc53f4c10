"""Saving, loading, retention and damage, in one process without a process group."""

import errno
import io
import json
import os
import pickle
import re
import resource
import shutil
import warnings
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from tests.checkpoint.tampering import change_index, index_of, seal, shorten_storage
from tests.helpers import run_world
from toolkit.checkpoint import coverage, dcp_storage
from toolkit.checkpoint import manager as manager_module
from toolkit.checkpoint import manifest as manifest_module
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import MANIFEST, committed_steps
from toolkit.checkpoint.read_tensor import index_problems
from toolkit.errors import CheckpointError
from toolkit.io import work_folder


def _tensors(value=0.0):
    generator = torch.Generator().manual_seed(3)
    return {
        "model.weight": torch.randn(9, 4, generator=generator) + value,
        "model.norm": torch.randn(4, generator=generator).bfloat16(),
        "optim.weight.exp_avg": torch.randn(9, 4, generator=generator),
        "optim.weight.step": torch.tensor(3.0),
    }


def _empty():
    return {name: torch.zeros_like(tensor) for name, tensor in _tensors().items()}


def _assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def _damage(path):
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def saved(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoint", say=lambda text: None)
    manager.save(5, _tensors(), {"tokens": 17})
    return manager


def test_round_trip(saved):
    target = _empty()
    manifest = saved.load(-1, target)
    _assert_equal(target, _tensors())
    assert manifest["run"] == {"tokens": 17} and manifest["step"] == 5
    assert manifest["tensors"] == {"count": 4, "bytes": 9 * 4 * 4 + 4 * 2 + 9 * 4 * 4 + 4}


def test_the_manifest_holds_the_hashes_of_what_is_on_disk(saved):
    folder = saved.folder / "step-5"
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*files, MANIFEST}
    for name, entry in files.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "blake3": blake3(content).hexdigest()}


def test_all_of_each_file_is_on_the_disk_before_the_commit(saved, monkeypatch):
    synced, sync = {}, os.fsync

    def fsync(descriptor):
        sync(descriptor)
        state = os.fstat(descriptor)
        synced[state.st_ino] = state.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    saved.save(6, _tensors(), {})
    for path in (saved.folder / "step-6").iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size, path.name


def test_plain_dcp_reads_what_we_write(saved):
    target = _empty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=saved.folder / "step-5")
    _assert_equal(target, _tensors())


def test_the_home_folder_may_be_meant(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.folder))
    assert saved.load("~/step-5", _empty())["step"] == 5


def test_loads_by_step_and_by_path(saved, tmp_path):
    saved.save(6, _tensors(1.0), {})
    for where, value in [(5, 0.0), (6, 1.0), (-1, 1.0), (saved.folder / "step-5", 0.0)]:
        target = _empty()
        saved.load(where, target)
        _assert_equal(target, _tensors(value))
    assert saved.latest() == 6
    assert saved.load(5, _empty())["run"] == {"tokens": 17}


def test_absent_steps_are_told_with_those_that_are_there(saved, tmp_path):
    with pytest.raises(CheckpointError, match="step 7 .*; available: 5"):
        saved.load(7, _empty())
    empty = CheckpointManager(tmp_path / "none")
    assert empty.latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        empty.load(-1, _empty())


def test_what_looks_like_the_newest_step_and_is_none_is_told(saved):
    said = []
    saved.say = said.append
    (saved.folder / "step-4").mkdir()  # older than what is loaded: no matter
    (saved.folder / "step-7").mkdir()
    (saved.folder / "step-8").mkdir()
    (saved.folder / "step-8" / MANIFEST).write_text("{")
    assert saved.latest() == 5
    assert len(said) == 2
    assert "step-7" in said[0] and "has no manifest.json" in said[0]
    assert "step-8" in said[1] and "is not JSON" in said[1]


def test_a_step_without_its_manifest_says_so(saved):
    saved.save(6, _tensors(), {})
    (saved.folder / "step-5" / MANIFEST).unlink()
    assert saved.latest() == 6
    with pytest.raises(CheckpointError, match="step-5 has no manifest.json"):
        saved.load(5, _empty())


@pytest.mark.parametrize("kind", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_damage, "{} was altered"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "{} has"),
        (lambda path: path.unlink(), "{} is missing"),
    ],
)
def test_damaged_files_are_named(saved, kind, damage, said):
    damage(saved.folder / "step-5" / kind)
    with pytest.raises(CheckpointError, match=said.format(kind)) as caught:
        saved.load(5, _empty())
    assert "fix:  use another step (in a run by checkpoint.load_step)" in str(caught.value)


def test_names_and_shapes_that_do_not_fit_come_in_one_message(saved):
    target = _empty()
    target["model.extra"] = torch.zeros(2)
    target["model.weight"] = torch.zeros(9, 5)
    del target["model.norm"]
    with pytest.raises(CheckpointError) as error:
        saved.load(5, target)
    message = str(error.value)
    assert "not in the checkpoint: model.extra" in message
    assert "model.weight (9, 4) in the checkpoint, (9, 5) in the model" in message
    assert "in the checkpoint but not in this model: model.norm" in message
    assert not any(tensor.any() for tensor in target.values())


def test_the_model_alone_can_be_loaded_and_saved(saved):
    def model(tensors):
        return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

    target = model(_empty())
    saved.load(5, target)
    _assert_equal(target, model(_tensors()))
    saved.save(6, model(_tensors()), {})
    with pytest.raises(CheckpointError, match=r"nothing of optim.*optim\.weight\.exp_avg"):
        saved.load(6, _empty())
    target = _empty()
    saved.load(6, target, exclude=["optim"])
    _assert_equal(target, _empty() | model(_tensors()))


def test_excluded_names_keep_their_values(saved):
    target = _empty()
    saved.load(5, target, exclude=["optim", "model.norm", "model.wei"])
    assert torch.equal(target["model.weight"], _tensors()["model.weight"])  # half a name is no name
    assert not target["model.norm"].any() and not target["optim.weight.step"].any()


def test_retention_counts_committed_steps(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=2)
    (tmp_path / "step-1000").mkdir()  # not ours to count, nor to delete
    for step in (10, 20, 30):
        manager.save(step, _tensors(), {})
    assert committed_steps(tmp_path) == [20, 30]
    manager.save(5, _tensors(), {})  # after a rewind: what was just saved stays
    assert committed_steps(tmp_path) == [5, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000", "step-30", "step-5"]


def test_some_steps_are_kept_for_good(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=2, keep_every_n=20)
    for step in range(10, 80, 10):
        manager.save(step, _tensors(), {})
    assert committed_steps(tmp_path) == [20, 40, 60, 70]


def test_the_best_step_is_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=2)
    for step, best in ((10, 10), (20, 20), (30, 20), (40, 20), (50, 50), (60, 50), (70, 50), (80, 50)):
        manager.best = best
        manager.save(step, _tensors(), {})
    assert committed_steps(tmp_path) == [50, 70, 80]


def test_the_step_that_each_start_goes_back_to_is_kept(tmp_path):
    CheckpointManager(tmp_path).save(10, _tensors(), {})
    manager = CheckpointManager(tmp_path, keep_latest_k=1, start=10)
    for step in (20, 30):
        manager.save(step, _tensors(), {})
    assert committed_steps(tmp_path) == [10, 30]


def test_a_folder_that_cannot_be_listed_costs_the_deletions_of_a_save(tmp_path, monkeypatch):
    said = []
    manager = CheckpointManager(tmp_path, keep_latest_k=1, say=said.append)
    manager.save(10, _tensors(), {})
    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "iterdir", _stale)
        manager.save(20, _tensors(), {})
    assert said[0].endswith(f"none was deleted: {tmp_path} cannot be listed: Stale file handle")
    assert committed_steps(tmp_path) == [10, 20]
    manager.save(30, _tensors(), {})
    assert committed_steps(tmp_path) == [30]


def _stale(folder):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_saving_a_step_again_replaces_it(saved):
    saved.save(5, _tensors(2.0), {"tokens": 18})
    target = _empty()
    assert saved.load(5, target)["run"] == {"tokens": 18}
    _assert_equal(target, _tensors(2.0))
    assert [path.name for path in saved.folder.iterdir()] == ["step-5"]


class _FullDisk(dcp_storage._HashingStream):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(saved, monkeypatch):
    monkeypatch.setattr(dcp_storage, "_HashingStream", _FullDisk)
    with pytest.raises(CheckpointError, match="step 6 .*rank 0: .*No space left on device"):
        saved.save(6, _tensors(), {})
    assert [path.name for path in saved.folder.iterdir()] == ["step-5"]
    monkeypatch.undo()
    saved.load(-1, _empty())


def test_the_reason_of_a_failed_write_is_told_and_not_what_torch_makes_of_it(saved):
    many = {f"model.{size}": torch.zeros(size) for size in (2, 10, 1000, 5000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="rank 0: .*File too large"):
            saved.save(6, many, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_is_deleted_under_way_costs_this_save_alone(saved, monkeypatch):
    write = dcp_storage._HashingStream.write

    def deleting(stream, data):
        shutil.rmtree(saved.folder, ignore_errors=True)
        return write(stream, data)

    with monkeypatch.context() as patched:
        patched.setattr(dcp_storage._HashingStream, "write", deleting)
        with pytest.raises(CheckpointError, match="step 6 was not saved .*No such file or directory"):
            saved.save(6, _tensors(), {})
    assert saved.latest() is None
    saved.save(7, _tensors(), {})
    assert saved.latest() == 7


def test_a_file_system_that_has_become_read_only_is_told(saved, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", read_only)
        with pytest.raises(CheckpointError, match="cannot be written: Read-only file system"):
            saved.save(6, _tensors(), {})
    assert [path.name for path in saved.folder.iterdir()] == ["step-5"]


def test_a_shard_of_another_run_is_not_taken(saved, tmp_path):
    other = CheckpointManager(tmp_path / "other", say=lambda text: None)
    other.save(5, _tensors(1.0), {})
    shutil.copy(other.folder / "step-5" / "__0_0.distcp", saved.folder / "step-5")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was altered"):
        saved.load(5, _empty())


def test_the_step_and_not_the_clock_says_what_is_newest(saved, monkeypatch):
    times = {
        step: json.loads((saved.folder / f"step-{step}" / MANIFEST).read_text())["saved_at"] for step in (5,)
    }
    monkeypatch.setattr(manifest_module, "datetime", _Yesterday)
    saved.save(6, _tensors(1.0), {})
    assert json.loads((saved.folder / "step-6" / MANIFEST).read_text())["saved_at"] < times[5]
    assert saved.latest() == 6
    CheckpointManager(saved.folder, keep_latest_k=1).save(7, _tensors(), {})
    assert committed_steps(saved.folder) == [7]


class _Yesterday(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) - timedelta(days=1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written: .*file"):
        CheckpointManager(tmp_path / "file" / "checkpoint").save(1, _tensors(), {})


# What a save leaves when it is killed, and what the next start makes of it

_DEATHS = {
    "while writing shards": (dcp_storage._HashingStream, "write"),
    "before the manifest": (manager_module, "commit_folder"),
    "before the rename": (work_folder, "_rename"),
}


def _die(*args):
    os._exit(9)


def _save_and_die(folder, point, step):
    owner, name = _DEATHS[point]
    setattr(owner, name, _die)
    CheckpointManager(folder).save(step, _tensors(9.0), {})


def _die_between_renames():
    """Killed between taking the old folder away and putting the new one there."""
    rename, calls = work_folder._rename, []

    def second_is_fatal(*args):
        calls.append(args)
        if len(calls) == 2:
            os._exit(9)
        rename(*args)

    work_folder._rename = second_is_fatal


def _replace_and_die(folder):
    _die_between_renames()
    CheckpointManager(folder).save(5, _tensors(9.0), {})


def _export_and_die(out):
    _die_between_renames()
    work = work_folder.work_folder(out, "again")
    work.mkdir()
    work_folder.replace_folder(work, out)


@pytest.mark.parametrize("point", _DEATHS)
def test_a_killed_save_leaves_the_state_before(saved, point):
    said = []
    with pytest.raises(RuntimeError, match="died"):
        run_world(_save_and_die, 1, saved.folder, point, 6)
    assert saved.latest() == 5
    restarted = CheckpointManager(saved.folder, say=said.append)
    restarted.remove_leftovers()
    assert len(said) == 1 and "removed step-6.tmp-" in said[0]
    assert [path.name for path in saved.folder.iterdir()] == ["step-5"]
    target = _empty()
    restarted.load(-1, target)
    _assert_equal(target, _tensors())


def test_a_killed_replacement_is_undone(saved):
    said = []
    with pytest.raises(RuntimeError, match="died"):
        run_world(_replace_and_die, 1, saved.folder)
    restarted = CheckpointManager(saved.folder, say=said.append)
    restarted.remove_leftovers()
    assert "restored step-5" in "".join(said)
    assert [path.name for path in saved.folder.iterdir()] == ["step-5"]
    target = _empty()
    restarted.load(-1, target)
    _assert_equal(target, _tensors())


def test_a_killed_export_leaves_the_one_before(saved, tmp_path):
    said, exports = [], tmp_path / "hf"
    (exports / "step-5").mkdir(parents=True)
    (exports / "step-5" / "config.json").write_text("{}")
    with pytest.raises(RuntimeError, match="died"):
        run_world(_export_and_die, 1, exports / "step-5")
    assert not (exports / "step-5").exists()
    CheckpointManager(saved.folder, say=said.append).remove_leftovers(exports=exports)
    assert [path.name for path in exports.iterdir()] == ["step-5"]
    assert [path.name for path in (exports / "step-5").iterdir()] == ["config.json"]
    assert any("export: restored step-5" in line for line in said)
    assert any("export: removed step-5.tmp-" in line for line in said)


# Files made to do harm: their hashes fit, because who alters a file can alter the manifest


class _Harm:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_in_the_metadata_does_not_run(saved, tmp_path):
    folder = saved.folder / "step-5"
    (folder / ".metadata").write_bytes(pickle.dumps(_Harm(tmp_path / "harm")))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"rejected: it refers to posix\.mkdir"):
        saved.load(5, _empty())
    assert not (tmp_path / "harm").exists()


class _ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enum."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_getattr_in_the_metadata_gives_members_of_enums_alone():
    def load(written):
        return dcp_storage._MetadataUnpickler(io.BytesIO(pickle.dumps(written))).load()

    contiguous = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert load(_ByName(_MEM_FORMAT_ENCODING, contiguous.name)) is contiguous
    with pytest.raises(CheckpointError, match=r"it refers to builtins\.getattr"):
        load(_ByName(torch.Size, "count"))


def test_a_pickle_in_a_shard_does_not_run(saved, tmp_path):
    folder = saved.folder / "step-5"
    metadata = index_of(folder)
    with (folder / "__0_0.distcp").open("wb") as file:
        for place in metadata.storage_data.values():
            place.offset = file.tell()
            torch.save(_Harm(tmp_path / "harm"), file)
            place.length = file.tell() - place.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(CheckpointError, match="could not be read"):
        saved.load(5, _empty())
    assert not (tmp_path / "harm").exists()


def test_items_that_are_not_tensors_are_refused(saved, tmp_path):
    folder = saved.folder / "step-5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_tensors() | {"model.harm": _Harm(tmp_path / "harm")}, checkpoint_id=tmp_path / "other")
    metadata = pickle.loads((tmp_path / "other" / ".metadata").read_bytes())  # noqa: S301 our own, a line ago
    metadata.storage_meta = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes((tmp_path / "other" / "__0_0.distcp").read_bytes())
    seal(folder)
    with pytest.raises(CheckpointError, match=r"model\.harm is not a tensor"):
        saved.load(5, _empty())
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("path", ["../step-6/__0_0.distcp", "/etc/passwd"])
def test_no_tensor_lies_outside_the_folder(saved, path):
    saved.save(6, _tensors(), {})
    folder = saved.folder / "step-5"
    metadata = index_of(folder)
    for place in metadata.storage_data.values():
        place.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(CheckpointError, match="outside the files"):
        saved.load(5, _empty())


def _chunk(index, name="model.weight"):
    [chunk] = index.state_dict_metadata[name].chunks
    return chunk


def _at(index, name):
    [place] = [place for at, place in index.storage_data.items() if at.fqn == name]
    return place


def _split(index, rows, start=0, name="model.weight"):
    """In place of the one chunk, one of the first ``rows`` and one from row ``start`` on, stored likewise."""
    index.state_dict_metadata[name].chunks[:] = [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows, 4))),
        ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((9 - start, 4))),
    ]
    index.storage_data[MetadataIndex(name, (start, 0))] = _at(index, name)


TAMPERED = {
    "no chunk": (lambda i: i.state_dict_metadata["model.weight"].chunks.clear(), "overlap or leave gaps"),
    "a hole": (lambda i: setattr(_chunk(i), "sizes", torch.Size((8, 4))), "overlap or leave gaps"),
    "twice": (lambda i: i.state_dict_metadata["model.weight"].chunks.append(_chunk(i)), "overlap or leave"),
    "an overlap": (lambda i: _split(i, rows=6, start=5), "overlap or leave gaps"),
    "a hole between": (lambda i: _split(i, rows=4, start=5), "overlap or leave gaps"),
    "two in the same place": (lambda i: _split(i, rows=5, start=5), "share bytes of __0_0.distcp"),
    "outside": (lambda i: setattr(_chunk(i), "offsets", torch.Size((1, 0))), "outside its shape"),
    "of other dimensions": (lambda i: setattr(_chunk(i), "sizes", torch.Size((9,))), "outside its shape"),
    "stored nowhere": (
        lambda i: [i.storage_data.pop(at) for at in list(i.storage_data) if at.fqn == "model.weight"],
        "a chunk of model.weight is not stored",
    ),
    "another tensor's place": (
        lambda i: vars(_at(i, "model.weight")).update(vars(_at(i, "model.norm"))),
        "share bytes",
    ),
    "a larger tensor": (
        lambda i: (
            setattr(i.state_dict_metadata["model.norm"], "size", torch.Size((40,))),
            setattr(_chunk(i, "model.norm"), "sizes", torch.Size((40,))),
        ),
        "model.norm in .* does not match the chunk in the index",
    ),
    "no numbers": (lambda i: setattr(_chunk(i), "sizes", ("a", "b")), "has an invalid shape"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_an_index_that_does_not_tell_of_each_part_once_is_refused(saved, case):
    change, said = TAMPERED[case]
    folder = saved.folder / "step-5"
    change_index(folder, change)
    with pytest.raises(CheckpointError, match=said):
        saved.load(5, _empty() | ({"model.norm": torch.zeros(40)} if case == "a larger tensor" else {}))
    [problem] = index_problems(folder, json.loads((folder / MANIFEST).read_text())["files"])
    assert re.search(said, problem)


@pytest.mark.parametrize("more", [((3, 1),), ((3, 1), None)])
def test_properties_as_torch_2_15_writes_them_are_read_and_later_ones_rejected(saved, monkeypatch, more):
    state = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda it: state(it)[:5] + more)
        change_index(saved.folder / "step-5", lambda index: None)
    target = _empty()
    if len(more) == 1:
        saved.load(5, target)
        _assert_equal(target, _tensors())
    else:
        with pytest.raises(
            CheckpointError, match="torch 2.11 to 2.14 write 5 .*2.15 one more; this file has 7"
        ):
            saved.load(5, target)


@pytest.mark.parametrize("change", [{"by": 4}, {"by": 0, "compress": True}])
def test_a_tensor_larger_than_what_is_stored_of_it_is_refused(saved, change):
    folder = saved.folder / "step-5"
    content = (folder / "__0_0.distcp").read_bytes()

    def replace(index):
        place = _at(index, "model.weight")
        piece = shorten_storage(content[place.offset : place.offset + place.length], **change)
        (folder / "__0_0.distcp").write_bytes(content + piece)
        place.offset, place.length = len(content), len(piece)

    change_index(folder, replace)
    with pytest.raises(CheckpointError, match="it should have .* are stored"):
        saved.load(5, _empty())


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.data())
def test_boxes_fill_a_shape_if_each_place_is_in_one_of_them(rows, columns, data):
    def edge(size):
        start = data.draw(st.integers(0, size))
        return start, data.draw(st.integers(0, size - start))

    boxes = [(edge(rows), edge(columns)) for _ in range(data.draw(st.integers(0, 5)))]
    hits = torch.zeros(rows, columns, dtype=torch.int)
    for (row, height), (column, width) in boxes:
        hits[row : row + height, column : column + width] += 1
    chunks = [ChunkStorageMetadata(torch.Size((a, c)), torch.Size((b, d))) for (a, b), (c, d) in boxes]
    assert coverage._tiles((rows, columns), chunks) == bool((hits == 1).all())
