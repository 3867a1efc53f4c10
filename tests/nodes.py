"""Several machines on one: namespaces of Linux with an address, a host name and processes of their own.

A :class:`Cluster` has nodes on one switch, a bridge in a network namespace that nobody else is in, so that
the machine's own network is untouched. What a node starts sees only the processes of that node, and a disk
that all share. A link can be cut or made slow, a node can lose its power and start again.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import children, runs
from toolkit.checkpoint.manifest import committed_steps

ROOT = Path(__file__).parents[1]
PORT = 29500
_numbers = itertools.count()


def why_not() -> str:
    """Why no nodes can be made here, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "makes network namespaces, which root on Linux may"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)}"
    name = f"toolkit-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else ""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    """Wait at most so long for ``condition``; says if it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Started:
    """A program on a node: what it writes goes to ``log``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self.process, self.log = process, log

    @property
    def pid(self) -> int:
        """Its number on this machine, not the one that it sees itself; 0 once it has ended."""
        return next(iter(children(self.process.pid)), 0)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        return children(self.pid)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid or self.process.pid, number)

    def wait(self, seconds: float) -> int:
        """Its exit code.

        Raises:
            AssertionError: it does not end in time.
        """
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended in {seconds:.0f} s:\n{self.text[-3000:]}") from None


class Node:
    """One machine of a cluster, ``number`` from 0; running from the start."""

    def __init__(self, cluster: Cluster, number: int):
        self.cluster, self.number = cluster, number
        self.name, self.address = f"{cluster.prefix}{number}", f"10.0.0.{number + 1}"
        self.host = f"host{number}"
        self.namespace, self.port = f"{cluster.name}-{number}", f"port{number}"
        self._starts = itertools.count()
        _do("ip", "netns", "add", self.namespace)
        switch = ("netns", cluster.namespace)
        _do(
            "ip", "-n", self.namespace, "link", "add", "eth0", "type", "veth",
            "peer", "name", self.port, *switch,
        )  # fmt: skip
        _do("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _do("ip", "-n", self.namespace, "link", "set", device, "up")
        _do("ip", "-n", cluster.namespace, "link", "set", self.port, "master", "switch", "up")
        self.power_on()

    def power_on(self) -> None:
        """Start the machine, with nothing on it but its first process."""
        hosts = self.cluster.folder / f"hosts{self.number}"
        # As Debian has it: a machine's own name is an address that nobody else can reach.
        own = [f"127.0.1.1 {self.host}"]
        others = [f"10.0.0.{n + 1} host{n}" for n in range(self.cluster.size) if n != self.number]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *own, *others]) + "\n")
        setup = f"hostname {self.host}; mount --bind {hosts} /etc/hosts; mount -t tmpfs tmpfs /dev/shm"
        self._machine = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--pid", "--mount", "--ipc", "--fork",
             "--mount-proc", "--kill-child", "sh", "-c", f"{setup}; echo up; exec sleep infinity"],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
            stderr=(self.cluster.folder / f"machine{self.number}.log").open("ab"),
        )  # fmt: skip
        assert self._machine.stdout and self._machine.stdout.readline() == b"up\n"
        [self._first] = children(self._machine.pid)
        self._space = os.readlink(f"/proc/{self._first}/ns/pid")
        self.mend()

    def power_off(self) -> None:
        """Take everything away at once: nobody hears a good-bye."""
        self.cut()
        self._stop()

    def restart(self) -> None:
        """Have it as it was at first, with nothing running."""
        if self.processes() or not runs(self._first):
            self._stop()
            self.power_on()
        self.mend()

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        self._machine.wait()
        assert self._machine.stdout
        self._machine.stdout.close()
        assert eventually(lambda: not self.processes(), 20)

    def cut(self) -> None:
        _do("ip", "-n", self.cluster.namespace, "link", "set", self.port, "down")

    def mend(self) -> None:
        _do("ip", "-n", self.cluster.namespace, "link", "set", self.port, "up")

    def slow(self, bits_a_second: str) -> None:
        """Let what the node gets and sends wait in queues, as on a bad link."""
        shape = ("tbf", "rate", bits_a_second, "burst", "10kb", "limit", "4mb")
        _do("tc", "-n", self.cluster.namespace, "qdisc", "replace", "dev", self.port, "root", *shape)
        _do("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *shape)

    def fast(self) -> None:
        for namespace, device in ((self.cluster.namespace, self.port), (self.namespace, "eth0")):
            _do("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")

    def processes(self) -> list[int]:
        """All that run on the node, but its first one."""
        found = []
        for pid in _processes():
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == self._space and pid != self._first and runs(pid):
                    found.append(pid)
        return found

    def start(self, *command: str, **environment: str) -> Started:
        """Start a program; its environment is this process's and what is given."""
        log = self.cluster.folder / f"node{self.number}-{next(self._starts)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["nsenter", "--target", str(self._first), "--net", "--uts", "--pid", "--mount", "--ipc",
                 f"--wd={ROOT}", *command],
                env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        return Started(process, log)

    def launch(self, *arguments: str, **environment: str) -> Started:
        """Give this node the command of a user, with one rank unless the environment says more."""
        said = {"NNODES": str(self.cluster.size), "NODE_RANK": str(self.number), "NGPU": "1"}
        said |= {"MASTER_ADDR": self.cluster.nodes[0].host if self.cluster.nodes else self.host}
        said |= {"MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return self.start(str(ROOT / "run_train.sh"), *arguments, **said | {"SAMPLE": ""} | environment)

    def remove(self) -> None:
        self._stop()
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


class Cluster:
    """``size`` nodes that reach one another; ``folder`` is where their logs go."""

    def __init__(self, size: int, folder: Path):
        self.size, self.folder = size, folder
        self.name = self.prefix = f"toolkit-{os.getpid()}-{next(_numbers)}"
        self.namespace = f"{self.name}-switch"
        self.nodes: list[Node] = []
        folder.mkdir(parents=True, exist_ok=True)
        _do("ip", "netns", "add", self.namespace)
        _do("ip", "-n", self.namespace, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", self.namespace, "link", "set", "switch", "up")
        for number in range(size):
            self.nodes.append(Node(self, number))

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


@contextmanager
def cluster(size: int, folder: Path) -> Iterator[Cluster]:
    made = Cluster(size, folder)
    try:
        yield made
    finally:
        made.remove()


def losses(folder: Path) -> dict[int, float]:
    """Loss of each step that a run has logged, the last time that it did."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def newest(folder: Path) -> int:
    """The last step that a run has saved, 0 without one."""
    return max(committed_steps(folder / "checkpoint"), default=0)


TINY: Sequence[str] = (
    "--job.config_file=train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=2",
    "--model.ffn_dim=160", "--training.seq_len=64", "--training.global_batch_size=12",
    "--training.dataset=embedded_validation", "--training.mixed_precision_param=float32",
    "--lr_scheduler.warmup_steps=2", "--validation.enable=false", "--metrics.log_freq=1",
    "--metrics.enable_tensorboard=false", "--checkpoint.keep_latest_k=3",
)  # fmt: skip
"""A run whose steps take a tenth of a second, with a batch that 1, 2, 3, 4 and 6 ranks can share."""
