"""The supervisor with stand-ins for training processes: what they are told, shown and ended with."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from toolkit.launcher.supervise import supervise
from toolkit.launcher.supervisor import Launch, exit_code

ROOT = Path(__file__).parents[2]
PREAMBLE = "import os, signal, sys, time; rank = int(os.environ['RANK']); "
LAUNCHER = """
import sys
from toolkit.io import standard_streams
from toolkit.launcher.supervise import supervise
from toolkit.launcher.supervisor import Launch
standard_streams.protect()
sys.exit(supervise([sys.executable, "-S", "-c", sys.argv[2]], Launch(**eval(sys.argv[1]))))
"""
SAVES = """
def save(signum, frame):
    print("notice", signum, flush=True)
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
os.write(1, b"ready %d\\n" % os.getpid())  # print may not be entered again, and the signal comes at once
while True:
    time.sleep(0.05)  # signal.pause would not return for one that came just before it
"""
STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def run(code: str, *, reports: Path | None = None, **launch: object) -> int:
    """Supervise ranks that run ``code`` in this process; pytest's capfd sees what they print.

    On a busy machine a rank may come seconds after its peer: it has the time to fail by itself, save where a
    test wants it to hang.
    """
    settings: dict = {"processes": 2, "peer_grace": 20, "kill_grace": 0.2} | launch
    return supervise([sys.executable, "-S", "-c", PREAMBLE + code], Launch(**settings), reports)


KILLED = re.compile(r"rank (\d) \(local rank \d on .*\) was ended by SIGKILL")


def after_rank_0(folder: Path, state: str = "SR") -> str:
    """Code in which rank 1 waits until rank 0 has come to it, and is in a ``state`` of /proc."""
    return f"""
if rank == 0:
    open('{folder}/partial', 'w').write(str(os.getpid()))
    os.rename('{folder}/partial', '{folder}/pid')
    if 'T' in {state!r}:
        os.kill(os.getpid(), signal.SIGSTOP)
while rank and not os.path.exists('{folder}/pid'):
    time.sleep(0.01)
while rank and open('/proc/' + open('{folder}/pid').read() + '/stat').read().split()[2] not in {state!r}:
    time.sleep(0.01)
"""


class Launched:
    """A launcher in a process of its own, whose ranks have all said that they are ready."""

    def __init__(self, code: str, *, ignored: int | None = None, before: str = "", **launch: object):
        settings = {"processes": 2, "shown": {0, 1}} | launch
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + LAUNCHER, repr(settings), PREAMBLE + code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: signal.signal(ignored, signal.SIG_IGN)) if ignored else None,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(settings["processes"])]  # type: ignore[call-overload]
        self.pids = [int(line.split()[-1]) for line in lines]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(condition, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([2, 2], 2),
        ([75, 75], 75),
        ([1, 3], 3),  # the peer of a rank that names the mistake merely lost it
        ([1, 1, 2], 2),
        ([-9, 1], 1),
        ([5, 1], 5),
        ([75, 1], 1),
        ([0, 75], 75),
        ([-15, -15], 1),
    ],
)
def test_the_code_is_the_one_that_describes_the_run(codes, expected):
    assert exit_code(codes) == expected


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_ranks_that_agree_give_their_code(code):
    assert run(f"sys.exit({code})") == code


def test_ranks_know_their_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # of a torchrun in which the launch is
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ]
    code = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join(os.environ[n] for n in {names}))"
    where = {"nodes": 2, "node_rank": 1, "master_addr": "first", "master_port": 1234}
    assert run(code, **where) == 0
    assert (tmp_path / "2").read_text() == "2 0 4 2 1 first 1234 False"
    assert (tmp_path / "3").read_text() == "3 1 4 2 1 first 1234 False"


def test_cores_are_divided_among_ranks_unless_the_user_said_otherwise(tmp_path, monkeypatch):
    code = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(os.environ.get('OMP_NUM_THREADS', 'unset'))"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert run(code) == 0
    assert (tmp_path / "1").read_text() == str(max(1, cores // 2))
    assert run(code, processes=1) == 0
    assert (tmp_path / "0").read_text() == "unset"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(code) == 0
    assert (tmp_path / "1").read_text() == "7"


def test_a_hidden_rank_is_heard_when_it_fails_alone(tmp_path, capfd):
    code = f"""
print('hello from', rank, flush=True)
{after_rank_0(tmp_path)}
rank == 1 and os.kill(os.getpid(), 9)
time.sleep(60)
"""
    assert run(code, peer_grace=0.2) == 1
    out, err = capfd.readouterr()
    assert out == "hello from 0\n"
    assert KILLED.search(err)[1] == "1"
    assert "hello from 1" in err
    log = Path(re.search(r"the end of its output, (.*):", err)[1])
    assert log.read_text() == "hello from 1\n"


def test_a_shown_rank_that_was_killed_is_named(capfd):
    assert run("rank == 0 and os.kill(os.getpid(), 9); time.sleep(60)", peer_grace=0.2) == 1
    err = capfd.readouterr().err
    assert KILLED.search(err)[1] == "0" and "SIGKILL (by the kernel, if memory ran out" in err


def test_a_signal_without_a_name_is_told(capfd):
    assert run("os.kill(os.getpid(), 40)", processes=1) == 1
    assert re.search(r"rank 0 \(.*\) was ended by signal 40", capfd.readouterr().err)


def test_the_rank_that_failed_first_is_named_not_the_peer_that_noticed(tmp_path, capfd):
    gone = tmp_path / "gone"
    code = f"""
