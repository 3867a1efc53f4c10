"""Run one process per rank, forward signals, and return the ranks' exit code.

Needs no torch: ranks rendezvous at MASTER_ADDR:MASTER_PORT, as with torchrun's static rendezvous.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR, EXIT_FINISHED, EXIT_REQUEUE, printable
from toolkit.launcher.environment import QUESTION, SUPERVISED, with_threads
from toolkit.launcher.signals import INSISTING_SECONDS, asking

ENDED_WELL = (EXIT_FINISHED, EXIT_REQUEUE)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Launch:
    """Ranks to start on this node, and the rendezvous address of all ranks. Times are in seconds.

    The output of the global ranks in ``shown`` reaches the terminal. After a signal the ranks have
    ``shutdown_timeout`` to save and exit, unless a SIGINT arrives ``insist_after`` later. Once a rank has
    failed, its peers have ``peer_grace`` to exit by themselves before they are asked for their location, and
    ``kill_grace`` to answer and exit before SIGKILL.
    """

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 chooses a free port, on a single node
    shown: frozenset[int] = frozenset({0})
    shutdown_timeout: float = 600.0
    insist_after: float = INSISTING_SECONDS
    peer_grace: float = 5.0
    kill_grace: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's environment for the ranks."""

    @property
    def world_size(self) -> int:
        return self.processes * self.nodes

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        return range(self.node_rank * self.processes, (self.node_rank + 1) * self.processes)


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None = None
    pump: threading.Thread | None = None


# --- starting ranks


def bound(port: int) -> socket.socket:
    """Return a socket bound to ``port`` on all addresses (0: a free port), not listening."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder


@contextmanager
def _reserved_port(launch: Launch) -> Iterator[int]:
    """Reserve a port on this machine until rank 0 listens on it.

    A bound socket that does not listen keeps the port from everyone except a listener that sets SO_REUSEADDR,
    as torch's TCPStore does. Therefore two runs that start at the same time never choose the same port.
    """
    if launch.master_port:
        yield launch.master_port
        return
    with bound(0) as holder:
        yield holder.getsockname()[1]


def _environment(launch: Launch, rank: int, port: int) -> dict[str, str]:
    environment = with_threads(os.environ | launch.environment, launch.processes)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - launch.ranks.start),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.processes),
        "GROUP_RANK": str(launch.node_rank),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # inside a torchrun, no rank would listen on this port
        SUPERVISED: "1",
    }
    return environment


def _first_of_rank() -> Callable[[], None]:
    """Return a function that gives a new rank its own process group and ends it if the launcher is killed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def first() -> None:
        os.setpgid(0, 0)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the launcher ended before prctl took effect
                os._exit(EXIT_ERROR)

    return first


def _forward_lines(worker: Worker) -> None:
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        text = line.decode(errors="replace").removesuffix("\n")
        sys.stdout.write(f"[rank{worker.rank}]: {text}\n")
        sys.stdout.flush()


