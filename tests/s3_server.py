"""An S3 server on this machine, which is moto's, and the faults that it can be told to have.

    with running() as server:
        server.fail("PUT", "distcp", status=503, times=3)

moto answers every request that gets through. Before it stands a layer that by order sends an error in place
of the answer, or hangs up: what a store does that is overloaded, full or gone. With a folder, the layer keeps
there what was put, before it is acknowledged: a server that is killed and started again has it.
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
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote

from werkzeug.test import Client

from toolkit.storage import remote_calls

ROOT = Path(__file__).parents[1]
BUCKET = "bucket"
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/s3/aws4_request"}


@dataclass
class Server:
    """A running server; ``environment`` is what a process needs to use it as S3."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path | None = None

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
        ``status`` and ``code`` of an error, ``hang_up``, or either ``after`` the request was done."""
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

    def fall(self, how: str, seconds: float) -> None:
        """Be ``killed``, or ``stalled``, and back after so long."""
        self.process.send_signal(signal.SIGSTOP if how == "stalled" else signal.SIGKILL)
        time.sleep(seconds)
        if how == "stalled":
            self.process.send_signal(signal.SIGCONT)
            return
        self.process.wait()
        self.process = _process(self.port, self.folder)
        self.wait()

    def wait(self) -> None:
        """Wait until the server answers, with a bucket."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call(f"/{BUCKET}", method="PUT")
                return
            except (OSError, HTTPException):
                alive = self.process.poll() is None and time.monotonic() < deadline
                assert alive, "the server does not start"
                time.sleep(0.05)


def _process(port: int, folder: Path | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.s3_server", str(port), *([str(folder)] if folder else [])]
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | keys
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


@contextmanager
def running(folder: Path | None = None) -> Iterator[Server]:
    """A server with a bucket named ``bucket``, empty but for what is in the ``folder`` of one of before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(_process(port, folder), port, folder)
    try:
        server.wait()
        server.requests()
        remote_calls.file_system.cache_clear()  # what was opened for another server
        yield server
    finally:
        remote_calls.file_system.cache_clear()
        server.process.kill()
        server.process.wait()


@contextmanager
def running_here() -> Iterator[Server]:
    """:func:`running`, with the environment of this process leading to it."""
    with running() as server, mock.patch.dict(os.environ, server.environment):
        remote_calls.file_system.cache_clear()  # it may know the server of other tests
        yield server


class _Faults:
    """The layer before moto."""

    def __init__(self, application: Any, folder: Path | None):
        self._application = application
        self._folder = folder
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
            return self._kept(environ, start_response)
        if fault.get("after"):
            list(self._application(environ, lambda *_: None))
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

    def _kept(self, environ: dict[str, Any], start_response: Any) -> Any:
        """moto's answer; a file that it now has is kept before it is given, one that goes is removed."""
        name, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        path = self._folder / quote(name.removeprefix(f"/{BUCKET}/"), safe="") if self._folder else None
        if path is None or name.count("/") < 2 or environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, start_response)
        method, status = environ["REQUEST_METHOD"], [""]

        def told(line: str, headers: Any, *_: Any) -> Any:
            status[0] = line
            return start_response(line, headers)

        answer = list(self._application(environ, told))
        if method == "DELETE" and not query:
            path.unlink(missing_ok=True)
        elif status[0].startswith("200") and ((method == "PUT" and not query) or "uploadId" in query):
            address = f"http://{environ['HTTP_HOST']}"
            content = Client(self._application).get(name, base_url=address, headers=_SIGNED)
            if content.status_code == 200:
                work = path.with_name(f"{threading.get_ident()}.tmp")
                work.write_bytes(content.data)
                work.replace(path)
        return answer

    def _told(self, environ: dict[str, Any], start_response: Any) -> Any:
        start_response("200 OK", [])
        with self._lock:
            if environ["REQUEST_METHOD"] == "GET":
                found, self._requests = self._requests, []
                return [json.dumps(found).encode()]
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self._faults.append(json.loads(body))
            return [b""]


def main(port: int, folder: Path | None) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        store = Client(application)
        store.put(f"/{BUCKET}", base_url=f"http://127.0.0.1:{port}")
        for path in folder.iterdir():
            if path.suffix == ".tmp":
                path.unlink()
                continue
            name = f"/{BUCKET}/{unquote(path.name)}"
            store.put(name, base_url=f"http://127.0.0.1:{port}", data=path.read_bytes(), headers=_SIGNED)
    make_server("127.0.0.1", port, _Faults(application, folder), threaded=True).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