if rank == 1:
    open({str(gone)!r}, "w").write(str(os.getpid()))
    os.kill(os.getpid(), 9)
while not os.path.exists({str(gone)!r}) or os.path.exists("/proc/" + open({str(gone)!r}).read()):
    time.sleep(0.01)
sys.exit(1)
"""
    assert run(code) == 1
    assert KILLED.search(capfd.readouterr().err)[1] == "1"


def test_a_rank_that_reports_lost_peers_hides_none_that_failed_by_itself(tmp_path, capfd):
    prefix = tmp_path / "rank_"
    report = f"""
from pathlib import Path
from toolkit.launcher.fault_reports import Report, write
if rank == 0:
    write(Path({str(prefix)!r}), Report(0, 7, "", True, None, 0.0, ()))
    sys.exit(1)
while not os.path.exists({str(prefix)!r} + "0.report.json"):
    time.sleep(0.01)
print("of its own")
sys.exit(1)
"""
    prefix.with_name("rank_1.report.json").write_text("{}")  # of an earlier run
    assert run(report, reports=prefix) == 1
    err = capfd.readouterr().err
    assert re.search("rank 1 .* ended with code 1 in step 7", err) and "of its own" in err
    assert "rank 0" not in err


def test_a_mistake_that_rank_0_reported_is_not_repeated(capfd):
    assert run("print(f'error: of {rank}', file=sys.stderr); sys.exit(3)") == 3
    assert capfd.readouterr().err == "error: of 0\n"


def test_what_all_ranks_end_of_is_told_by_the_shown_one_alone(capfd):
    # Rank 1 is first, and silent.
    assert (
        run("time.sleep(0 if rank else 0.1); print('' if rank else 'not finite', end=''); sys.exit(1)") == 1
    )
    captured = capfd.readouterr()
    assert captured.out == "not finite" and "launch:" not in captured.err


def test_a_mistake_that_only_a_hidden_rank_saw_is_shown(capfd):
    assert run("rank or sys.exit(1); print('error: column text is missing'); sys.exit(3)") == 3
    err = capfd.readouterr().err
    assert re.search("rank 1 .* ended with code 3", err) and "error: column text is missing" in err


def test_several_shown_ranks_are_told_apart(capfd):
    assert run("print('one\\ntwo')", processes=3, shown=frozenset({0, 2})) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank0]: one", "[rank0]: two", "[rank2]: one", "[rank2]: two"]


def test_the_shown_rank_owns_the_terminal():
    leader, follower = pty.openpty()
    settings = repr({"processes": 2})
    code = PREAMBLE + "print('terminal', rank, sys.stdout.isatty(), sys.stderr.isatty())"
    subprocess.run(
        [sys.executable, "-c", LAUNCHER, settings, code],
        cwd=ROOT,
        stdout=follower,
        stderr=follower,
        timeout=20,
    )
    os.close(follower)
    assert os.read(leader, 1000).decode().splitlines() == ["terminal 0 True True"]
    os.close(leader)


def test_a_failed_rank_ends_peers_that_hang(tmp_path, capfd):
    code = f"""
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
{after_rank_0(tmp_path)}
rank == 1 and sys.exit(3)
time.sleep(60)
"""
    started = time.monotonic()
    assert run(code, peer_grace=0.2) == 3
    assert time.monotonic() - started < 50  # not the minute that rank 0 wanted
    err = capfd.readouterr().err
    assert err.index("rank 0 still running: asked where") < err.index("SIGKILL to rank 0")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_stopped_peer_is_not_asked(tmp_path, capfd):
    code = after_rank_0(tmp_path, "T") + "sys.exit(3)"
    started = time.monotonic()
    assert run(code, peer_grace=0.2, kill_grace=60) == 3
    assert time.monotonic() - started < 50  # without the grace for an answer
    err = capfd.readouterr().err
    assert "SIGKILL to rank 0" in err and "asked" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_each_rank_once_and_the_save_is_waited_for(number):
    launched = Launched(SAVES)
    launched.process.send_signal(number)
    code, out, err = launched.end()
    assert code == 75
    for rank in (0, 1):
        told = [line for line in out.splitlines() if line.startswith(f"[rank{rank}]")]
        assert told == [f"[rank{rank}]: notice {int(number)}", f"[rank{rank}]: saved"]
    assert err.count(number.name) == 1


def test_who_logs_out_loses_nothing(tmp_path):
    leader, follower = pty.openpty()
    code = f"""
from toolkit.launcher.time_limit import Deadline
from toolkit.launcher.signals import StopRequest
from toolkit.io import standard_streams
standard_streams.protect()
request = StopRequest(Deadline(None, {{}}))
print("ready", flush=True)
while not request.asked:
    time.sleep(0.01)
