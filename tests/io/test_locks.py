import fcntl
import os

import pytest

from toolkit.config import load_config
from toolkit.io.locks import claim, exclusive_lock
from toolkit.io.run_folder import _write_config


def test_a_folder_is_one_runs_until_it_lets_go(tmp_path):
    lock = claim(tmp_path / "run")
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "):
        claim(tmp_path / "run")
    lock.close()
    claim(tmp_path / "run").close()


def test_a_folder_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory|exists"):
        claim(tmp_path / "file" / "run")


def test_a_lock_of_a_while_leaves_nothing_and_lets_nobody_in_meanwhile(tmp_path):
    path = tmp_path / "out.lock"
    with exclusive_lock(path), pytest.raises(BlockingIOError), exclusive_lock(path):
        pass
    assert not path.exists()


def test_a_lock_that_is_removed_before_it_is_got_is_no_lock(tmp_path, monkeypatch):
    flock, path = fcntl.flock, tmp_path / "out.lock"

    def late(file, operation):
        if not removed:
            path.unlink()  # by its holder, after it was opened here
            removed.append(path)
        flock(file, operation)

    removed = []
    monkeypatch.setattr(fcntl, "flock", late)
    with exclusive_lock(path), pytest.raises(BlockingIOError), exclusive_lock(path):
        pass
    assert removed


def test_a_run_leaves_its_config_where_it_is_asked_to(tmp_path, monkeypatch):
    """The home folder of a path is that of the user, and no folder of the run's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load_config(["--job.save_config_file=~/copies/mine.toml"])
    _write_config(config, tmp_path)
    for path in (tmp_path / "config.toml", tmp_path / "home/copies/mine.toml"):
        assert load_config([f"--job.config_file={path}"]).job.save_config_file == "~/copies/mine.toml"
