"""DCP's file system, over object storage."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from toolkit.checkpoint.dcp_storage import HashingFileSystem


class RemoteFileSystem(HashingFileSystem):
    """Files that DCP would write under a temporary name and rename have their last name at once."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        final = path.with_name(path.name.removesuffix(".tmp"))
        with super().create_stream(final, mode) as stream:
            yield stream
        self.written[path.name] = self.written[final.name]

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        pass

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        pass
