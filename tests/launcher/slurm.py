"""A Slurm of several nodes on one machine: munged, slurmctld and a slurmd a node, in namespaces of their own.

The daemons see a network, host names (/etc/hosts), processes and mounts that nothing else sees; all of them
end with the first. Every node has an address, and is said to have the cores and GPUs
that ``tools/slurm/train.sbatch`` asks for. Needs root and Debian's packages: ``INSTALL``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=node0
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdTimeout=10
KillWait=10
GresTypes=gpu
"""


def missing() -> str:
    """Say why there can be no Slurm here; empty where there can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    return f"needs {', '.join(lacking)}: {INSTALL}" if lacking else ""


def _address(number: int) -> str:
    return f"10.77.0.{1 + number}"


class Slurm:
    """``folder`` holds configuration, state and logs; ``nodes`` are called node0, node1, …"""

    def __init__(self, folder: Path, nodes: int):
        self.folder = folder
        self.names = [f"node{number}" for number in range(nodes)]
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._write()
        loopback = "ip link set lo up"
        network = "ip link add name slurm0 type veth peer name slurm1 && ip link set slurm0 up"
        addresses = [f"ip address add {_address(number)}/24 dev slurm0" for number in range(nodes)]
        names = f"hostname {self.names[0]} && mount --bind hosts /etc/hosts"
        waits = " && ".join([loopback, network, *addresses, names, "echo ready", "exec sleep infinity"])
        command = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen(
            [*command, "bash", "-c", waits], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._first.stdout is not None and self._first.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self._inside = children.split()[0]

    def _write(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (self.folder / name).mkdir()
        lines = [
            f"NodeName={name} NodeAddr={_address(number)} Port={17000 + number} CPUs=64 RealMemory=4000"
            " Gres=gpu:8 State=UNKNOWN\n"
            for number, name in enumerate(self.names)
        ]
        partition = f"PartitionName=all Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE State=UP\n"
        text = _CONFIGURATION.format(folder=self.folder) + "".join(lines) + partition
        (self.folder / "slurm.conf").write_text(text)
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        hosts = [f"{_address(number)} {name}\n" for number, name in enumerate(self.names)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def run(self, *command: str, folder: Path | None = None, variables: Mapping[str, str] = {}) -> str:  # noqa: B006
        """Run a command inside, in ``folder``, and return what it printed.

        Raises:
            AssertionError: it did not end with 0.
        """
        enter = ["nsenter", "-t", self._inside, "-m", "-n", "-u", "-p", f"--wd={folder or self.folder}"]
        environment = self._environment | dict(variables)
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return str(done.stdout)

    def start(self) -> None:
        """Start the daemons and wait until every node can be used."""
        folder = self.folder
        munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key", "--force"]
        munge += [
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        ]
        self.run("munged", *munge)
        self.run("slurmctld")
        for name in self.names:
            self.start_node(name)
        idle = ["sh", "-c", "sinfo -h -t idle -o %D || true"]  # the controller may not listen yet
        self.wait(lambda: self.run(*idle).strip() == str(len(self.names)), 60)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, which goes on in the background."""
        self.run("slurmd", "-N", name)

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node's slurmd and to all that it has started."""
        for pid in self._processes_of(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes_of(self, name: str) -> list[int]:
        """The node's slurmd, its step daemons, and what has its SLURMD_NODENAME; numbers as out here."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if not folder.name.isdigit() or os.readlink(folder / "ns/net") != self._network():
                    continue
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
                is_daemon = words[:3] == [b"slurmd", b"-N", name.encode()]
                if is_daemon or f"SLURMD_NODENAME={name}".encode() in variables:
                    found.append(int(folder.name))
        return found

    def _network(self) -> str:
        return os.readlink(f"/proc/{self._inside}/ns/net")

    def submit(self, *arguments: str, **variables: str) -> int:
        """Run sbatch in the repository with ``arguments`` and return the job's number."""
        root = Path(__file__).parents[2]
        printed = self.run("sbatch", "--parsable", *arguments, folder=root, variables=variables)
        return int(printed.split(";")[0])

    def state(self, job: int) -> str:
        """The states of a job, or of an array's tasks, as squeue and scontrol call them."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        states = [word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")]
        return ",".join(sorted(set(states)))

    def restarts(self, job: int) -> int:
        """How often Slurm has queued the job again."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return next(int(word.partition("=")[2]) for word in shown if word.startswith("Restarts="))

    @staticmethod
    def wait(holds: Callable[[], bool], seconds: float) -> None:
        """Wait until ``holds()``.

        Raises:
            AssertionError: it did not hold in so many seconds.
        """
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not so after {seconds} s"
            time.sleep(0.5)

    def stop(self) -> None:
        self._first.kill()
        self._first.wait()


@contextmanager
def slurm(folder: Path, nodes: int = 2) -> Iterator[Slurm]:
    """A Slurm of so many nodes, which ends with the block, and all its jobs with it."""
    cluster = Slurm(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