def _start(command: Sequence[str], launch: Launch, port: int, logs: Path) -> list[Worker]:
    """Start the ranks of this node, each in its own process group.

    Ctrl-C therefore reaches them once, through the launcher. A single shown rank owns the terminal, because a
    progress bar needs one; several shown ranks share it line by line. All others write to a file in ``logs``.
    """
    first = _first_of_rank()

    def popen(rank: int, output: IO[bytes] | int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=_environment(launch, rank, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=first,  # safe with other threads: it takes no lock
        )

    workers: list[Worker] = []
    alone = len(launch.shown.intersection(launch.ranks)) == 1
    for rank in launch.ranks:
        if rank in launch.shown:
            workers.append(Worker(rank, popen(rank, None if alone else subprocess.PIPE)))
        else:
            log = logs / f"rank{rank}.log"
            with log.open("wb") as file:
                workers.append(Worker(rank, popen(rank, file), log))
    for worker in workers:
        if worker.process.stdout is not None:
            worker.pump = threading.Thread(target=_forward_lines, args=(worker,), daemon=True)
            worker.pump.start()
    return workers


# --- watching ranks


@contextmanager
def signals() -> Iterator[SimpleQueue[Any]]:
    """Yield a queue of arriving signals, in order, including SIGCHLD, so that a rank's end interrupts a wait.

    Signals arrive through a socket, because a signal delivered to another thread does not wake the main
    thread, which alone runs handlers.
    """
    arrived: SimpleQueue[Any] = SimpleQueue()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def pass_on() -> None:
        while signum := reader.recv(1):
            arrived.put(signum[0])

    passing = threading.Thread(target=pass_on, daemon=True)
    passing.start()
    watched = (*asking(), signal.SIGCHLD)
    woken = signal.set_wakeup_fd(writer.fileno())
    before = {signum: signal.signal(signum, lambda *_: None) for signum in watched}
    try:
        yield arrived
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(woken)
        writer.close()
        passing.join()
        reader.close()


def say(message: str) -> None:
    """Print one line of the launcher itself to stderr."""
    print(f"launch: {printable(message)}", file=sys.stderr, flush=True)


@dataclass
class Watch:
    """Waits for the ranks, and decides which signals they get and when."""

    launch: Launch
    running: list[Worker]
    ended: list[Worker] = field(default_factory=list)  # in the order in which they ended
    stopped_by: int = 0  # the signal that was forwarded
    stopped_at: float = 0.0
    failed: bool = False
    ended_by_us: dict[int, str] = field(default_factory=dict)  # by rank: what is known about it
    plan: list[tuple[float, signal.Signals]] = field(default_factory=list)  # (time, signal), soonest first

    def run(self, arrived: SimpleQueue[Any]) -> None:
        while True:
            self._collect()
            if not self.running:
                return
            wait = max(0.0, self.plan[0][0] - time.monotonic()) if self.plan else None
            try:
                self._arrived(arrived.get(timeout=wait))
            except Empty:
                self._end_peers(self.plan.pop(0)[1])

    def _collect(self) -> None:
        for worker in [worker for worker in self.running if worker.process.poll() is not None]:
            self.running.remove(worker)
            self.ended.append(worker)
            if not self.failed and worker.process.returncode not in ENDED_WELL:
                self.failed = True
                ask = time.monotonic() + self.launch.peer_grace
                self.plan = [(ask, QUESTION), (ask + self.launch.kill_grace, signal.SIGKILL)]

    def _arrived(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            return
        if self.stopped_by:
            # A scheduler may repeat a signal, or send SIGUSR1, then SIGTERM; only a user sends a late SIGINT.
            if signum == signal.SIGINT and time.monotonic() > self.stopped_at + self.launch.insist_after:
                self._end_peers(signal.SIGKILL)
            return
        self.stopped_by, self.stopped_at = signum, time.monotonic()
        patience = self.launch.shutdown_timeout
        say(
            f"{signal.Signals(signum).name}: the ranks save and stop, in at most {patience:.0f} s"
            f" (Ctrl-C after {self.launch.insist_after:g} s ends them at once, unsaved)"
        )
        ask = time.monotonic() + patience
        kill = ask + self.launch.kill_grace
        # With several ranks, the one that the others wait for must be named; a single rank does not answer.
        question = [(ask, QUESTION)] if self.launch.world_size > 1 else []
        self.plan = self.plan or [*question, (kill if question else ask, signal.SIGKILL)]
        for worker in self.running:
            worker.process.send_signal(signum)

    @property
    def stopped_early(self) -> bool:
        """Return whether the stop signal itself ended a rank that was not yet ready to save on a signal."""
        failed = [worker for worker in self.ended if worker.process.returncode not in ENDED_WELL]
        return bool(self.stopped_by and failed) and failed[0].process.returncode == -self.stopped_by

    def _end_peers(self, what: signal.Signals) -> None:
        """Send ``what`` to the ranks that still run; a rank stopped by SIGSTOP would not answer."""
        stopped = [worker for worker in self.running if _is_stopped(worker.process.pid)]
        asked = [worker for worker in self.running if worker not in stopped] if what == QUESTION else []
        if asked:
            say(f"{_ranks(asked)} still running: asked where")
        killed = [worker for worker in self.running if worker not in asked]
        if killed:
            say(f"SIGKILL to {_ranks(killed)}, still running")
        for worker in self.running:
            known = "is stopped (SIGSTOP or a debugger)" if worker in stopped else "does not answer"
            self.ended_by_us[worker.rank] = known
            worker.process.send_signal(QUESTION if worker in asked else signal.SIGKILL)


def _ranks(workers: Sequence[Worker]) -> str:
    return f"rank {', '.join(str(worker.rank) for worker in workers)}"


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # not Linux
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def exit_code(codes: Sequence[int]) -> int:
    """Return the launch's exit code for the ranks' ``codes``, in the order in which they ended.

    A rank that reports a user's mistake (2, 3) takes precedence over peers that merely lost it; otherwise the
    first failure counts, a signal as 1; then 75; then 0.
    """
    failures = [code for code in codes if code not in ENDED_WELL]
    named = [code for code in failures if code in (EXIT_CONFIG, EXIT_DATA)]
    if failures:
        return max((named or failures)[0], 0) or EXIT_ERROR
    return EXIT_REQUEUE if EXIT_REQUEUE in codes else EXIT_FINISHED


def code_of(watch: Watch) -> int:
    """Return the launch's exit code after the ranks have ended."""
    if watch.stopped_early:
        return EXIT_REQUEUE
    return exit_code([worker.process.returncode for worker in watch.ended])


def run_ranks(
    watch: Watch, command: Sequence[str], reports: Path | None, logs: Path, arrived: SimpleQueue[Any]
) -> None:
    """Run ``command`` once per rank under ``watch``, until all ranks have ended.

    Ranks that lose their peers write reports whose paths begin with ``reports``; ranks that are not shown
    write to files in ``logs``.
    """
    if reports:
        from toolkit.launcher import fault_reports

        for rank in watch.launch.ranks:
            fault_reports.forget(reports, rank)
    with _reserved_port(watch.launch) as port:
        workers = _start(command, watch.launch, port, logs)
        watch.running += workers
        watch.run(arrived)
    for worker in workers:
        if worker.process.returncode not in ENDED_WELL:
            with suppress(ProcessLookupError, PermissionError):  # processes that the rank had started
                os.killpg(worker.process.pid, signal.SIGKILL)
        if worker.pump:
            worker.pump.join(timeout=5)
    if watch.stopped_early:
        say("stopped outside training, with nothing to save; the same command resumes")
