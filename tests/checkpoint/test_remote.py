"""Checkpoints and weights in object storage: complete and verified or absent, whatever the store does."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.preflight.bad_runs import CPU
from tests.s3_server import Server, running_here
from toolkit.checkpoint import manager as manager_module
from toolkit.checkpoint.async_save import BackgroundWriter
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import committed_steps, invalid_steps, read_manifest
from toolkit.checkpoint.remote_steps import leftovers
from toolkit.cli import run_command
from toolkit.config import load_config
from toolkit.config.local_paths import expand_user
from toolkit.errors import EXIT_DATA, EXIT_FINISHED, CheckpointError, ConfigError
from toolkit.exporter import Exporter
from toolkit.preflight import check
from toolkit.storage import remote_calls, remote_path
from toolkit.storage.remote_calls import StorageError
from toolkit.storage.remote_path import RemotePath
from toolkit.weights.open import find_checkpoint, open_weights
from toolkit.weights.remote_folder import upload_folder
from tools import make_random_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_here() as server:
        yield server


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """A place of its own for each test."""
    server.requests()
    return f"s3://bucket/{request.node.name.translate(str.maketrans('[] ', '___'))}/checkpoint"


def _tensors(shift: float = 0.0) -> dict[str, Tensor]:
    return {
        "model.weight": torch.arange(6000.0).view(60, -1) + shift,
        "model.half": torch.ones(7, dtype=torch.bfloat16),
        "optim.weight.step": torch.tensor(3.0),
    }


def _manager(url: str, **options: object) -> CheckpointManager:
    return CheckpointManager(url, say=lambda text: None, **options)  # type: ignore[arg-type]


def _loaded(manager: CheckpointManager, where: int | str = -1) -> dict[str, Tensor]:
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in _tensors().items()}
    manager.load(where, tensors)
    return tensors


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _begin_upload(path: RemotePath) -> None:
    """Leave what a process that is killed leaves of a large file."""
    upload = path.open("wb")
    upload.write(bytes(6 << 20))
    upload._file.closed = True  # else it would be completed when it is collected


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_is_loaded_and_the_oldest_goes(
    url: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = _manager(url, keep_latest_k=2, background=BackgroundWriter() if background else None)
    for step in (1, 2, 3):
        manager.save(step, _tensors(step), {"tokens": step})
    assert manager.latest() == 3
    assert committed_steps(manager.folder) == [2, 3]
    assert [path.name for path in manager.folder.iterdir()] == ["step-2", "step-3"]
    assert _equal(_loaded(manager), _tensors(3))
    assert _equal(_loaded(manager, f"{url}/step-2"), _tensors(2))
    manager.save(2, _tensors(9), {})  # after a rewind
    manager.end_save(wait=True)
    assert _equal(_loaded(manager, 2), _tensors(9))
    assert not any(tmp_path.iterdir())  # no folder s3: either
    (manager.folder / "a note, of someone #1").write_new(b"")
    assert manager.latest() == 3


@pytest.mark.parametrize("moment", ["shard", "index", "manifest"])
def test_a_save_that_fails_leaves_the_one_before(server: Server, url: str, moment: str) -> None:
    manager = _manager(url)
    manager.save(1, _tensors(1), {})
    name = {"shard": "step-2/__0_0", "index": "step-2/.metadata", "manifest": "step-2/manifest"}[moment]
    server.fail("PUT", name, status=403, code="AccessDenied")
    with pytest.raises(CheckpointError, match="(?s)not saved .*lack permission.*checkpoints are unchanged"):
        manager.save(2, _tensors(2), {})
    assert manager.latest() == 1 and _equal(_loaded(manager), _tensors(1))
    assert leftovers(manager.folder) == []
    manager.save(2, _tensors(2), {})
    assert manager.latest() == 2


@pytest.mark.parametrize("large", ["", "step-2/__0_0.distcp", "hf/step-2/model.safetensors"])
def test_what_a_killed_save_leaves_counts_for_nothing_and_goes(
    url: str, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, said = _manager(url), []
    manager.say = said.append
    manager.save(1, _tensors(1), {})
    with monkeypatch.context() as patch:
        for name in ("discard", "commit"):  # of a process that is gone there is neither
            patch.setattr(f"toolkit.checkpoint.remote_steps.{name}", lambda *_: None)
        if large:  # an upload that has not ended
            patch.setattr(remote_path, "PART", 5 << 20)
            _begin_upload(manager.folder / large)
        else:
            manager.save(2, _tensors(2), {})
            assert list(invalid_steps(manager.folder)) == [2]
    assert committed_steps(manager.folder) == [1]
    assert _equal(_loaded(manager), _tensors(1))
    said.clear()
    manager.remove_leftovers()
    assert len(said) == 1 and ("aborted 1 uploads" if large else "removed step-2") in said[0]
    assert [path.name for path in manager.folder.iterdir()] == ["step-1"]
    manager.remove_leftovers()
    assert len(said) == 1


def test_a_folder_may_have_the_name_of_the_one_that_it_is_in(url: str) -> None:
    folder = expand_user(url)
    manager = _manager(f"{url}/{folder.name}")
    manager.save(1, _tensors(), {})
    assert list(folder.iterdir()) == [manager.folder]
    assert find_checkpoint(folder) == manager.folder / "step-1"


def test_uploads_that_a_killed_save_left_in_a_bucket_without_a_folder_are_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = RemotePath("s3://bucket")
    monkeypatch.setattr(remote_path, "PART", 5 << 20)
    _begin_upload(bucket / "step-2" / "__0_0.distcp")
    assert remote_path.abort_uploads(bucket) == 1
    assert remote_path.abort_uploads(bucket) == 0


def test_a_store_that_stumbles_is_asked_again(server: Server, url: str) -> None:
    manager = _manager(url)
    server.fail("PUT", "step-1/__0_0", status=503, code="SlowDown", times=2)
    server.fail("PUT", "step-1/manifest", after=True, hang_up=True)  # it is written, and nobody is told
    server.fail("HEAD", "step-1/.metadata", hang_up=True)
    manager.save(1, _tensors(1), {})
    server.fail("GET", "prefix=", status=500, code="InternalError", times=2)
    server.fail("GET", "step-1/__0_0", hang_up=True, times=2)
    assert manager.latest() == 1 and _equal(_loaded(manager), _tensors(1))


def test_an_upload_goes_on_at_the_part_that_failed(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_path, "PART", 5 << 20)
    content = bytes(range(256)) * (68 << 10)  # 17 MiB: four parts
    path = RemotePath(f"{url}/file")
    server.fail("PUT", "partNumber=2", status=500, code="InternalError", times=2)
    server.fail("PUT", "partNumber=3", hang_up=True)
    with path.open("wb") as file:
        for start in range(0, len(content), 1 << 20):
            file.write(content[start : start + (1 << 20)])
    parts = [asked for asked in server.requests() if "partNumber" in asked and path.name in asked]
    sent = [asked.partition("partNumber=")[2][:1] for asked in parts]
    assert sorted(sent) == sorted("1" + "222" + "33" + "4")
    assert path.read_bytes() == content
    part = bytearray(len(content) - 5)
    assert path.read_into(memoryview(part), 5) == len(part) and part == content[5:]
    with pytest.raises(ZeroDivisionError), RemotePath(f"{url}/other").open("wb") as file:
        file.write(content)
        raise ZeroDivisionError
    assert not RemotePath(f"{url}/other").exists() and path.exists()


def test_damage_is_named_and_nothing_goes_on_with_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    manager = _manager(url)
    for step in (1, 2):
        manager.save(step, _tensors(step), {"tokens": step})
    shard = expand_user(f"{url}/step-2/__0_0.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    with shard.open("wb") as file:
        file.write(content)
    with pytest.raises(CheckpointError, match="__0_0.distcp was altered: its hash"):
        _loaded(manager)
    assert run_command("checkpoint", ["verify", url]) == EXIT_DATA
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{url}/step-1: sound" and "step-2: __0_0.distcp was altered" in lines[1]
    assert run_command("checkpoint", ["prune", url, "--keep-latest", "1"]) == EXIT_DATA
    assert "nothing deleted" in capsys.readouterr().err and committed_steps(manager.folder) == [1, 2]
    shard.unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
        _loaded(manager)


def test_the_tool_reads_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    manager = _manager(url)
    for step in (1, 2, 3):
        manager.save(step, _tensors(step), {"tokens": 100 * step, "config": "[a]\nb = 1\n"})
    assert run_command("checkpoint", ["list", url.removesuffix("/checkpoint")]) == EXIT_FINISHED
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["1", "2", "3"]
    assert run_command("checkpoint", ["inspect", f"{url}/step-3", "--tensors"]) == EXIT_FINISHED
    assert "tokens                 300" in capsys.readouterr().out
    assert run_command("checkpoint", ["diff", f"{url}/step-2", f"{url}/step-3"]) == 1
    assert "model.weight: 6,000 of 6,000 values differ, by at most 1;" in capsys.readouterr().out
    assert run_command("checkpoint", ["prune", url, "--keep-latest", "1"]) == EXIT_FINISHED
    assert committed_steps(manager.folder) == [3]


FAULTS = {
    "quota": ({"status": 403, "code": "QuotaExceeded"}, "the quota of the store is exceeded"),
    "full disk": ({"status": 507, "code": "XMinioStorageFull"}, "the quota of the store is exceeded"),
    "clock": ({"status": 403, "code": "RequestTimeTooSkewed"}, "the clock of this machine is wrong"),
    "expired": ({"status": 400, "code": "ExpiredToken"}, "the credentials have expired"),
    "not allowed": ({"status": 403, "code": "AccessDenied"}, "the credentials lack permission"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_will_not_pass_is_told_at_once(server: Server, url: str, fault: str) -> None:
    told, rule = FAULTS[fault]
    server.fail("PUT", url.removeprefix("s3://"), **told)  # type: ignore[arg-type]
    with pytest.raises(StorageError) as caught, RemotePath(f"{url}/x").open("wb") as file:
        file.write(b"x")
    assert str(caught.value).startswith(f"{url}/x cannot be used: {rule}\n  fix:  ")
    assert caught.value.exit_code == EXIT_DATA
    assert len([asked for asked in server.requests() if asked.startswith("PUT")]) == 1


def test_a_missing_bucket_and_wrong_credentials(
    server: Server, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("checkpoint", ["list", "s3://nobucket/run"]) == EXIT_DATA
    assert "s3://nobucket/run cannot be used: the bucket does not exist" in capsys.readouterr().err
    with pytest.raises(StorageError, match="the bucket does not exist"):
        _manager("s3://nobucket/run").latest()
    server.call("/moto-api/reset-auth", 0)  # from now on moto looks at signatures
    try:
        assert run_command("checkpoint", ["list", url]) == EXIT_DATA
    finally:
        server.call("/moto-api/reset-auth", 1e9)
    said = capsys.readouterr().err
    assert "the credentials are missing or wrong" in said
    assert "testing-id" not in said and "testing-secret" not in said


def test_a_store_that_is_gone_is_waited_for_only_so_long(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_calls, "PATIENCE", 0.5)
    monkeypatch.setattr(remote_calls, "FIRST_PATIENCE", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    remote_calls.file_system.cache_clear()
    try:
        with pytest.raises(StorageError, match="(?s)did not answer for .* s .*check that the store is up"):
            committed_steps(expand_user(url))
    finally:
        remote_calls.file_system.cache_clear()


def test_a_damaged_answer_is_no_missing_checkpoint(server: Server, url: str) -> None:
    """A manifest that cannot be read for now must not make a run start from an older step, or anew."""
    manager = _manager(url)
    manager.save(1, _tensors(1), {})
    server.fail("GET", "step-1/manifest", status=403, code="AccessDenied")
    with pytest.raises(StorageError, match="lack permission"):
        manager.latest()
    assert manager.latest() == 1


def test_two_runs_do_not_commit_one_step(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = _manager(url), _manager(url)
    commit = manager_module.commit_folder

    def late(*arguments: object) -> None:
        monkeypatch.setattr(manager_module, "commit_folder", commit)
        theirs.save(1, _tensors(2), {})
        commit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(manager_module, "commit_folder", late)
    with pytest.raises(CheckpointError, match="(?s)another run has committed this step|of another size"):
        ours.save(1, _tensors(1), {})
    assert _equal(_loaded(ours), _tensors(2))


def test_credentials_in_a_url_are_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("s3://key:hush@bucket/run", "az://bucket/run?sig=hush"):
        with pytest.raises(ConfigError) as caught:
            load_config([f"--checkpoint.folder={place}"])
        assert "a URL with credentials" in str(caught.value) and "hush" not in str(caught.value)
        with pytest.raises(ConfigError) as caught:
            load_config([f"--checkpoint.foldr={place}"])
        assert "hush" not in str(caught.value)
        with pytest.raises(SystemExit):
            run_command("checkpoint", ["list", place])
        assert "hush" not in capsys.readouterr().err


def test_weights_are_read_from_a_url(url: str, tmp_path: Path) -> None:
    assert make_random_model.main([str(tmp_path / "hf"), "--flavor", "debugmodel"]) == 0
    for path in (tmp_path / "hf").iterdir():
        with RemotePath(f"{url}/{path.name}").open("wb") as file:
            file.write(path.read_bytes())
    here, there = open_weights(tmp_path / "hf"), open_weights(url)
    assert there.args == here.args and dict(there.tensors) == dict(here.tensors)
    assert all(torch.equal(here.read(name), there.read(name)) for name in here.tensors)
    columns = (slice(3, 9), slice(2, 5))
    name = "layers.0.attention.wq.weight"
    assert torch.equal(here.read(name, columns), there.read(name, columns))


def test_weights_are_converted_from_a_url_to_another(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, tokenizer = tmp_path / "hf", str(ROOT / "tests/assets/tokenizer")
    arguments = [str(here), "--flavor", "debugmodel", "--tokenizer", tokenizer]
    assert make_random_model.main(arguments) == 0
    upload_folder(here, RemotePath(f"{url}/hf"), replace=False)
    assert run_command("convert", ["hf-to-dcp", f"{url}/hf", f"{url}/dcp", "--verify"]) == 0
    assert committed_steps(expand_user(f"{url}/dcp")) == [0]
    assert read_manifest(expand_user(f"{url}/dcp/step-0"))["run"]["tokenizer"] == f"{url}/hf"
    assert run_command("convert", ["dcp-to-hf", f"{url}/dcp/step-0", f"{url}/back"]) == 0
    assert (RemotePath(f"{url}/back") / "tokenizer.model").read_bytes() == (
        here / "tokenizer.model"
    ).read_bytes()
    back, before = open_weights(f"{url}/back"), open_weights(here)
    assert dict(back.tensors) == dict(before.tensors)
    assert all(torch.equal(back.read(name), before.read(name)) for name in before.tensors)
    capsys.readouterr()
    assert run_command("convert", ["dcp-to-hf", f"{url}/dcp", f"{url}/back"]) == EXIT_DATA
    assert f"{url}/back exists: choose" in capsys.readouterr().err
    assert run_command("convert", ["hf-to-dcp", f"{url}/none", str(tmp_path / "out")]) == EXIT_DATA
    assert f"{url}/none does not exist" in capsys.readouterr().err


def test_weights_at_a_url_are_checked_against_the_tokenizer_of_the_run(url: str, tmp_path: Path) -> None:
    arguments = ["--flavor", "debugmodel", "--tokenizer", str(ROOT / "tests/assets/tokenizer")]
    assert make_random_model.main([str(tmp_path), *arguments]) == 0
    upload_folder(tmp_path, RemotePath(url), replace=False)
    weights = [
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={url}",
    ]

    def said(tokenizer: str) -> list[str]:
        config = load_config([*weights, f"--model.tokenizer_path={ROOT / 'tests/assets' / tokenizer}"])
        return [str(problem) for problem in check(config, world_size=1, hardware=CPU)]

    assert said("tokenizer_json") == []
    path = tmp_path / "smaller"
    path.mkdir()
    found = json.loads((ROOT / "tests/assets/tokenizer_json/tokenizer.json").read_text())
    found["added_tokens"] = found["added_tokens"][:3]
    (path / "tokenizer.json").write_text(json.dumps(found))
    [problem] = said(str(path))
    assert f"that of the weights in {url} has 4096" in problem and "download that tokenizer" in problem


def test_an_upload_that_fails_leaves_nothing_and_is_told(
    server: Server,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither in the store, where the same command would find it, nor in TMPDIR."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    here = str(tmp_path / "hf")
    assert make_random_model.main([here, "--flavor", "debugmodel"]) == 0
    command = ["hf-to-meta", here, f"{url}/meta"]

    def fails(code: int, *said: str) -> None:
        assert run_command("convert", command) == code
        err = capsys.readouterr().err
        assert all(words in err for words in said) and "are kept in" not in err, err
        assert not any((tmp_path / "tmp").glob("upload-*")) and not RemotePath(f"{url}/meta").is_dir()

    server.fail("PUT", "meta/params.json", status=403, code="AccessDenied")
    fails(EXIT_DATA, "lack permission")
    with monkeypatch.context() as patched:
        patched.setattr(
            "toolkit.weights.convert.write_meta", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
        )
        fails(128 + signal.SIGTERM, "SIGTERM: stopped")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        fails(EXIT_DATA, "could not be written", "fix:  set TMPDIR")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run_command("convert", command) == EXIT_FINISHED


def test_the_next_start_uploads_an_export_that_the_store_has_not(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Exporter, step: int, out: Path) -> str:
        out.mkdir(parents=True)
        for name in names:
            (out / name).touch()
        return "an adapter"

    monkeypatch.setattr(Exporter, "_write", write)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    config = load_config([f"--checkpoint.folder={url}", "--checkpoint.last_save_in_hf"])
    manager = _manager(url)
    manager.save(1, _tensors(), {})
    exporter = Exporter(config, tmp_path / "hf", manager, say=print)
    there = manager.folder / "hf" / "step-1"
    server.fail("PUT", "hf/step-1/adapter_model", status=403, code="AccessDenied")
    with pytest.raises(CheckpointError, match="(?s)NOT UPLOADED: .*lack permission.*uploads it again"):
        exporter.export(1, final=True)
    for _ in range(2):
        exporter.export_missed(1, last=True)
        assert [path.name for path in there.iterdir()] == names
    assert sum("PUT" in line and "adapter_model" in line for line in server.requests()) == 2


def test_the_next_start_uploads_an_export_of_a_step_that_was_saved_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Exporter, step: int, out: Path) -> str:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(content)
        return "a model"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Exporter, "_write", write)
    config = load_config([f"--checkpoint.folder={url}", "--checkpoint.last_save_in_hf"])
    manager, content = _manager(url), "old"
    manager.save(1, _tensors(), {})
    exporter = Exporter(config, tmp_path / "hf", manager, say=print)
    exporter.export(1, final=True)
    content = "new"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("toolkit.weights.remote_folder.upload_folder", stop)
        exporter.export(1, final=True)
    exporter.export_missed(1, last=True)
    assert (manager.folder / "hf" / "step-1" / "config.json").read_bytes() == b"new"


def test_a_run_saves_to_a_url_and_goes_on_from_there(url: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "toolkit.train", "--job.config_file=train_configs/debug_model.toml",
        "--model.dim=64", "--model.n_layers=2", "--model.ffn_dim=160", "--training.seq_len=64",
        "--training.dataset=embedded_validation", "--lr_scheduler.warmup_steps=1",
        "--validation.enable=false", "--metrics.enable_tensorboard=false", "--metrics.log_freq=1",
        "--checkpoint.interval=2", f"--checkpoint.folder={url}", f"--data.cache_folder={tmp_path / 'cache'}",
        "--checkpoint.last_save_in_hf",
    ]  # fmt: skip

    def losses(folder: Path, *arguments: str) -> dict[int, float]:
        asked = [*command, f"--job.dump_folder={folder}", *arguments]
        done = subprocess.run(asked, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    first = losses(tmp_path / "run", "--training.steps=4")
    assert committed_steps(expand_user(url)) == [2, 4]
    written, uploaded = open_weights(tmp_path / "run" / "hf" / "step-4"), open_weights(f"{url}/hf/step-4")
    assert all(torch.equal(written.read(name), uploaded.read(name)) for name in written.tensors)
    again = losses(
        tmp_path / "again", "--training.steps=4", "--checkpoint.folder=checkpoint",
        f"--checkpoint.initial_load_path={url}/step-2", "--checkpoint.initial_load_model_only=false",
    )  # fmt: skip
    assert again == {step: first[step] for step in (3, 4)}
