"""Lines of JSON between the launchers of several nodes, and the network interface that they go through."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

LONGEST = 1 << 20  # bytes of a line; a configuration has some ten thousand
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_MAPPED = "::ffff:"  # an address of IPv4 in a socket of IPv6

Message = dict[str, Any]
"""Has a ``kind``."""


class Link:
    """A connection to another launcher, of which nothing is heard for ``timeout`` seconds when it is gone.

    A thread sends, so that a node whose link is bad keeps nobody waiting.
    """

    def __init__(self, connection: socket.socket, timeout: float):
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writer = threading.Thread(target=self._write, name="node link", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        with suppress(OSError):  # the other one has gone: reading tells that
            while line := self._outgoing.get():
                self._socket.sendall(line)
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def own_address(self) -> str:
        """The address of this machine at which the other one has it."""
        return _address(self._socket.getsockname())

    @property
    def address(self) -> str:
        return _address(self._socket.getpeername())

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, kind: str, **values: object) -> None:
        """Send a message, at once or as soon as those before it have gone."""
        self._outgoing.put(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            OSError: the other node is gone; the text says how this was detected.
            ValueError: the line is not a message.
        """
        try:
            line = self._lines.readline(LONGEST)
        except TimeoutError:
            raise OSError(f"nothing heard for {self._socket.gettimeout():g} s") from None
        if not line.endswith(b"\n"):
            raise OSError("its launcher has ended" if not line else "cut off within a message")
        message = None
        with suppress(ValueError):
            message = json.loads(line)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("no message of a launcher")
        return message

    def finish(self, seconds: float = 0.0) -> None:
        """Send nothing more, and wait up to ``seconds`` until what has been sent is on its way."""
        self._outgoing.put(b"")
        self._writer.join(timeout=seconds)

    def close(self) -> None:
        self._outgoing.put(b"")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _address(name: tuple[Any, ...]) -> str:
    return str(name[0]).removeprefix(_MAPPED)


def interface_of(address: str) -> str:
    """The name of the interface of this machine that has ``address``; empty where none is found, as for
    further addresses of an interface, or not on Linux."""
    with suppress(OSError):
        if ":" in address:
            packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
            return next((line.split()[-1] for line in lines if line.startswith(packed)), "")
        for _, name in socket.if_nameindex():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
