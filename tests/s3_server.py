"""An S3 server on this machine, which is moto's, and the faults that it can be told to have.

    with running() as server:
        server.fail("PUT", "distcp", status=503, times=3)

moto answers every request that gets through. Before it stands a layer that by order sends an error in place
of the answer, answers late, or hangs up: what a store does that is overloaded, full or gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUCKET = "bucket"


@dataclass
class Server:
    """A running server; ``environment`` is what a process needs to use it as S3."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "testing-id",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fail(self, method: str, path: str, *, times: int = 1, **fault: Any) -> None:
        """Have the next ``times`` requests of a ``method`` for a path with ``path`` in it end otherwise:
        ``status`` and ``code`` of an error, ``hang_up``, ``late`` by some seconds, or ``after`` the request
        was done."""
        body = {"method": method, "path": path, "times": times, **fault}
        self.call("/faults", body)

    def call(self, path: str, body: Any = None, method: str = "POST") -> bytes:
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, kind, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def requests(self) -> list[str]:
        """Requests since the last call: ``METHOD path?query``."""
        found: list[str] = json.loads(self.call("/faults", method="GET"))
        return found

    def stall(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(port: int = 0) -> Iterator[Server]:
    """A server with an empty bucket named ``bucket``."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.s3_server", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | keys
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    server = Server(process, port)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                server.call(f"/{BUCKET}", method="PUT")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.05)
        server.requests()
        yield server
    finally:
        process.kill()
        process.wait()


class _Faults:
    """The layer before moto."""

    def __init__(self, application: Any):
        self._application = application
        self._faults: list[dict[str, Any]] = []
        self._requests: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ["QUERY_STRING"]
        if path == "/faults":
            return self._told(environ, start_response)
        name = f"{path}?{query}" if query else path
        with self._lock:
            self._requests.append(f"{method} {name}")
            meant = (it for it in self._faults if it["method"] == method and it["path"] in name)
            fault = next((it for it in meant if it["times"]), None)
            if fault:
                fault["times"] -= 1
        if not fault:
            return self._application(environ, start_response)
        if fault.get("after"):
            list(self._application(environ, lambda *_: None))
        time.sleep(fault.get("late", 0))
        if "status" in fault:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault['status']} Told", [("Content-Type", "application/xml")])
            code = f"<Code>{fault.get('code', '')}</Code>"
            return [f"<?xml version='1.0'?><Error>{code}<Message>as told</Message></Error>".encode()]
        if fault.get("hang_up"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("500 Gone", [])
            return [b""]
        return self._application(environ, start_response)

    def _told(self, environ: dict[str, Any], start_response: Any) -> Any:
        start_response("200 OK", [])
        with self._lock:
            if environ["REQUEST_METHOD"] == "GET":
                found, self._requests = self._requests, []
                return [json.dumps(found).encode()]
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self._faults.append(json.loads(body))
            return [b""]


def main(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    os.environ["MOTO_S3_CUSTOM_ENDPOINTS"] = f"http://127.0.0.1:{port}"
    application = _Faults(DomainDispatcherApplication(create_backend_app))
    make_server("127.0.0.1", port, application, threaded=True).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
