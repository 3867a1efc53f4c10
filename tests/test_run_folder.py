import os

import pytest

from toolkit.run_folder import claim


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
