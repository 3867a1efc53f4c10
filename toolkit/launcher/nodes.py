"""One of several nodes: it joins the rendezvous on node 0, starts its ranks on request and reports how they
ended. `toolkit.launcher.rendezvous` decides what happens next."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import SIGCHLD, SIGINT, SIGKILL, SIGUSR1, Signals

import toolkit
from toolkit.errors import EXIT_ERROR, EXIT_REQUEUE, ToolkitError
from toolkit.launcher import fault_reports, supervisor
from toolkit.launcher.environment import QUESTION, environment_error
from toolkit.launcher.failure import any_failed_by_itself, first_failure
from toolkit.launcher.node_link import Link, Message, interface_of
from toolkit.launcher.node_terms import Terms
from toolkit.launcher.rendezvous import FAREWELL_SECONDS, TELL_EVERY, Fits, Rendezvous
from toolkit.launcher.signals import Stopped, stop_at_once
from toolkit.launcher.supervisor import Launch, Watch, say

INTERFACE = "GLOO_SOCKET_IFNAME"
RETRY_SECONDS = 0.5
LEAVING_SECONDS = 3.0
COMMITTING_SECONDS = 2.0
"""When a node is lost, time to commit a save that all ranks have written."""


def versions() -> dict[str, object]:
    """Return the versions that must be equal on all nodes."""
    code = hashlib.sha256()
    folder = Path(toolkit.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {
        "toolkit": f"{toolkit.__version__}, files {code.hexdigest()[:12]}",
        "torch": torch,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


@dataclass
class NodeWatch(Watch):
    """Watches the ranks of this node, and receives messages about the other nodes."""

    link: Link | None = None
    asked: int = 0  # the first signal sent to this launcher
    over: Message | None = None  # the message with which node 0 ended the round, or the loss of node 0

    def _collect(self) -> None:
        known = self.failed
        super()._collect()
        if self.failed and not known and self.link:
            self.link.send("failed")

    def _arrived(self, event: int | Message) -> None:
        if isinstance(event, int):
            if event != SIGCHLD:
                self.asked = self.asked or event
            super()._arrived(event)
            return
        if event.get("link") is not self.link:
            return
        now = time.monotonic()
        if event["kind"] == "pause" and not self.stopped_by:
            say(str(event["text"]))
            super()._arrived(SIGUSR1)
        elif event["kind"] == "stop" and event["grace"] and not self.failed:
            self.failed = True
            ask = now + self.launch.peer_grace
            self.plan = [(ask, QUESTION), (ask + self.launch.kill_grace, SIGKILL)]
        elif event["kind"] in ("lost", "exit") or (event["kind"] == "stop" and not event["grace"]):
            self.failed = True
            self.over = self.over or (event if event["kind"] != "stop" else None)
            self.plan = [(now + COMMITTING_SECONDS, SIGKILL)]


@dataclass
class Member:
    """This node's part in the run of ``launch``; ``command`` starts a rank.

    ``prepare`` runs before the first round, once the configuration is known to be equal on all nodes.
    """

    command: Sequence[str]
    launch: Launch
    terms: Terms
    facts: Mapping[str, object]
    prepare: Callable[[], None]
    reports: Path | None
    arrived: SimpleQueue[int | Message] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.host = socket.gethostname()
        self.prepared = False
        self._said: str | None = None  # description of a failure on this node
        self._shown = ""  # its part that this launcher, not the rank itself, has printed

    def take_part(self, address: str, port: int) -> int:
        """Join the rendezvous at ``address``, and rejoin if node 0 is lost and restarts are allowed. Returns
        the exit code.

        Raises:
            ToolkitError: ``prepare`` failed.
        """
        self.address, self.port = address, port
        while True:
            link = self._connect()
            if isinstance(link, int):
                return link
            try:
                code, why = self._attend(link)
            finally:
                link.finish(FAREWELL_SECONDS)
                link.close()
            if code is not None:
                return code
            say(f"node 0 ({address}) is lost: {why}")
            if not self.terms.restarts:
                return EXIT_ERROR

    # Joining

    def _connect(self) -> Link | int:
        """Connect to node 0; return the exit code if that fails."""
        start = told = time.monotonic()
        patience = self.terms.join_timeout
        while True:
            link = None
            try:
                link = Link(self._reach(), self.terms.node_timeout)
                link.send("hello", node=self.launch.node_rank, host=self.host, facts=self.facts)
                message = link.receive()
                if message["kind"] in ("welcome", "exit"):
                    return self._welcomed(link, message)
                why = "what listens there is no launcher"
            except (OSError, ValueError) as error:
                why = str(error)
            if link:
                link.close()
            where = f"node 0 does not answer at {self.address}:{self.port} ({why})"
            if time.monotonic() > start + patience:
                say(f"{where}, for {patience:.0f} s")
                return EXIT_ERROR
            if time.monotonic() > told + TELL_EVERY or told == start < time.monotonic() - 5:
                told = time.monotonic()
                say(f"{where}; waiting up to {patience:.0f} s")
            if (signum := self._signal(RETRY_SECONDS)) is not None:
                return self._left(None, signum)

    def _reach(self) -> socket.socket:
        """Open a connection to node 0. Node 0 itself first tries the public address, where a second node 0
        finds the first, then localhost: the public one may not resolve before all machines are up."""
        try:
            return socket.create_connection((self.address, self.port), timeout=5)
        except OSError:
            if self.launch.node_rank:
                raise
            return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def _welcomed(self, link: Link, message: Message) -> Link | int:
        if message["kind"] == "exit":
            return self._exit(message)
        link.set_timeout(float(message["node_timeout"]))
        threading.Thread(target=self._listen, args=(link,), name="node 0", daemon=True).start()
        return link

    def _listen(self, link: Link) -> None:
        try:
            while True:
                message = link.receive()
                if message["kind"] == "ping":
                    link.send("pong", sent=message["sent"], load=message["load"])
                else:
                    self.arrived.put(message | {"link": link})
        except (OSError, ValueError) as error:
            self.arrived.put({"kind": "lost", "why": str(error), "link": link})

    def _signal(self, seconds: float) -> int | None:
        """Return a signal that requests a stop if one arrives within ``seconds``, else None."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with suppress(Empty):
                event = self.arrived.get(timeout=left)
                if isinstance(event, int) and event != SIGCHLD:
                    return event
        return None

    # Participating

    def _attend(self, link: Link) -> tuple[int | None, str]:
        """Take part in rounds; return the exit code, or None and the reason if node 0 is lost."""
        if not self.prepared:
            try:
                with stop_at_once():
                    self.prepare()
            except ToolkitError as error:
                link.send("leave", code=error.exit_code, text=str(error))
                raise
            except Stopped as stopped:
                return self._left(link, Signals[stopped.name]), ""
            self.prepared = True
        link.send("ready")
        ended, held = False, 0  # held: a signal after the ranks here ended, while others may still save
        while True:
            event = self.arrived.get()
            if isinstance(event, int):
                if event == SIGCHLD:
                    continue
                if event == SIGINT or not ended:
                    return self._left(link, event, ended=ended), ""
                held = held or event
                continue
            if event["link"] is not link:
                continue
            if event["kind"] == "start":
                event, ended = self._round(link, event) or event, True
            if event["kind"] == "exit":
                return self._exit(event), ""
            if event["kind"] == "again" and event["text"]:
                say(str(event["text"]).removeprefix(self._shown))
            if event["kind"] in ("again", "lost") and held:
                return self._left(link, held), ""
            if event["kind"] == "again":
                ended = False
                link.send("ready")
            elif event["kind"] == "lost":
                return None, str(event["why"])

    def _exit(self, message: Message) -> int:
        if message["text"] and message["text"] != self._said:
            say(str(message["text"]))
        return int(message["code"])

    def _left(self, link: Link | None, signum: int, *, ended: bool = False) -> int:
        name, when = Signals(signum).name, "before all nodes ended" if ended else "before the ranks started"
        if link:
            link.send("leave", code=EXIT_REQUEUE, text=f"stopped by {name} {when}")
        say(f"{name}: stopped {when}; the same command starts again")
        return EXIT_REQUEUE

    def _round(self, link: Link, message: Message) -> Message | None:
        """Run the ranks of a round and report how they ended. Returns the message that ended the round, from
        node 0 or about its loss, if any."""
        launch = replace(
            self.launch, nodes=message["nodes"], node_rank=message["place"], master_port=message["port"]
        )
        interface = interface_of(message["own_address"] or link.own_address)
        if interface and not os.environ.get(INTERFACE):
            launch = replace(launch, environment={INTERFACE: interface})
        logs = Path(tempfile.mkdtemp(prefix="toolkit-logs-"))
        watch = NodeWatch(launch, [], link=link)
        command = [*self.command, *message["flags"]]
        supervisor.run_ranks(watch, command, self.reports, logs, self.arrived)
        code, own = supervisor.code_of(watch), None
        if watch.failed and code != EXIT_REQUEUE:
            reports = fault_reports.gather(self.reports, launch.world_size) if self.reports else {}
            if any_failed_by_itself(watch, reports):
                own = first_failure(watch, code, reports)
        if own:
            own.show()
        else:
            shutil.rmtree(logs, ignore_errors=True)
        said = self._said = own.text if own else None
        self._shown = f"{own.text}\n" if own and not own.told else ""
        signum = Signals(watch.asked).name if watch.asked else ""
        link.send("ended", code=code, own=said, signal=signum, known=watch.ended_by_us)
        return watch.over


