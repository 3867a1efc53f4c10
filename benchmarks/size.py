"""The shape of toolkit/: lines by room, circles and climbs among files, imports inside functions.

    python -m benchmarks.size [--output benchmarks/results/size.md]

Lines are those of files, with comments and docstrings. A circle is a set of files each of which imports all
others, directly or not; a climb is an import from a higher floor of pyproject.toml. Imports inside functions
and for type checkers count as others do.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.compat import PRIVATE, tomllib

ROOT = Path(__file__).resolve().parent.parent
SMALL = 30
LARGEST = 10


def modules() -> dict[str, Path]:
    """Files of toolkit/ by the names that imports have for them."""
    found = sorted((ROOT / "toolkit").rglob("*.py"))
    return {
        ".".join(it.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): it for it in found
    }


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def rooms() -> Counter[str]:
    """Lines of each folder of toolkit/, and of the files beside them."""
    found: Counter[str] = Counter()
    for path in modules().values():
        parts = path.relative_to(ROOT / "toolkit").parts
        found[f"{parts[0]}/" if len(parts) > 1 else "(files)"] += lines(path)
    return found


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules that the nodes of ``tree`` import; of ``known`` ones, such as toolkit.data.corpus, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (it.name for it in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for it in node.names:
                whole = f"{node.module}.{it.name}"
                yield whole if whole in known else node.module


def graph() -> dict[str, set[str]]:
    """Modules of toolkit/ that each of them imports."""
    known = modules()
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in known.items()}
    return {
        name: {it for it in imported(tree, known) if it in known} - {name} for name, tree in trees.items()
    }


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import one another, by name."""
    reached = {name: _reached(name, edges) for name in edges}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in edges
        if name in reached[name]
    }
    return sorted(map(list, found))


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in edges.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def climbs(edges: Mapping[str, set[str]]) -> list[str]:
    """Imports from a floor above one's own."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    [layers] = [it["layers"] for it in options["contracts"] if it["type"] == "layers"]
    floors = {room.strip(): height for height, layer in enumerate(layers[::-1]) for room in layer.split(":")}
    found = []
    for name, others in edges.items():
        for other in others:
            here, there = (floors.get((it.split(".") + [""])[1], 0) for it in (name, other))
            if there > here and name != "toolkit":
                found.append(f"{name} imports {other}")
    return sorted(found)


def inner_imports() -> Counter[str]:
    """Imports inside functions, by what they import."""
    found: Counter[str] = Counter()
    known = modules()
    for path in known.values():
        for function in _functions(path):
            for name in imported(function, known):
                first = name.partition(".")[0]
                found[first if first in ("toolkit", "torch") else "other packages"] += 1
    return found


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The outermost functions and methods of a file."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            else:
                waiting.append(node)


def functions() -> Iterator[tuple[int, str]]:
    """Each outermost function of toolkit/ with its lines."""
    for path in modules().values():
        for node in _functions(path):
            assert node.end_lineno
            yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}"


def report() -> str:
    """The tables in Markdown."""
    by_room, edges = rooms(), graph()
    small = [path for path in modules().values() if path.name != "__init__.py" and lines(path) < SMALL]
    inside = ", ".join(f"{count} of {name}" for name, count in inner_imports().most_common())
    rings = [f"- {', '.join(it.removeprefix('toolkit.') for it in ring)}" for ring in circles(edges)]
    facts = {
        "lines": f"{by_room.total():,}",
        "files": f"{len(edges)}",
        f"files under {SMALL} lines": f"{len(small)}",
        "circles": f"{len(rings)}",
        "climbs": f"{len(climbs(edges))}",
        "imports inside functions": inside,
        "private names of torch, all in compat.py": f"{len(PRIVATE)}",
    }
    return "\n".join(
        [
            "# Size", "", "`python -m benchmarks.size`: toolkit/, lines with comments and docstrings.", "",
            "| what | how many |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()),
            "", "| room | lines |", "|---|---|",
            *(f"| {room} | {size:,} |" for room, size in by_room.most_common()),
            "", "Circles:", "", *(rings or ["none"]),
            "", "| largest functions | lines |", "|---|---|",
            *(f"| {name} | {size} |" for size, name in sorted(functions(), reverse=True)[:LARGEST]),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
