"""Draw sentences of README, docs and docstrings at random, to be read against the house style.

    python -m benchmarks.prose [--count 60] [--seed 0]

Each is printed with its file. Code, tables, headings and lists of arguments are left out.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FEWEST = 5
"""Words of a sentence, at least."""


def sentences() -> list[tuple[str, str]]:
    """Return the file and the text of every sentence."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [(page, _prose(page.read_text())) for page in pages]
    for file in sorted((ROOT / "toolkit").rglob("*.py")):
        texts += [(file, text) for text in _docstrings(file)]
    return [(str(file.relative_to(ROOT)), sentence) for file, text in texts for sentence in _split(text)]


def _prose(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!|<!--)", line)]
    return "\n".join(re.sub(r"^\s*(-|\d+\.) ", "\n\n", line) for line in lines)


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            yield re.split(r"^(?:Args|Raises|Attributes|Yields|Returns):", text, flags=re.MULTILINE)[0]


def _split(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"    |\s*::", paragraph):
            continue
        joined = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?:]) (?=[A-Z`*(\[])", joined):
            if len(sentence.split()) >= _FEWEST and sentence[-1] in ".!?:":
                yield sentence


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    every = sentences()
    print(f"{asked.count} of {len(every):,} sentences, seed {asked.seed}")
    for number, (file, sentence) in enumerate(random.Random(asked.seed).sample(every, asked.count), 1):
        print(f"{number:3}. {file}: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
