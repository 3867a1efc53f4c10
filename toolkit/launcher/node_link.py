"""Messages between the launchers of several nodes, as lines of JSON, and their network interface."""

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

LONGEST = 1 << 20  # maximum bytes per line; a configuration has about ten thousand
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR
_MAPPED = "::ffff:"  # prefix of an IPv4 address in an IPv6 socket

Message = dict[str, Any]
"""A message; it has a ``kind``."""


class Link:
    """A connection to another launcher, which counts as lost after ``timeout`` seconds of silence.

    A separate thread sends messages, so that a slow link to one node does not delay the caller.
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
        with suppress(OSError):  # the other side is gone; reading will detect it
            while line := self._outgoing.get():
                self._socket.sendall(line)
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def own_address(self) -> str:
        """This machine's address, as seen by the other side."""
        return _address(self._socket.getsockname())

    @property
    def address(self) -> str:
        return _address(self._socket.getpeername())

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, kind: str, **values: object) -> None:
        """Queue a message, which is sent after earlier ones."""
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
        """Stop accepting messages, and wait up to ``seconds`` for the queued ones to be sent."""
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
    """Return the name of the network interface with ``address``; empty if none is found, for example if it is
    a secondary address, or on a system other than Linux."""
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
