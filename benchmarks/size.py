"""How much code a reader and an interpreter meet: lines by program, by room, and the largest functions.

    python -m benchmarks.size [--output benchmarks/results/size.md]

Lines are those of files, with their comments and docstrings. A program's are those of the modules of
toolkit/ that it has imported when it ends; each trains one step of train_configs/debug_model.toml on one
process, without checkpoints and validation unless it says so. "first run" is `python -m toolkit.train`
without a token cache, the others are what run_train.sh starts after it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"first run": 9500, "rank": 8000, "launcher": 6500, "toolkit/": 17000}
"""Lines at most; toolkit/ is all of it."""
SAVING = "rank that validates and saves"
LARGEST = 10
NOTE_MODULES = """
import atexit, json, os, pathlib, sys

def note():
    main = getattr(sys.modules["__main__"], "__spec__", None)
    names = [name for name in sys.modules if name.partition(".")[0] == "toolkit"]
    if main and main.name.startswith("toolkit."):
        folder = pathlib.Path(os.environ["MODULES_FOLDER"])
        (folder / f"{main.name}-{os.getpid()}.json").write_text(json.dumps([main.name, *names]))

atexit.register(note)
"""


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def path_of(module: str) -> Path:
    stem = ROOT / module.replace(".", "/")
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def imported(folder: Path, name: str, module: str) -> set[Path]:
    """The files of toolkit/ that a step of ``python -m module`` imports, helpers that tokenise left out."""
    site, notes = folder / "site", folder / name
    site.mkdir(exist_ok=True)
    notes.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(NOTE_MODULES)
    environ = os.environ | {
        "PYTHONPATH": f"{site}:{ROOT}", "MODULES_FOLDER": str(notes), "NGPU": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", module, "--job.config_file", "train_configs/debug_model.toml"]
    options = [f"--job.dump_folder={folder / 'run'}", f"--data.cache_folder={folder / 'cache'}"]
    options += ["--training.steps=1"]
    if name != SAVING:
        options += ["--checkpoint.enable=false", "--validation.enable=false"]
    subprocess.run([*command, *options], check=True, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    wanted = "toolkit.train" if name in ("rank", SAVING) else module
    [note] = notes.glob(f"{wanted}-*.json")
    return {path_of(module) for module in json.loads(note.read_text())}


def programs() -> dict[str, int]:
    """Lines that each program imports."""
    with tempfile.TemporaryDirectory() as folder:
        modules = {
            "first run": "toolkit.train",
            "launcher": "toolkit.launch",
            "rank": "toolkit.launch",
            SAVING: "toolkit.launch",
        }
        return {
            name: sum(map(lines, imported(Path(folder), name, module))) for name, module in modules.items()
        }


def rooms() -> Counter[str]:
    """Lines of each folder of toolkit/, and of the files beside them."""
    found: Counter[str] = Counter()
    for path in (ROOT / "toolkit").rglob("*.py"):
        parts = path.relative_to(ROOT / "toolkit").parts
        found[f"{parts[0]}/" if len(parts) > 1 else "(files)"] += lines(path)
    return found


def functions() -> Iterator[tuple[int, str]]:
    """Each function of toolkit/ with its lines."""
    for path in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}"


def report() -> str:
    """The tables in Markdown."""
    by_room = rooms()
    sizes = programs() | {"toolkit/": by_room.total()}
    rows = [f"| {name} | {size:,} | {_kept(name, size)} |" for name, size in sizes.items()]
    return "\n".join(
        [
            "# Size", "", "`python -m benchmarks.size`: lines with comments and docstrings.", "",
            "| what is imported, or there | lines | limit | |", "|---|---|---|---|", *rows, "",
            "| room | lines |", "|---|---|",
            *(f"| {room} | {size:,} |" for room, size in by_room.most_common()),
            "", "| largest functions | lines |", "|---|---|",
            *(f"| {name} | {size} |" for size, name in sorted(functions(), reverse=True)[:LARGEST]),
        ]
    )  # fmt: skip


def _kept(name: str, size: int) -> str:
    if name not in LIMITS:
        return "|"
    over = size - LIMITS[name]
    return f"{LIMITS[name]:,} | {'kept' if over <= 0 else f'{over:,} over'}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
