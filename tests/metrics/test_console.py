import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

from toolkit.metrics.console import Console, format_line
from toolkit.metrics.startup_timer import StartupTimer, process_seconds

VALUES = {
    "loss": 4.81234,
    "grad_norm": 1.2149,
    "lr": 3e-4,
    "tokens": 123456,
    "tokens_per_second": 12345.4,
    "step_seconds": 2.0,
    "data_seconds": 0.002,
    "mfu": 0.412,
    "memory_gib": 1.234,
    "memory_peak_gib": 9.9,
}
LINE = (
    "step 100/600  loss 4.8123  grad_norm 1.215  lr 3.00e-04  "
    "12,345 tok/s  mfu 41.2%  mem 1.23 GiB  wait 0.1%"
)


def test_a_line():
    assert format_line(100, 600, VALUES) == LINE
    assert format_line(9, 600, {"loss": 1.0}) == "step   9/600  loss 1.0000"


def test_what_is_unknown_is_left_out():
    assert "mfu" not in format_line(1, 10, VALUES | {"mfu": None})


def test_time_spent_elsewhere_is_shown():
    assert format_line(1, 10, {"checkpoint_seconds": 3.21}).endswith("checkpoint 3.2 s")
    assert format_line(1, 10, {"loss": 1.0, "profiler_seconds": 0.04}).endswith("loss 1.0000")


def test_validation():
    assert format_line(20, 600, {"validation_loss": 5.1234}) == "step  20/600  validation loss 5.1234"


def test_no_escape_codes_and_no_bar_off_a_terminal(capsys):
    console = Console(600)
    console.log(100, VALUES)
    console.advance(100)
    console.close()
    captured = capsys.readouterr()
    assert captured.out == LINE + "\n"
    assert captured.err == ""


def test_off_a_terminal_the_second_line_is_followed_by_the_time_that_is_left(capsys):
    console = Console(600)
    for step in (1, 10, 20):
        console.log(step, VALUES | {"step_seconds": 0.75})
    console.log(20, {"validation_loss": 5.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "step " not in line] == [
        "at this speed the remaining steps take about 7 min"
    ]
    assert lines[2].startswith("at this")
    console = Console(80)
    for step in (1, 10):
        console.log(step, VALUES | {"step_seconds": 0.75})
    assert "at this speed" not in capsys.readouterr().out


_PROGRAM = """
import sys
from toolkit.metrics.console import Console
console = Console(50, resume_step=10, color=sys.argv[1] == "color")
for step in range(11, 51):
    console.advance(step)
    if step % 10 == 0:
        console.log(step, {"loss": 2.5, "tokens_per_second": 1000.0})
console.close()
print("the end")
"""


def _on_a_terminal(*arguments, **environment):
    """Show what a terminal of 80 columns has in the end: the visible text of each line."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = {**os.environ, **environment}
    settings = {name: value for name, value in settings.items() if value is not None}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments], stdout=terminal, stderr=terminal, env=settings
    )
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(controller, 4096):
            chunks.append(chunk)
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(controller)
    assert process.wait(timeout=30) == 0
    return b"".join(chunks).decode()


def _shown(raw):
    lines = []
    for line in raw.split("\n"):
        cells = ""
        for text in line.split("\r"):
            cells = text + cells[len(text) :]
        lines.append(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", cells).rstrip())
    return lines


def test_lines_and_bar_do_not_tear_on_a_terminal():
    raw = _on_a_terminal("plain", NO_COLOR=None)
    shown = [line for line in _shown(raw) if line]
    assert shown == [f"step {step}/50  loss 2.5000  1,000 tok/s" for step in (20, 30, 40, 50)] + ["the end"]
    first = re.search(r"(\d+)/50 \[", raw)
    assert first and first[1] == "10", "the bar starts at the step that was resumed"


def test_color_is_for_terminals_that_want_it():
    assert "\x1b[32mloss 2.5000\x1b[0m" in _on_a_terminal("color", NO_COLOR=None)
    assert "\x1b[32m" not in _on_a_terminal("color", NO_COLOR="1")
    assert "\x1b[32m" not in _on_a_terminal("plain", NO_COLOR=None)


def test_phases(capsys):
    phases = StartupTimer()
    with phases("tokenizer"):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"  tokenizer +\d+\.\d\d s", lines[-1])
    StartupTimer(enabled=False)
    assert capsys.readouterr().out == ""


def test_the_age_of_the_process_counts_its_start():
    if process_seconds() is None:
        return
    program = (
        "import time; began = time.monotonic(); from toolkit.metrics.startup_timer import process_seconds; "
        "print(time.monotonic() - began, process_seconds())"
    )
    began = time.monotonic()
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    since_first_line, age = map(float, output.split())
    # the kernel counts in hundredths of a second
    assert since_first_line - 0.02 < age < time.monotonic() - began + 0.02
