"""The rendezvous of several nodes on node 0: membership, start of rounds, and reaction to failures.

Node 0's launcher listens at MASTER_ADDR:MASTER_PORT. The launchers of all nodes, including its own, connect,
identify themselves and prepare. The launchers are then asked to start a round: the life of one set of ranks.
A round ends when its ranks end, when a rank fails, or when a node is lost because its launcher ended or was
silent for too long. Then every node ends its ranks and reports how they ended. Every node is then asked
either to exit, with the same code everywhere, or to join the next round.

All of this runs in one thread, which reads all connections from one queue, so no locks are needed.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR, EXIT_FINISHED, EXIT_REQUEUE, first_few, quote
from toolkit.launcher.node_link import Link, Message
from toolkit.launcher.node_terms import Terms
from toolkit.launcher.supervisor import bound, exit_code, say

SHOWN = 8
TELL_EVERY = 30.0  # seconds
LOAD_BYTES = 1 << 18
"""Size of the load sent to a node and back from time to time. A short message does not reveal a slow link,
because the kernel limits how much it queues ahead per connection."""
SLOW_SECONDS = 1.0
"""Round-trip time of the load at 4 Mbit/s; two longer round trips in a row are reported."""
FAREWELL_SECONDS = 5.0
FINAL = (EXIT_CONFIG, EXIT_DATA)  # codes of mistakes that a restart would repeat


@dataclass
class Node:
    """A launcher that has joined. ``place`` in messages is its node rank in the round; ``outcome`` describes
    how its ranks ended, and contains as ``own`` the rank that failed on its own."""

    number: int
    host: str
    link: Link
    ready: bool = False
    playing: bool = False
    outcome: Message | None = None
    loaded: bool = False
    next_load: float = 0.0
    slow: int = 0
    told_slow: float = -math.inf

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


Fits = Callable[[int], "Sequence[str] | None"]
"""Function from a number of nodes to the flags of the ranks' mesh; None if no mesh is allowed."""


