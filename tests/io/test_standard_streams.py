"""Programs that outlive their readers, disks, terminals and encodings."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from toolkit.io import standard_streams
standard_streams.protect(end_with_reader="end" in sys.argv)
print("first", flush=True)
sys.stdin.read()  # until the reader has gone
for number in range(3):
    print("2 × 3 → 6", flush=True)
print("lost:", standard_streams.lost(), file=sys.stderr)
"""
SAID = "standard output cannot be written: [Errno {}] {}; continuing without it\n"


def _start(*words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=ROOT,
        text=True,
        encoding="utf-8",
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def _after_its_reader(*words: str) -> tuple[int, str]:
    process = _start(*words)
    assert process.stdout and process.stdin and process.stderr
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.close()
    told = process.stderr.read()
    return process.wait(timeout=60), told


def test_a_reader_that_goes_ends_nothing_and_is_told_once() -> None:
    code, told = _after_its_reader()
    said = SAID.format(32, "Broken pipe")
    assert code == 0 and told.count(said) == 1
    assert "lost: standard output cannot be written: [Errno 32]" in told and "Traceback" not in told


def test_a_listing_ends_silently_with_its_reader() -> None:
    code, told = _after_its_reader("end")
    assert (code, told) == (-13, "")  # SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_nothing() -> None:
    with open("/dev/full", "wb") as full:
        process = _start(stdout=full)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and told.count(SAID.format(28, "No space left on device")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_listing_that_is_lost_is_no_success() -> None:
    command = [sys.executable, "-m", "toolkit.preflight", "train_configs/debug_model.toml"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, SAID.format(28, "No space left on device"))


def test_a_closed_terminal_ends_nothing() -> None:
    leader, follower = pty.openpty()
    process = _start(stdout=follower, stderr=follower)
    os.close(follower)
    assert os.read(leader, 5) == b"first"  # not to the end of the line
    os.close(leader)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_closed_standard_output_is_no_other_file() -> None:
    process = _start(stdout=None, preexec_fn=lambda: os.close(1))
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and told == "lost: \n"


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    process = _start(env=os.environ | {"PYTHONIOENCODING": "ascii"})
    out, told = process.communicate(timeout=60)
    assert process.returncode == 0 and told == "lost: \n"
    assert out == "first\n" + 3 * "2 \\xd7 3 \\u2192 6\n"


def test_what_an_unbuffered_program_has_printed_outlives_it() -> None:
    program = (
        "import os; from toolkit.io import standard_streams; standard_streams.protect(); "
        "print('told'); os._exit(1)"
    )
    ended = subprocess.run([sys.executable, "-u", "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"told\n")
