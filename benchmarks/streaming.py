"""Text that streams from a server on this computer: tokens a second, and seconds to the first step of a run.

    python -m benchmarks.streaming [--megabytes 200] [--output benchmarks/results/streaming.md]

The shipped books are repeated into 64 gzipped files of JSON lines, which a web server of one process hands
out by ranges. The loader is one rank's, with its tokenizing processes, and nothing is trained; the run is the
debug model's, on two ranks, from the command to the line of its first step.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.resumable import publish
from toolkit.config import load_config
from toolkit.data.batch_size import BatchShape
from toolkit.data.sources import EMBEDDED, EMBEDDED_FOLDER
from toolkit.data.streaming import streamed_loader

ROOT = Path(__file__).parents[1]
FILES, SEQ_LEN, BATCH, STEPS = 64, 2048, 32, 400
SERVER = """
import re, sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

class Ranges(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        with open(self.translate_path(self.path), "rb") as file:
            asked = re.fullmatch(r"bytes=(\\d+)-(\\d+)", self.headers.get("Range", ""))
            begin = int(asked[1]) if asked else 0
            file.seek(begin)
            content = file.read(int(asked[2]) + 1 - begin if asked else -1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def write_corpus(folder: Path, megabytes: int) -> int:
    """Write so much text into ``FILES`` files and return its bytes."""
    books = gzip.decompress((EMBEDDED_FOLDER / EMBEDDED["embedded"]).read_bytes())
    times = max(1, round(megabytes * 1e6 / FILES / len(books)))
    content = gzip.compress(books * times, compresslevel=1)
    for number in range(FILES):
        (folder / f"{number:02}.jsonl.gz").write_bytes(content)
    return FILES * times * len(books)


def loader_rate(urls: str, workers: int) -> tuple[float, float]:
    """Seconds to the first batch, and tokens a second from the beginning on."""
    options = {
        "training.seq_len": SEQ_LEN, "training.dataset_path": urls, "data.streaming": "true",
        "training.dataloader.num_workers": workers,
    }  # fmt: skip
    config = load_config([f"--{key}={value}" for key, value in options.items()])
    shape = BatchShape(BATCH, BATCH, 1)
    start = time.monotonic()
    batches = iter(streamed_loader(config, shape, dp_rank=0, dp_size=1, seed=0))
    next(batches)
    first = time.monotonic()
    for _ in range(STEPS - 1):
        next(batches)
    return first - start, STEPS * BATCH * SEQ_LEN / (time.monotonic() - start)


def first_step(urls: str) -> float:
    """Seconds from the command to the first step's line."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--job.config_file=train_configs/debug_model.toml", "--data.streaming", "--training.steps=3",
            f"--training.dataset_path={urls}", "--training.dataloader.num_workers=1",
            "--metrics.log_freq=1", f"--job.dump_folder={folder}",
        ]  # fmt: skip
        start = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "toolkit.launch", *flags], cwd=ROOT, text=True,
            env=os.environ | {"NGPU": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert run.stdout
        said = []
        for line in run.stdout:
            said.append(line)
            if re.match(r"step +1/", line):
                seconds = time.monotonic() - start
                run.communicate()
                return seconds
        raise RuntimeError(f"the run ended with {run.wait()} before its first step:\n{''.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="text of the corpus, uncompressed")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine = describe()
    with tempfile.TemporaryDirectory() as name:
        size = write_corpus(Path(name), options.megabytes)
        server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=name, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            port = int(server.stdout.readline())
            urls = ",".join(f"http://127.0.0.1:{port}/{number:02}.jsonl.gz" for number in range(FILES))
            lines = [
                "# Streaming",
                "",
                f"`python -m benchmarks.streaming`: {size / 1e9:.1f} GB of text in {FILES} gzipped files "
                f"behind a web server on the same computer. {machine}",
                "",
                "| tokenizing processes | first batch, s | tokens/s |",
                "|---|---|---|",
            ]
            for workers in (0, 1, 2):
                first, rate = loader_rate(urls, workers)
                lines.append(f"| {workers} | {first:.1f} | {rate:,.0f} |")
            lines += [
                "",
                f"A batch is {BATCH} rows of {SEQ_LEN:,} tokens from as many shards; {STEPS} were taken. The "
                f"debug run of two ranks with a process each printed its first step after "
                f"{first_step(urls):.1f} s.",
            ]
        finally:
            server.kill()
    text = "\n".join(lines) + "\n"
    publish(text, options.output)


if __name__ == "__main__":
    main()
