"""Run one process a rank, pass signals on, and end with the code that the ranks ended with.

Needs no torch: ranks meet at MASTER_ADDR:MASTER_PORT, as with torchrun's static rendezvous.
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
    """Ranks to start on this node, and the address where all ranks meet. Times are in seconds.

    ``shown`` are the global ranks whose output reaches the terminal. After a signal the ranks have
    ``shutdown_timeout`` to save and end, unless a SIGINT comes ``insist_after`` later. Once a rank has
    failed, its peers have ``peer_grace`` to end by themselves before they are asked where they are, and
    ``kill_grace`` to answer and end before SIGKILL.
    """

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free port, for a single node
    shown: frozenset[int] = frozenset({0})
    shutdown_timeout: float = 600.0
    insist_after: float = INSISTING_SECONDS
    peer_grace: float = 5.0
    kill_grace: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Joins that of this process for the ranks."""

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


# --- starting the ranks


def bound(port: int) -> socket.socket:
    """A socket at ``port`` of all addresses, 0 for a free one, which does not listen."""
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
    """The port at which rank 0 will listen, free on this machine until it does.

    A bound socket that does not listen keeps the port from everyone but a listener that sets
    SO_REUSEADDR, as torch's TCPStore does: two runs that start together never choose the same one.
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
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # within a torchrun no rank would listen there
        SUPERVISED: "1",
    }
    return environment


def _first_of_rank() -> Callable[[], None]:
    """Give a new rank a process group of its own, and have it end with a launcher that is killed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def first() -> None:
        os.setpgid(0, 0)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before we asked
                os._exit(EXIT_ERROR)

    return first


def _forward_lines(worker: Worker) -> None:
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        text = line.decode(errors="replace").removesuffix("\n")
        sys.stdout.write(f"[rank{worker.rank}]: {text}\n")
        sys.stdout.flush()


def _start(command: Sequence[str], launch: Launch, port: int, logs: Path) -> list[Worker]:
    """Start the ranks of this node, each in a process group of its own.

    So Ctrl-C reaches them once, through the launcher. A single shown rank owns the terminal (a progress
    bar needs one); several share it line by line; the others write to a file in ``logs``.
    """
    first = _first_of_rank()

    def popen(rank: int, output: IO[bytes] | int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=_environment(launch, rank, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=first,  # safe beside other threads: it takes no lock
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


# --- watching them


@contextmanager
def signals() -> Iterator[SimpleQueue[Any]]:
    """Signals that arrive, in order; SIGCHLD among them, so that waiting ends when a rank does.

    They come by a socket: one that the system hands to another thread does not wake the main one, which alone
    runs handlers.
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
    """One line of the launcher itself, on stderr."""
    print(f"launch: {printable(message)}", file=sys.stderr, flush=True)


@dataclass
class Watch:
    """Waits for the ranks, and decides what they are sent and when."""

    launch: Launch
    running: list[Worker]
    ended: list[Worker] = field(default_factory=list)  # in the order in which they ended
    stopped_by: int = 0  # the signal that has been passed on
    stopped_at: float = 0.0
    failed: bool = False
    ended_by_us: dict[int, str] = field(default_factory=dict)  # ranks, and what is known of them
    plan: list[tuple[float, signal.Signals]] = field(default_factory=list)  # (when, what), soonest first

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
            # A scheduler may repeat itself, or send SIGUSR1, then SIGTERM: only a person insists.
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
        # Of several ranks the one that the others wait for is to be named; a single one does not listen.
        question = [(ask, QUESTION)] if self.launch.world_size > 1 else []
        self.plan = self.plan or [*question, (kill if question else ask, signal.SIGKILL)]
        for worker in self.running:
            worker.process.send_signal(signum)

    @property
    def stopped_early(self) -> bool:
        """The stop signal itself ended a rank, which had not come so far as to save when it gets one."""
        failed = [worker for worker in self.ended if worker.process.returncode not in ENDED_WELL]
        return bool(self.stopped_by and failed) and failed[0].process.returncode == -self.stopped_by

    def _end_peers(self, what: signal.Signals) -> None:
        """Send ``what`` to the ranks that still run; a stopped one would not see a question."""
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
    """The launch's code for the ranks' ``codes``, given in the order in which they ended.

    A rank that names the user's mistake (2, 3) outranks peers that merely lost it; otherwise the first
    failure counts, a signal as 1; then 75; then 0.
    """
    failures = [code for code in codes if code not in ENDED_WELL]
    named = [code for code in failures if code in (EXIT_CONFIG, EXIT_DATA)]
    if failures:
        return max((named or failures)[0], 0) or EXIT_ERROR
    return EXIT_REQUEUE if EXIT_REQUEUE in codes else EXIT_FINISHED


def code_of(watch: Watch) -> int:
    """The launch's code for ranks that have ended."""
    if watch.stopped_early:
        return EXIT_REQUEUE
    return exit_code([worker.process.returncode for worker in watch.ended])


def run_ranks(
    watch: Watch,
    command: Sequence[str],
    reports: Path | None,
    logs: Path,
    arrived: SimpleQueue[Any],
) -> None:
    """Run ``command`` once a rank that ``watch`` shall watch, until all have ended.

    Ranks that lose their peers leave reports whose names begin with ``reports``; those that are not shown
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
            with suppress(ProcessLookupError, PermissionError):  # what it had started itself
                os.killpg(worker.process.pid, signal.SIGKILL)
        if worker.pump:
            worker.pump.join(timeout=5)
    if watch.stopped_early:
        say("stopped outside training, with nothing to save; the same command resumes")
