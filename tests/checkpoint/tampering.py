"""Changes to a checkpoint after which its digests fit again, as an attacker would make them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import read_metadata
from toolkit.checkpoint.manifest import MANIFEST, build_manifest


def seal(step: Path) -> None:
    """Rewrite the manifest for the files as they are now."""
    old = json.loads((step / MANIFEST).read_text())
    files = {}
    for name in old["files"]:
        content = (step / name).read_bytes()
        files[name] = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    manifest = build_manifest(step=old["step"], files=files, tensor_count=1, tensor_bytes=1, run=old["run"])
    (step / MANIFEST).write_text(json.dumps(manifest))


def index_of(step: Path) -> Metadata:
    return read_metadata(step, json.loads((step / MANIFEST).read_text())["files"])


def change_index(step: Path, change: Callable[[Metadata], object]) -> None:
    index = index_of(step)
    change(index)
    (step / ".metadata").write_bytes(pickle.dumps(index))
    seal(step)


def shorten_storage(saved: bytes, *, by: int, compress: bool = False) -> bytes:
    """Return what torch.save wrote, with the largest of its storages cut, or all of it compressed."""
    written = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved)) as before,
        zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as after,
    ):
        largest = max(
            (record for record in before.infolist() if "/data/" in record.filename),
            key=lambda record: record.file_size,
        )
        for record in before.infolist():
            with before.open(record) as file:
                file._expected_crc = None  # type: ignore[attr-defined]  # a checkpoint is written without
                content = file.read()
            after.writestr(record.filename, content[:-by] if by and record is largest else content)
    return written.getvalue()