def stay_away(node_rank: int, address: str, port: int, error: ToolkitError) -> None:
    """Report ``error`` of this node to node 0 at ``address``, if node 0 is reachable within a few seconds."""
    end = time.monotonic() + LEAVING_SECONDS
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((address, port), timeout=LEAVING_SECONDS)
        except (OSError, ValueError):
            time.sleep(RETRY_SECONDS)
            continue
        link = Link(connection, LEAVING_SECONDS)
        said = {"node": node_rank, "host": socket.gethostname()}
        link.send("leave", **said, code=error.exit_code, text=str(error))
        link.finish(LEAVING_SECONDS)
        link.close()
        return


def supervise_nodes(
    command: Sequence[str],
    launch: Launch,
    terms: Terms,
    config: Mapping[str, object],
    prepare: Callable[[], None],
    reports: Path | None,
    fits: Fits,
    saved_step: Callable[[], int],
    hung: Callable[[int, Mapping[int, str]], str],
) -> int:
    """Run ``command`` once per rank of this node, as directed by node 0; return the exit code.

    Raises:
        ConfigError: node 0 cannot listen on its port.
        ToolkitError: ``prepare`` failed.
    """
    asked = {"NNODES": terms.asked, "NGPU": launch.processes}
    facts = {**versions(), **asked, **config}
    rendezvous, port = None, launch.master_port
    with supervisor.signals() as arrived:
        if launch.node_rank == 0:
            rendezvous = Rendezvous(terms, facts, fits, saved_step, hung)
            try:
                port = rendezvous.listen(port)
            except OSError as error:
                rule = f"node 0 cannot listen there: {error.strerror}"
                raise environment_error(
                    "MASTER_PORT", str(port), rule, "choose another on all nodes"
                ) from None
        member = Member(command, launch, terms, facts, prepare, reports, arrived)
        try:
            return member.take_part(launch.master_addr, port)
        finally:
            if rendezvous:
                rendezvous.close()
