"""How fast a corpus is tokenised and indexed, and that memory does not grow with it.

    python -m benchmarks.tokenize_corpus --output benchmarks/results/tokenize_corpus.md

The text is the shipped corpus, its paragraphs in a new order each time round and one word in fifty with a
letter changed, as JSON lines with a document of about 4 kB each, and once as one text file. Each row is a
fresh process on a cold token cache; memory is the largest sum, over the process and its helpers, of
resident sizes, read every 20 ms. CPU seconds are of all of them. "Again" is a second start, which finds
the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenized
from toolkit.data.tokenizers.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _paragraphs() -> Iterator[str]:
    """The shipped paragraphs without end, each time round in another order and with other misspellings."""
    source = open_corpus("embedded", None)
    texts = [text for piece in source.pieces() for text in piece.texts("text")]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    chance = random.Random(0)
    while True:
        chance.shuffle(paragraphs)
        for paragraph in paragraphs:
            words = paragraph.split(" ")
            for _ in range(len(words) // 50 + 1):
                place = chance.randrange(len(words))
                words[place] = chance.choice(LETTERS) + words[place][1:]
            yield " ".join(words)


def write_corpus(path: Path, n_bytes: int) -> None:
    """Write ``n_bytes`` of text (as UTF-8, before JSON escapes) to ``path``."""
    written, document = 0, ""
    with open(path, "w", encoding="utf-8") as file:
        for paragraph in _paragraphs():
            document += paragraph + "\n\n"
            if len(document) >= 4000 or written + len(document.encode()) >= n_bytes:
                file.write(json.dumps({"text": document}) + "\n" if path.suffix == ".jsonl" else document)
                written, document = written + len(document.encode()), ""
            if written >= n_bytes:
                return


def measure(corpus: Path, tokenizer: str, cache: str) -> None:
    """Tokenise once and print the figures as JSON (in a process of its own)."""
    source, loaded = open_corpus("", str(corpus)), load_tokenizer(tokenizer)
    start = time.perf_counter()
    built = tokenized(source, loaded, cache_folder=cache, progress=False)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    tokenized(source, loaded, cache_folder=cache, progress=False)
    again = time.perf_counter() - start
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "seconds": seconds,
        "again": again,
        "cpu": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "tokens": built.n_tokens,
        "documents": built.n_documents,
    }
    print(json.dumps(figures))


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def run(corpus: Path, tokenizer: Path) -> dict[str, float]:
    """The figures of :func:`measure`, and the peak memory in bytes."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--measure", str(corpus), str(tokenizer), cache]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        peak = 0
        while job.poll() is None:
            peak = max(peak, sum(_resident(member) for member in _family(job.pid)))
            time.sleep(0.02)
        output = job.communicate()[0]
        if job.returncode:
            raise SystemExit(job.returncode)
    return json.loads(output) | {"peak": peak}


def _tokenizers() -> dict[str, Path]:
    found = {"shipped, 4,096 entries": ROOT / "tests" / "assets" / "tokenizer"}
    if assets := os.environ.get("TOOLKIT_ASSETS"):
        found["Llama 3, 128,256 entries"] = Path(assets) / "tokenizers" / "llama3"
    return found


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[25, 50, 100])
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        corpus, tokenizer, cache = arguments.measure
        return measure(Path(corpus), tokenizer, cache)
    lines = [
        "# Tokenising a corpus",
        "",
        "`python -m benchmarks.tokenize_corpus --output benchmarks/results/tokenize_corpus.md`; the script "
        "says what the text is and how it is measured.",
        "",
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}. The load "
        f"average before the start was {os.getloadavg()[0]:.1f}: where it is not near 0, other work shared "
        "the cores, seconds are an upper bound and CPU seconds the steadier figure.",
        "",
        "| tokenizer | text | MB | documents | tokens | seconds | tokens/s | CPU s | peak MB | again, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        corpora = [Path(folder) / f"{size}.jsonl" for size in arguments.megabytes]
        corpora.append(Path(folder) / f"{max(arguments.megabytes)}.txt")
        for corpus in corpora:
            write_corpus(corpus, int(corpus.stem) * 1_000_000)
        for name, tokenizer in _tokenizers().items():
            for corpus in corpora:
                f = run(corpus, tokenizer)
                lines.append(
                    f"| {name} | {corpus.suffix} | {corpus.stem} | {f['documents']:,} | {f['tokens']:,} | "
                    f"{f['seconds']:.1f} | {f['tokens'] / f['seconds']:,.0f} | {f['cpu']:.1f} | "
                    f"{f['peak'] / 1e6:,.0f} | {f['again'] * 1000:.1f} |"
                )
                print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(exist_ok=True)
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
