"""How fast a corpus is tokenized and indexed, and that memory does not grow with it.

    python -m benchmarks.tokenize_corpus --output benchmarks/results/tokenize_corpus.md

The text is the shipped corpus, its paragraphs in a new order each time round and one word in fifty with a
letter changed, as JSON lines with a document of about 4 kB each, and once as one text file. Each row is a
fresh process on a cold token cache; memory is the largest sum, over the process and its helpers, of
resident sizes, read every 20 ms. CPU seconds are of all of them. "Again" is a second start, which finds
the cache.

The second table has the text of ``--beside`` MB, as JSON lines, tokenized by this toolkit and by ``datasets``
with ``tokenizers`` (benchmarks/tokenize_datasets.py), each TURNS times in turns, in fresh processes on cold
caches; imports and the loading of the tokenizer are not counted. Where a tokenizer is a file of tiktoken's,
the toolkit also takes it as the tokenizer.json that the others read. The numbers of documents and tokens must
be the same, and the ids of the first COMPARED documents; else there is no table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.tokenizers.files import find
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.to_json import tokenizer_json

ROOT = Path(__file__).parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TURNS = 3
COMPARED = 100


class NotComparable(Exception):
    """Two sides that do not make the same tokens."""


def _paragraphs() -> Iterator[str]:
    """The shipped paragraphs without end, each time round in another order and with other misspellings."""
    source = open_corpus("embedded", None)
    texts = [text for chunk in source.chunks() for text in chunk.texts("text")]
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
    """Tokenize once and print the figures as JSON (in a process of its own)."""
    source, loaded = open_corpus("", str(corpus)), load_tokenizer(tokenizer)
    start = time.perf_counter()
    built = tokenize_corpus(source, loaded, cache_folder=cache, progress=False)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    tokenize_corpus(source, loaded, cache_folder=cache, progress=False)
    again = time.perf_counter() - start
    figures = {
        "seconds": seconds,
        "again": again,
        "cpu": cpu_seconds(),
        "tokens": built.n_tokens,
        "documents": built.n_documents,
        "first": fingerprints(np.split(built.tokens, built.offsets[1:-1])[:COMPARED]),
    }
    print(json.dumps(figures))


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def fingerprints(documents: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
    """A hash of the ids of each document."""
    return [hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest() for ids in documents]


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


OURS: Sequence[str] = (__file__, "--measure")
DATASETS: Sequence[str] = (str(Path(__file__).with_name("tokenize_datasets.py")),)


def run(corpus: Path, tokenizer: Path, program: Sequence[str] = OURS) -> dict[str, Any]:
    """The figures that ``program`` prints, and the peak memory in bytes."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, *program, str(corpus), str(tokenizer), cache]
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


def beside(corpus: Path, tokenizer: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The figures of each side, of TURNS runs in turns; a tokenizer.json is made in ``folder`` where needed.

    Raises:
        NotComparable: the sides make other tokens.
    """
    loaded, as_json = load_tokenizer(tokenizer), tokenizer
    sides = {"this toolkit": (tokenizer, OURS)}
    if loaded.kind == "tiktoken":
        as_json = folder
        for file, content in tokenizer_json(loaded, find(tokenizer).content).items():
            (folder / file).write_bytes(content)
        sides["this toolkit, tokenizer.json"] = (as_json, OURS)
    sides["datasets"] = (as_json, DATASETS)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(TURNS):
        for side in list(sides)[:: 1 if turn % 2 else -1]:
            runs[side].append(run(corpus, *sides[side]))
    for side, figures in runs.items():
        refuse_other_tokens(side, figures[0], runs["this toolkit"][0])
    return runs


def refuse_other_tokens(side: str, found: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise NotComparable where ``found`` tells of other tokens than ``ours``."""
    for name in ("documents", "tokens"):
        if found[name] != ours[name]:
            raise NotComparable(f"{side}: {found[name]:,} {name}, this toolkit {ours[name]:,}")
    pairs = zip(found["first"], ours["first"], strict=True)
    if differ := [number for number, (theirs, mine) in enumerate(pairs) if theirs != mine]:
        raise NotComparable(f"{side}: document {differ[0]} (from 0) has other ids than this toolkit's")


def beside_lines(name: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Rows of the second table: medians, and of seconds the range."""

    def median(side: str, figure: str) -> float:
        return statistics.median(run[figure] for run in runs[side])

    for side, figures in runs.items():
        seconds = [run["seconds"] for run in figures]
        yield (
            f"| {name} | {side} | {median(side, 'seconds'):.1f} ({min(seconds):.1f}–{max(seconds):.1f}) | "
            f"{figures[0]['tokens'] / median(side, 'seconds'):,.0f} | "
            f"{median(side, 'seconds') / median('this toolkit', 'seconds'):.1f} | "
            f"{median(side, 'cpu'):.1f} | {median(side, 'peak') / 1e6:,.0f} |"
        )


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[25, 50, 100])
    parser.add_argument("--beside", type=int, default=25, help="megabytes tokenized by datasets, too")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        corpus, tokenizer, cache = arguments.measure
        return measure(Path(corpus), tokenizer, cache)
    lines = [
        "# Tokenizing a corpus",
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
        second = [
            "",
            f"{arguments.beside} MB of .jsonl beside `datasets` {version('datasets')} with `tokenizers` "
            f"{version('tokenizers')}, medians of {TURNS} in turns, in brackets the range. The tokens "
            "are the same. CPU seconds are of the whole processes, with imports.",
            "",
            "| tokenizer | by | seconds | tokens/s | times the seconds of this toolkit | CPU s | peak MB |",
            "|---|---|---|---|---|---|---|",
        ]
        print("\n".join(second), flush=True)
        lines += second
        corpus = Path(folder) / f"{arguments.beside}.jsonl"
        if corpus not in corpora:
            write_corpus(corpus, arguments.beside * 1_000_000)
        for name, tokenizer in _tokenizers().items():
            try:
                rows = list(beside_lines(name, beside(corpus, tokenizer, Path(folder))))
            except NotComparable as error:
                sys.exit(str(error))
            print("\n".join(rows), flush=True)
            lines += rows
    if arguments.output:
        arguments.output.parent.mkdir(exist_ok=True)
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
