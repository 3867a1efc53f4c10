"""Several nodes: who is there, what differs, and what becomes of all when something fails on one.

Ranks are stand-ins that train nothing, so that a launch takes tenths of a second; the nodes, their addresses
and links are those of `tests.nodes`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import PORT, TINY, Cluster, Node, Started, cluster, eventually, why_not
from toolkit.launcher import supervisor
from toolkit.launcher.node_link import Link, Message, interface_of
from toolkit.launcher.node_terms import Terms
from toolkit.launcher.nodes import Member
from toolkit.launcher.rendezvous import Rendezvous
from toolkit.launcher.supervisor import Launch

SKIP = why_not()
pytestmark = [pytest.mark.skipif(bool(SKIP), reason=SKIP), pytest.mark.timeout(300)]
SECONDS = 60  # a launch on a busy machine
SILENT = 3  # seconds after which a node is lost: a busy machine must not be


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, three: Cluster) -> Iterator[Path]:
    yield tmp_path
    for node in three.nodes:
        node.restart()


def _start(node: Node, folder: Path, number: int | None = None, /, **settings: Any) -> Started:
    """Start the stand-in launcher of a node, as ``number`` in place of its own."""
    terms = {"least": 2, "most": 2, "join_timeout": 40, "last_call": 1, "node_timeout": SILENT}
    given = settings.pop("terms", {})
    launch = {"processes": 1, "master_addr": "10.0.0.1", "master_port": PORT}
    rank = node.number if number is None else number
    said = {"terms": terms | given, "launch": launch | {"node_rank": rank}, **settings}
    return node.start(sys.executable, "-m", "tests.launcher.node_stand_in", json.dumps(said), str(folder))


def _places(folder: Path) -> list[list[str]]:
    """Lines that ranks have left: host, rank, world size, interface, address and flags."""
    file = folder / "places"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def _begun(folder: Path, count: int) -> None:
    assert eventually(lambda: len(_places(folder)) >= count, SECONDS), _places(folder)


def _ended(nodes: list[Node], started: list[Started], code: int, *said: str) -> None:
    """All end with ``code`` and say why, and nothing is left of them."""
    for one in started:
        assert one.wait(SECONDS) == code, one.text
        for words in said:
            assert re.search(words, one.text), one.text
        assert "Traceback" not in one.text
    assert eventually(lambda: not any(node.processes() for node in nodes), 10)


def test_nodes_start_in_any_order_and_the_ranks_know_their_way(three: Cluster, folder: Path) -> None:
    second = _start(three.nodes[1], folder)
    first = _start(three.nodes[0], folder)
    _begun(folder, 2)
    (folder / "finish").touch()
    _ended(three.nodes, [first, second], 0)
    # A name is an address that nobody else reaches, as on Debian: gloo is told the interface.
    assert sorted(_places(folder)) == [
        ["host0", "0", "2", "eth0", "10.0.0.1", "mesh-2"],
        ["host1", "1", "2", "eth0", "10.0.0.1", "mesh-2"],
    ]


def test_who_is_missing_is_named(three: Cluster, folder: Path) -> None:
    terms = {"least": 3, "most": 3, "join_timeout": 4}
    started = [_start(node, folder, terms=terms) for node in three.nodes[:2]]
    said = r"node 2 of NNODES = 3 did not come in 4 s; here: node 0 \(host0\), node 1 \(host1\)"
    _ended(three.nodes, started, 1, said)
    assert not _places(folder)


def test_what_answers_in_place_of_node_0_is_let_go_at_each_try(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("toolkit.launcher.nodes.RETRY_SECONDS", 0.02)
    reached: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def greet() -> None:
            with suppress(OSError):
                while True:
                    reached.append(door.accept()[0])
                    reached[-1].sendall(b"SSH-2.0-OpenSSH\r\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        terms = Terms(least=2, most=2, join_timeout=0.2)
        member = Member([], Launch(1, nodes=2, node_rank=1), terms, {}, lambda: None, None)
        assert member.take_part("127.0.0.1", door.getsockname()[1]) == 1
        door.shutdown(socket.SHUT_RDWR)
        greeting.join()
    assert len(reached) > 1
    for connection in reached:
        connection.settimeout(1)
        connection.makefile("rb").read()  # to the end, which comes
        connection.close()
    assert "(no message of a launcher), for 0 s" in capfd.readouterr().err


def test_node_0_is_missed_where_it_should_answer(three: Cluster, folder: Path) -> None:
    alone = _start(three.nodes[1], folder, terms={"join_timeout": 2})
    _ended(three.nodes, [alone], 1, r"node 0 does not answer at 10\.0\.0\.1:29500 \(.*refused\), for 2 s")


@pytest.mark.parametrize(
    ("number", "facts", "said"),
    [
        (1, {"torch": "2.11"}, r"node 1 \(host1\) is unlike node 0 \(host0\):\n  torch: '2.11' there, '2.13"),
        (1, {"training.steps": 7}, "training.steps: 7 there, 9 here"),
        (0, {}, "NODE_RANK = 0 is that of host0 and of host1: each node has its own"),
        (2, {}, r"node 2 \(host1\) is none of NNODES = 2: NODE_RANK is below it"),
    ],
    ids=["version", "configuration", "same-rank", "no-such-rank"],
)
def test_who_differs_is_refused(
    three: Cluster, folder: Path, number: int, facts: dict[str, Any], said: str
) -> None:
    common = {"torch": "2.13", "training.steps": 9}
    first = _start(three.nodes[0], folder, facts=common)
    assert eventually(lambda: "is here" in first.text, SECONDS)
    other = _start(three.nodes[1], folder, number, facts=common | facts)
    _ended(three.nodes, [first, other], 2, said)


def test_a_node_that_cannot_prepare_ends_all(three: Cluster, folder: Path) -> None:
    first = _start(three.nodes[0], folder)
    other = _start(three.nodes[1], folder, broken="the corpus is not on this disk")
    _ended(three.nodes, [first, other], 3, "the corpus is not on this disk")
    assert "node 1 (host1): the corpus is not on this disk" in first.text


@pytest.mark.parametrize("kind", ["hello", "leave"])
def test_node_0_hears_what_ended_all_before_it_came(kind: str) -> None:
    """Its launcher listens before it comes itself, so that another node may be there and fail first."""
    rendezvous = Rendezvous(Terms(least=2, most=2), {}, lambda nodes: [], lambda: 0, lambda nodes, known: "")
    port = rendezvous.listen(0)

    def come(node: int, kind: str, **said: Any) -> Message:
        link = Link(socket.create_connection(("127.0.0.1", port), timeout=5), 5)
        link.send(kind, node=node, host=f"host{node}", **said)
        answer = link.receive() if kind == "hello" else {}
        if answer.get("kind") == "welcome":
            link.send("leave", code=3, text="no such corpus")
        link.finish(5)
        return answer

    come(1, kind, facts={}, code=3, text="no such corpus")
    assert eventually(lambda: rendezvous._phase == "over", 5)
    assert come(0, "hello", facts={}) == {"kind": "exit", "code": 3, "text": "node 1 (host1): no such corpus"}
    rendezvous.close()
    assert not rendezvous.thread.is_alive()


def _end_of_a_round(node_0: Callable[[Link], None], *, sleeps: float, code: int = 75) -> int:
    """The code of a node whose ranks end with ``code`` in these seconds, once ``node_0`` has had its say."""
    with socket.create_server(("127.0.0.1", 0)) as door, supervisor.signals() as arrived:

        def serve() -> None:
            link = Link(door.accept()[0], 5)
            assert link.receive()["kind"] == "hello"
            link.send("welcome", node_timeout=5)
            assert link.receive()["kind"] == "ready"
            link.send("start", place=1, nodes=2, port=PORT, flags=[], own_address="")
            node_0(link)
            link.finish(5)
            link.close()

        serving = threading.Thread(target=serve)
        serving.start()
        rank = [sys.executable, "-S", "-c", f"import sys, time; time.sleep({sleeps}); sys.exit({code})"]
        launch = Launch(1, nodes=2, node_rank=1)
        member = Member(rank, launch, Terms(least=2, most=2), {}, lambda: None, None, arrived)
        code = member.take_part("127.0.0.1", door.getsockname()[1])
        serving.join()
        return code


def test_a_node_whose_ranks_still_end_has_the_code_of_all() -> None:
    def leave(link: Link) -> None:
        link.send("exit", code=75, text="node 0 (host0): stopped by SIGTERM")
        assert link.receive()["kind"] == "ended"

    assert _end_of_a_round(leave, sleeps=0.3) == 75


def test_what_a_node_has_said_of_its_own_rank_is_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    def start_again(link: Link) -> None:
        own = link.receive()
        while own["kind"] != "ended":
            own = link.receive()
        link.send("again", text=f"{own['own']}\nall start again")
        assert link.receive()["kind"] == "ready"
        link.send("exit", code=1, text="")

    assert _end_of_a_round(start_again, sleeps=0.0, code=9) == 1
    said = capfd.readouterr().err
    assert said.count("ended with code 9") == 1 and "launch: all start again" in said


def test_a_signal_after_the_ranks_have_ended_waits_for_those_of_other_nodes() -> None:
    """A scheduler repeats itself, and others may still save."""

    def signal_late(link: Link) -> None:
        assert link.receive()["kind"] == "ended"
        os.kill(os.getpid(), signal.SIGTERM)
        link.set_timeout(0.3)
        with pytest.raises(OSError, match="nothing heard"):
            link.receive()
        link.send("exit", code=0, text="")

    assert _end_of_a_round(signal_late, sleeps=0.0) == 0


def test_what_one_node_lacks_ends_all_before_the_start(three: Cluster, folder: Path) -> None:
    flags = [*TINY, f"--job.dump_folder={folder}/run", f"--data.cache_folder={folder}/cache"]
    first = three.nodes[0].launch(*flags, NNODES="2")
    assert eventually(lambda: "is here" in first.text, SECONDS), first.text
    other = three.nodes[1].launch(*flags, "--training.dataset_path=/none/here.txt", NNODES="2")
    _ended(three.nodes, [first, other], 3, "/none/here.txt")
    assert "node 1 (host1): " in first.text


def test_a_single_node_starts_again_as_well(three: Cluster, folder: Path) -> None:
    alone = _start(three.nodes[0], folder, terms={"least": 1, "most": 1, "restarts": 1})
    _begun(folder, 1)
    (folder / "fail-host0").write_text("9")
    _begun(folder, 2)
    (folder / "finish").touch()
    _ended(three.nodes, [alone], 0, "ended with code 9")


def test_what_no_launcher_says_does_no_harm(three: Cluster, folder: Path) -> None:
    first = _start(three.nodes[0], folder)
    assert eventually(lambda: "is here" in first.text, SECONDS)

    def tell(words: str) -> None:
        send = f"import socket; socket.create_connection(('10.0.0.1', {PORT})).sendall(b'''{words}''')"
        assert three.nodes[2].start(sys.executable, "-S", "-c", send).wait(SECONDS) == 0

    rubbish = [
        r"GET / HTTP/1.0\r\n\r\n",
        "[]\\n",
        '{"kind": "hello", "node": "x"}\\n',
        '{"kind": "ended"}\\n',
    ]
    for words in rubbish:
        tell(words)
    second = _start(three.nodes[1], folder)
    _begun(folder, 2)
    tell('{"kind": "leave", "node": 1, "host": "host2", "code": 2, "text": "a flag"}\\n')
    assert eventually(lambda: "node 1 (host2): a flag" in first.text, SECONDS)
    (folder / "finish").touch()
    _ended(three.nodes, [first, second], 0)


def _kill_rank(nodes: list[Node], started: list[Started]) -> None:
    os.kill(started[1].ranks()[0], signal.SIGKILL)


FAULTS = {
    "a rank is killed": (_kill_rank, r"rank 1 \(local rank 0 on host1\) was ended by SIGKILL"),
    "a launcher is killed": (
        lambda nodes, started: started[1].signal(signal.SIGKILL),
        r"node 1 \(host1\) is lost: its launcher has ended",
    ),
    "a link is cut": (
        lambda nodes, started: nodes[1].cut(),
        rf"node 1 \(host1\) is lost: nothing heard for {SILENT} s",
    ),
    "a node loses its power": (
        lambda nodes, started: nodes[1].power_off(),
        rf"node 1 \(host1\) is lost: nothing heard for {SILENT} s",
    ),
    "the launcher of node 0 is killed": (
        lambda nodes, started: started[0].signal(signal.SIGKILL),
        r"node 0 \(10\.0\.0\.1\) is lost: its launcher has ended",
    ),
    "a rank fails": (
        lambda nodes, started: None,
        r"rank 1 \(local rank 0 on host1\) ended with code 9",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_and_is_named(three: Cluster, folder: Path, fault: str) -> None:
    make, said = FAULTS[fault]
    nodes = three.nodes[:2]
    started = [_start(node, folder) for node in nodes]
    _begun(folder, 2)
    if fault == "a rank fails":
        (folder / "fail-host1").write_text("9")
    make(nodes, started)
    code = 9 if fault == "a rank fails" else 1
    if fault == "a link is cut":
        _ended(nodes[1:], started[1:], code, rf"node 0 .* is lost: nothing heard for {SILENT} s")
    hit = {"a launcher is killed": 1, "a node loses its power": 1, "the launcher of node 0 is killed": 0}
    survivors = [one for number, one in enumerate(started) if number != hit.get(fault)]
    _ended(nodes, survivors[:1] if fault == "a link is cut" else survivors, code, said)


def test_a_slow_link_is_named_and_the_run_goes_on(three: Cluster, folder: Path) -> None:
    nodes = three.nodes[:2]
    started = [_start(node, folder) for node in nodes]
    _begun(folder, 2)
    assert "is slow" not in started[0].text
    nodes[1].slow("2mbit")
    slow = re.compile(r"node 1 \(host1\) is slow: \d\.\d Mbit/s through its link")
    assert eventually(lambda: slow.search(started[0].text), SECONDS), started[0].text
    nodes[1].fast()
    (folder / "finish").touch()
    _ended(nodes, started, 0)


def test_a_signal_to_one_node_stops_all_after_a_save(three: Cluster, folder: Path) -> None:
    nodes = three.nodes[:2]
    started = [_start(node, folder) for node in nodes]
    _begun(folder, 2)
    started[1].signal(signal.SIGTERM)
    _ended(nodes, started, 75)


def test_nodes_go_on_without_one_and_with_it_again(three: Cluster, folder: Path) -> None:
    terms = {"least": 2, "most": 3, "restarts": 3}
    nodes = three.nodes
    started = [_start(node, folder, terms=terms) for node in nodes]
    _begun(folder, 3)
    nodes[1].power_off()
    _begun(folder, 5)
    assert sorted(_places(folder)[3:]) == [
        ["host0", "0", "2", "eth0", "10.0.0.1", "mesh-2"],
        ["host2", "1", "2", "eth0", "10.0.0.1", "mesh-2"],
    ]
    nodes[1].power_on()
    back = _start(nodes[1], folder, terms=terms)
    _begun(folder, 8)
    assert sorted(place[:3] for place in _places(folder)[5:]) == [[f"host{n}", f"{n}", "3"] for n in range(3)]
    # One that is asked to stop leaves the others to go on; a rank that fails is started again.
    back.signal(signal.SIGTERM)
    assert back.wait(SECONDS) == 75
    _begun(folder, 10)
    (folder / "fail-host2").write_text("9")
    _begun(folder, 12)
    (folder / "finish").touch()
    _ended(nodes, [started[0], started[2]], 0)
    said = started[0].text
    assert re.search(rf"node 1 \(host1\) is lost: nothing heard for {SILENT} s", said)
    assert "node 1 (host1) can join: the ranks save, then all start" in said
    assert re.search(r"rank 1 \(local rank 0 on host2\) ended with code 9", said)


def test_nodes_wait_for_node_0_to_return(three: Cluster, folder: Path) -> None:
    terms = {"restarts": 3}
    nodes = three.nodes[:2]
    started = [_start(node, folder, terms=terms) for node in nodes]
    _begun(folder, 2)
    started[0].signal(signal.SIGKILL)
    assert eventually(lambda: "node 0 (10.0.0.1) is lost" in started[1].text, SECONDS)
    again = _start(nodes[0], folder, terms=terms)
    _begun(folder, 4)
    (folder / "finish").touch()
    _ended(nodes, [again, started[1]], 0)


def test_failures_without_a_checkpoint_between_them_end_all(three: Cluster, folder: Path) -> None:
    nodes = three.nodes[:2]
    started = [_start(node, folder, terms={"restarts": 1}) for node in nodes]
    for count in (1, 2, 3):
        _begun(folder, 2 * count)
        if count == 2:
            (folder / "step-1").touch()
        (folder / "fail-host0").write_text("1")
        if count == 3:
            break
    _begun(folder, 6)
    said = "failure 2 in a row without a new checkpoint, and MAX_RESTARTS = 1"
    _ended(nodes, started, 1, said)


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        assert interface_of("::1") in ("lo", "")
