"""Read checkpoints from object storage in parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from toolkit.checkpoint.dcp_storage import VerifiedReader, locate_tensor
from toolkit.io.tensor_file import TensorPlace
from toolkit.storage.remote_path import RemotePath

_READS_AT_ONCE = 8
_IN_MEMORY_BYTES = 32 << 20
"""Maximum size of a chunk that is downloaded whole and sliced in memory."""


class RemoteReader(VerifiedReader):
    """Reads several chunks in parallel, to hide latency."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            list(threads.map(lambda item: self.read_item(item, planner), plan.items))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def place(self, index: MetadataIndex) -> TensorPlace:
        stored = self.metadata.storage_data[MetadataIndex(index.fqn, index.offset)]
        if stored.length > _IN_MEMORY_BYTES:
            return super().place(index)
        assert index.index is not None, "the planner numbers the chunks"
        file: Any = _InMemoryRange(self.folder / stored.relative_path, stored.offset, stored.length)
        return locate_tensor(self.folder, self.metadata, index.fqn, index.index, file)


class _InMemoryRange:
    """A byte range of a file in memory, addressed by file offsets."""

    def __init__(self, path: RemotePath, begin: int, length: int):
        self._path, self._begin, self._at = path, begin, 0
        self._memory = memoryview(bytearray(length))
        count = path.read_into(self._memory, begin)
        self._memory = self._memory[:count]

    def __str__(self) -> str:
        return str(self._path)

    def open_regular(self) -> _InMemoryRange:
        return self

    def __enter__(self) -> _InMemoryRange:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, offset: int) -> None:
        self._at = offset - self._begin

    def read(self, count: int) -> memoryview:
        return self._memory[self._at : self._at + count]

    def read_into(self, memory: memoryview, offset: int) -> int:
        part = self._memory[offset - self._begin :][: len(memory)]
        memory[: len(part)] = part
        return len(part)