print("saving", flush=True)  # to a terminal that has gone
open('{tmp_path}/saved', 'w').close()
sys.exit(75)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, repr({"processes": 1}), PREAMBLE + code],
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    told = b""
    while b"ready" not in told:
        told += os.read(leader, 1000)
    os.close(leader)
    assert process.wait(timeout=60) == 75
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        ("SIGUSR1", "SIGTERM", 75),
        ("SIGTERM", "SIGTERM", 75),
        ("SIGTERM", "SIGINT", -2),
        ("0", "SIGTERM", -15),
    ],
)
def test_a_run_that_has_stopped_keeps_its_code_when_the_scheduler_repeats_itself(first, then, code):
    ends = f"""
import os, signal, sys
from signal import *
from toolkit.launcher.signals import StopRequest
from toolkit.launcher.time_limit import Deadline
signal(SIGINT, SIG_DFL)
request = StopRequest(Deadline(None, {{}}))
os.kill(os.getpid(), {first})
request.release()
os.kill(os.getpid(), {then})
sys.exit(75)
"""
    assert subprocess.run([sys.executable, "-c", ends], cwd=ROOT).returncode == code


def test_nohup_is_heeded():
    launched = Launched("print('ready', os.getpid(), flush=True); time.sleep(1)", ignored=signal.SIGHUP)
    launched.process.send_signal(signal.SIGHUP)
    code, _, err = launched.end()
    assert code == 0 and "SIGHUP" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_are_stopped_while_they_start_up_may_be_started_again(number):
    # Rank 1 is a little further, and fails because its peer is gone.
    launched = Launched(
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(1))) if rank else None\n"
        "print('ready', os.getpid(), flush=True); time.sleep(60)"
    )
    launched.process.send_signal(number)
    code, _, err = launched.end()
    assert code == 75
    assert "the same command resumes" in err and "ended" not in err.replace("ends", "")


def test_a_later_signal_of_the_scheduler_does_not_disturb_the_save():
    launched = Launched(SAVES)
    launched.process.send_signal(signal.SIGUSR1)
    assert "notice" in launched.process.stdout.readline()
    launched.process.send_signal(signal.SIGTERM)
    code, out, _ = launched.end()
    assert code == 75
    assert out.count("saved") == 2 and f"notice {int(signal.SIGTERM)}" not in out


def test_a_second_interrupt_ends_at_once():
    launched = Launched(STUBBORN, insist_after=0)
    launched.process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in launched.process.stderr.readline()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 1
    assert "SIGKILL to rank 0, 1" in err
    assert not any(map(alive, launched.pids))


def test_an_interrupt_that_comes_twice_at_once_saves():
    launched = Launched(SAVES, insist_after=60)
    launched.process.send_signal(signal.SIGINT)
    assert "SIGINT" in launched.process.stderr.readline()
    launched.process.send_signal(signal.SIGINT)  # while the ranks take 0.3 s to save
    code, out, err = launched.end()
    assert code == 75
    assert out.count("saved") == 2 and "SIGKILL" not in err


ELSEWHERE = """
import signal, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
"""
"""Has the system hand this signal to another thread than the main one, as it may at any time."""


def test_a_signal_that_another_thread_takes_wakes_the_launcher():
    launched = Launched(SAVES, before=ELSEWHERE)
    launched.process.send_signal(signal.SIGINT)
    code, out, _ = launched.end()
    assert code == 75
    assert out.count("saved") == 2


def test_ranks_that_do_not_stop_in_time_are_ended():
    launched = Launched(STUBBORN, shutdown_timeout=0.3, kill_grace=0.2)
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 1
    assert "SIGKILL to rank 0, 1" in err and "memory" not in err
    assert not any(map(alive, launched.pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_killed_launcher_leaves_no_orphan():
    launched = Launched(STUBBORN)
    launched.process.kill()
    launched.process.wait()
    assert eventually(lambda: not any(map(alive, launched.pids)))
    launched.end()


def test_what_a_failed_rank_had_started_ends_with_it(tmp_path):
    started = tmp_path / "child"
    code = f"""import subprocess
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])
open({str(started)!r}, 'w').write(str(child.pid))
os.kill(os.getpid(), 9)
"""
    assert run(code, processes=1) == 1
    assert eventually(lambda: not alive(int(started.read_text())))


def test_a_group_forms_at_the_reserved_port_while_others_cannot_take_it(capfd):
    code = """
import socket, torch.distributed as dist
port = int(os.environ["MASTER_PORT"])
other = socket.socket()
try:
    other.bind(("", port))
    print("taken by another")
except OSError:
    pass
dist.init_process_group("gloo")
dist.barrier()  # a rank that is through and gone fails one that still connects
print("formed", dist.get_world_size())
dist.destroy_process_group()
"""
    launch = Launch(processes=2)
    assert supervise([sys.executable, "-c", PREAMBLE + code], launch) == 0
    assert capfd.readouterr().out == "formed 2\n"
