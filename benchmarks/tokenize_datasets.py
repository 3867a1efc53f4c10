"""Tokenizing by Hugging Face's ``datasets`` and ``tokenizers``, for benchmarks/tokenize_corpus.py.

Run as a program by it: reads a corpus of JSON lines with ``load_dataset``, and has ``map`` encode batches in
as many processes as there are cores, and keep them as Arrow files. Prints the figures as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.tokenize_corpus import COMPARED, cpu_seconds, fingerprints
from toolkit.hardware import cores


def measure(corpus: Path, tokenizer: Path, cache: str) -> None:
    """Tokenize ``corpus`` once, with the tokenizer.json in the folder ``tokenizer``.

    Each process has one thread. Where in the text tokens lie is not computed (``encode_batch_fast``).
    """
    os.environ |= {
        "HF_HOME": cache, "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    from datasets import load_dataset
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    eos_token = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    eos = encoder.token_to_id(eos_token)
    assert eos is not None

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*encoding.ids, eos] for encoding in encoder.encode_batch_fast(rows["text"])]}

    start = time.perf_counter()
    texts = load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
    made = texts.map(encode, batched=True, num_proc=cores(), remove_columns=["text"])
    seconds = time.perf_counter() - start
    figures = {
        "seconds": seconds,
        "cpu": cpu_seconds(),
        "tokens": sum(map(len, made.with_format("numpy")["input_ids"])),
        "documents": len(made),
        "first": fingerprints(made[:COMPARED]["input_ids"]),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