@dataclass
class Rendezvous:
    """The rendezvous on node 0. All nodes must have the same ``facts``."""

    terms: Terms
    facts: Mapping[str, object]
    fits: Fits
    saved_step: Callable[[], int]
    hung: Callable[[int, Mapping[int, str]], str]
    """Function that describes who is at fault if no rank failed on its own, given the number of nodes in the
    round and what is known about ranks."""
    nodes: dict[int, Node] = field(default_factory=dict)
    events: SimpleQueue[tuple[Link, Message]] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self._awaited = True  # node 0 has not joined yet
        self._given_up = False  # node 0 will not join
        self._said: dict[str, object] = {}  # final message to all, once the run is over
        self._strangers: list[Link] = []
        self._phase = "gathering"  # then "running", "ending" and "over"
        self._began = self._told = time.monotonic()
        self._enough_since: float | None = None
        self._end_by = math.inf
        self._round = 0
        self._size = 0  # number of nodes in the round
        self._lost: list[str] = []
        self._paused = False
        self._failures, self._newest = 0, -1
        self._own_address = ""
        self._store: socket.socket | None = None
        self._next_ping = 0.0

    # Connections

    def listen(self, port: int) -> int:
        """Start to listen on ``port``, or on a free port if it is 0; return the port.

        Raises:
            OSError: the port is not available.
        """
        listener = bound(port)
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), name="rendezvous door", daemon=True).start()
        self.thread = threading.Thread(target=self._run, args=(listener,), name="rendezvous", daemon=True)
        self.thread.start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Wait until all nodes have read their last messages; return at once if node 0 never joined."""
        self._given_up = self._awaited
        self.thread.join(timeout=2 * FAREWELL_SECONDS)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is closed at the end
            while True:
                link = Link(listener.accept()[0], self.terms.node_timeout)
                threading.Thread(target=self._read, args=(link,), name="rendezvous node", daemon=True).start()

    def _read(self, link: Link) -> None:
        try:
            while True:
                self.events.put((link, link.receive()))
        except (OSError, ValueError) as error:
            self.events.put((link, {"kind": "lost", "why": str(error)}))

    def _run(self, listener: socket.socket) -> None:
        try:
            # Node 0 may be the last to learn that the run is over.
            while not self._given_up and (self._phase != "over" or self._awaited):
                self._ping()
                with suppress(Empty):
                    self._take(*self.events.get(timeout=0.2))
                self._consider()
            self._part()
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which wakes who waits there
            listener.close()
            if self._store:
                self._store.close()
            for link in [node.link for node in self.nodes.values()] + self._strangers:
                link.close()

    def _part(self) -> None:
        """Give all nodes time to read their last messages."""
        waiting = [node.link for node in self.nodes.values()] + self._strangers
        for link in waiting:
            link.finish()
        end = time.monotonic() + FAREWELL_SECONDS
        while waiting and time.monotonic() < end:
            with suppress(Empty):
                link, message = self.events.get(timeout=0.1)
                if message["kind"] == "lost" and link in waiting:
                    waiting.remove(link)

    def _ping(self) -> None:
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + self.terms.node_timeout / 10
            for node in self.nodes.values():
                loaded = not node.loaded and now >= node.next_load
                if loaded:
                    node.loaded, node.next_load = True, now + self.terms.node_timeout / 2
                node.link.send("ping", sent=now, load="0" * LOAD_BYTES if loaded else "")

    def _send(self, nodes: Iterable[Node], kind: str, **values: object) -> None:
        for node in nodes:
            node.link.send(kind, **values)

    def _of(self, link: Link) -> Node | None:
        return next((node for node in self.nodes.values() if node.link is link), None)

    # Messages from nodes

    def _take(self, link: Link, message: Message) -> None:
        node, kind = self._of(link), message["kind"]
        try:
            if node is None:
                if kind == "hello":
                    self._hello(link, message)
                elif kind == "leave":
                    self._gone(Node(int(message["node"]), str(message["host"]), link), message)
                else:  # a node that has not joined, or was rejected
                    link.close()
            elif kind in ("lost", "leave"):
                self._gone(node, message)
            elif kind == "ready":
                node.ready = True
            elif kind == "pong":
                if message["load"]:
                    node.loaded = False
                    self._time(node, time.monotonic() - float(message["sent"]))
            elif kind == "failed" and node.playing:
                self._end_round(grace=True)
            elif kind == "ended" and node.playing:
                node.outcome = {"code": EXIT_ERROR, "own": None, "signal": "", "known": {}, **message}
        except (KeyError, TypeError, ValueError) as error:
            say(f"{node or link.address} says what no launcher does ({type(error).__name__}: {error})")
            link.close()

    def _hello(self, link: Link, message: Message) -> None:
        number, host, facts = int(message["node"]), str(message["host"]), dict(message["facts"])
        node = Node(number, host, link)
        old = self.nodes.get(number)
        if old and old.host == host:  # it rejoined before its loss was noticed
            self._gone(old, {"kind": "lost", "why": "another launcher has come from there"})
            old = None
        self._awaited = self._awaited and number != 0
        if self._phase == "over":
            self._turn_away(link, **self._said)
            return
        problem = ""
        if not 0 <= number < self.terms.most:
            problem = f"{node} is none of NNODES = {self.terms.most}: NODE_RANK is below it"
        elif old:
            problem = f"NODE_RANK = {number} is that of {old.host} and of {host}: each node has its own"
        elif apart := _apart(facts, self.facts):
            problem = f"{node} is unlike node 0 ({self.nodes[0].host if 0 in self.nodes else 'here'}):\n"
            problem += "\n".join(f"  {line}" for line in apart)
        if problem:
            say(problem)
            self._turn_away(link, code=EXIT_CONFIG, text=problem)
            if not self.terms.elastic and self._phase == "gathering" and self._round == 0:
                self._exit(EXIT_CONFIG, problem)
            return
        self.nodes[number] = node
        if number:
            self._own_address = link.own_address
        link.send("welcome", node_timeout=self.terms.node_timeout)
        if self.terms.most > 1:
            say(f"{node} is here")

    def _turn_away(self, link: Link, **said: object) -> None:
        link.send("exit", **said)
        link.finish()
        self._strangers.append(link)

    def _gone(self, node: Node, message: Message) -> None:
        if self.nodes.get(node.number) is node:
            del self.nodes[node.number]
        node.link.close()
        if message["kind"] == "leave":
            code, why = int(message["code"]), str(message["text"])
            needed = node.number == 0 or (code in FINAL and not self.terms.elastic)
            if needed and (node.playing or self._phase != "running"):  # a running one needs no other launcher
                self._exit(code, f"{node}: {why}")
                return
        else:
            why = f"it is lost: {message['why']}"
        if self._phase == "over":  # the node has been told to exit
            return
        say(f"{node}: {why}")
        if node.playing and node.outcome is None:
            self._lost.append(f"{node} is lost: {message.get('why', why)}")
            self._end_round(grace=False)

    def _time(self, node: Node, seconds: float) -> None:
        """Report a node with a slow link, at intervals."""
        node.slow = node.slow + 1 if seconds > SLOW_SECONDS else 0
        now = time.monotonic()
        if node.slow >= 2 and now > node.told_slow + 2 * TELL_EVERY:
            node.told_slow = now
            rate = 2 * 8 * LOAD_BYTES / seconds / 1e6
            say(f"{node} is slow: {rate:.1f} Mbit/s through its link, or the machine has no time to answer")

    # Decisions

    def _consider(self) -> None:
        if self._phase == "gathering":
            self._start_or_wait()
        elif self._phase in ("running", "ending"):
            playing = [node for node in self.nodes.values() if node.playing]
            silent = [node for node in playing if node.outcome is None]
            if not silent:
                self._decide()
            elif time.monotonic() > self._end_by:
                for node in silent:
                    self._gone(node, {"kind": "lost", "why": "its launcher does not end the ranks"})
            elif self._phase == "running" and not self._paused:
                self._grow()

    def _most_that_fit(self, count: int) -> int:
        """Return the largest number of nodes, up to ``count``, that can train; 0 if there is none."""
        sizes = range(count, self.terms.least - 1, -1)
        return next((size for size in sizes if self.fits(size) is not None), 0)

    def _start_or_wait(self) -> None:
        now, terms = time.monotonic(), self.terms
        ready = sorted(number for number, node in self.nodes.items() if node.ready)
        preparing = len(self.nodes) > len(ready)
        absent = [f"node {number}" for number in range(terms.most) if number not in self.nodes]
        if len(ready) == terms.most:
            self._start(ready[: self._most_that_fit(terms.most)])
            return
        fitting = self._most_that_fit(len(ready)) if 0 in ready else 0
        if not fitting:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
            if absent:
                rest = first_few(absent, SHOWN)
                say(f"{fitting} nodes can train; {rest} may come in {terms.last_call:.0f} s")
        if self._enough_since is not None and now >= self._enough_since + terms.last_call and not preparing:
            self._start(ready[:fitting])
            return
        if now > self._began + terms.join_timeout and not preparing and not fitting:
            here = first_few([str(self.nodes[number]) for number in sorted(self.nodes)], SHOWN)
            said = f"{first_few(absent, SHOWN)} of NNODES = {terms.asked} did not come"
            said += f" in {terms.join_timeout:.0f} s; here: {here}"
            self._exit(EXIT_ERROR, said)
        elif now > self._told + TELL_EVERY:
            self._told = now
            if absent:
                say(f"waiting for {first_few(absent, SHOWN)} of NNODES = {terms.asked}")

    def _start(self, numbers: Sequence[int]) -> None:
        self._round += 1
        self._phase, self._size = "running", len(numbers)
        self._lost, self._paused, self._end_by = [], False, math.inf
        flags = self.fits(len(numbers))
        if self._store:
            self._store.close()
        self._store = bound(0)  # bound but not listening: it reserves the port for rank 0's store
        chosen = [self.nodes[number] for number in numbers]
        if self.terms.most > 1:
            begin = "starting" if self._round == 1 else f"start {self._round}:"
            aside = [str(node) for node in self.nodes.values() if node not in chosen]
            rest = f"; {first_few(aside, SHOWN)} stand by: no mesh is allowed for more" if aside else ""
            say(f"{begin} {first_few([str(node) for node in chosen], SHOWN)}{rest}")
        for place, node in enumerate(chosen):
            node.playing, node.ready, node.outcome = True, False, None
            address = self._own_address if node.number == 0 else ""
            node.link.send(
                "start",
                place=place,
                nodes=len(chosen),
                port=self._store.getsockname()[1],
                flags=list(flags or ()),
                own_address=address,
            )

    def _grow(self) -> None:
        """Make the ranks save and stop if waiting nodes can join."""
        waiting = [node for node in self.nodes.values() if node.ready and not node.playing]
        if waiting and self._most_that_fit(self._size + len(waiting)) > self._size:
            self._paused = True
            joining = first_few([str(node) for node in waiting], SHOWN)
            text = f"{joining} can join: the ranks save, then all start"
            self._send([node for node in self.nodes.values() if node.playing], "pause", text=text)

    def _end_round(self, *, grace: bool) -> None:
        """Make all nodes end their ranks; with ``grace``, ranks first have time to report where they are."""
        if self._phase not in ("running", "ending"):
            return
        if self._phase == "running":
            self._phase = "ending"
            self._end_by = time.monotonic() + self.terms.ending + 2 * self.terms.node_timeout
        self._send([node for node in self.nodes.values() if node.playing], "stop", grace=grace)

    def _decide(self) -> None:
        """Exit, or start another round, after all ranks have ended."""
        playing = [node for node in self.nodes.values() if node.playing]
        ended = {node.number: node.outcome for node in playing if node.outcome}
        by_cause = sorted(ended.values(), key=lambda outcome: outcome["own"] is None)
        codes = [int(outcome["code"]) for outcome in by_cause]
        code = exit_code(codes + [EXIT_ERROR] * bool(self._lost))
        signalled = {number: str(outcome["signal"]) for number, outcome in ended.items() if outcome["signal"]}
        alone = not self._lost and not any(outcome["own"] for outcome in ended.values())
        if alone and EXIT_REQUEUE in codes and (signalled or self._paused):
            code = EXIT_REQUEUE  # the others lost a rank that the signal killed before its first step
        if code == EXIT_FINISHED or code in FINAL:
            self._exit(code, self._cause(ended, code) if code else "")
            return
        if code == EXIT_REQUEUE:
            self._stopped(playing, signalled)
            return
        cause = self._cause(ended, code)
        if signalled:  # a signal requests a stop, not a restart
            self._exit(code, cause)
            return
        newest = self.saved_step()
        self._failures = self._failures + 1 if newest <= self._newest else 1
        self._newest = newest
        if self._failures > self.terms.restarts:
            if self.terms.restarts:
                cause += f"\nthat was failure {self._failures} in a row without a new checkpoint, "
                cause += f"and MAX_RESTARTS = {self.terms.restarts}"
            self._exit(code, cause)
            return
        self._again(playing, f"{cause}\nall start again from the newest checkpoint, step {max(newest, 0)}")

    def _stopped(self, playing: Sequence[Node], signalled: Mapping[int, str]) -> None:
        """After a save, let nodes that received a signal leave; the rest continue if the terms allow it."""
        staying = [node for node in playing if node.number not in signalled]
        if self._paused or (signalled and self.terms.elastic):
            left = len(self.nodes) - len(signalled)
            if 0 not in signalled and self._most_that_fit(left):
                for node in [node for node in playing if node.number in signalled]:
                    self._turn_away(node.link, code=EXIT_REQUEUE, text="")
                    del self.nodes[node.number]
                    say(f"{node} left after {signalled[node.number]}")
                self._again(staying, "")
                return
        self._exit(EXIT_REQUEUE, "")

    def _cause(self, ended: Mapping[int, Message], code: int) -> str:
        """Describe what ended the round."""
        own = [outcome for outcome in ended.values() if outcome["own"]]
        named = [outcome for outcome in own if outcome["code"] == code and code in FINAL]
        if self._lost and not named:
            return "\n".join(self._lost)
        if own:
            return str((named or own)[0]["own"])
        known: dict[int, str] = {}
        for outcome in ended.values():
            known |= {int(rank): str(what) for rank, what in outcome["known"].items()}
        return self.hung(self._size, known)

    def _again(self, nodes: Iterable[Node], text: str) -> None:
        for node in nodes:
            node.playing, node.ready = False, False
            node.link.send("again", text=text)
        self._phase = "gathering"
        self._began = self._told = time.monotonic()
        self._enough_since = None

    def _exit(self, code: int, text: str) -> None:
        if self._phase != "over":
            self._phase, self._said = "over", {"code": code, "text": text}
            self._send(self.nodes.values(), "exit", **self._said)


def _apart(theirs: Mapping[str, Any], ours: Mapping[str, object]) -> list[str]:
    """Return a line per difference, with both values."""
    names = [name for name in [*ours, *(theirs.keys() - ours.keys())] if theirs.get(name) != ours.get(name)]
    lines = [f"{name}: {quote(theirs.get(name))} there, {quote(ours.get(name))} here" for name in names]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more
