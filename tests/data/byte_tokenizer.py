"""A tokenizer of bytes for the tests of the data pipeline: cheap to start in another process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class ByteTokenizer:
    """Ids 0–255 are bytes, 256 BOS, 257 EOS.

    Every encoded text adds one byte to the file ``log``, and one that holds ``stop_at`` reads from the FIFO
    ``gate`` first, so that a test can hold a build at a chosen place.
    """

    n_words: int = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint: str = "bytes"
    log: str = ""
    stop_at: str = ""
    gate: str = ""

    @property
    def adds_bos(self) -> bool:
        return self.bos_id is not None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        if self.stop_at and self.stop_at in text:
            with open(self.gate, "rb") as gate:
                gate.read()
        if self.log:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, b".")
            os.close(descriptor)
        return list(text.encode())


@dataclass
class ModuleProbe(ByteTokenizer):
    """Encodes every text as whether the process has imported ``forbidden``; or kills the process."""

    bos_id: int | None = None
    eos_id: int | None = None
    forbidden: str = ""
    kill: bool = False

    def encode(self, text: str) -> list[int]:
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return [int(self.forbidden in sys.modules)]
