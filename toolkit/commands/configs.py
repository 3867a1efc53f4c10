"""List, show and copy the presets.

    llama-toolkit configs                           list them
    llama-toolkit configs show llama3_8b            print one
    llama-toolkit configs copy llama3_8b mine.toml  copy one, to be changed (default: its name in this folder)

Every command accepts a preset's name instead of a config file. A copy that extends another preset names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.arguments import command_parser, local_path, writes
from toolkit.config import presets
from toolkit.errors import EXIT_FINISHED, ConfigError, Problem, did_you_mean

_EXTENDS = re.compile(r'^extends = "(.+)"$', re.MULTILINE)
_SCHEMA = re.compile(r"^#:schema .*\n")


def text_of(name: str) -> str:
    """Return the text of a preset, adjusted for a file outside of its folder.

    Raises:
        ConfigError: there is no such preset.
    """
    known = presets.names()
    if name not in known:
        fix = did_you_mean(name, known, "`llama-toolkit configs` lists them")
        raise ConfigError(Problem("there is no such preset", fix, "NAME", name, "command line"))
    file = presets.folder() / f"{name}.toml"

    def by_name(extends: re.Match[str]) -> str:
        base = (file.parent / extends[1]).resolve().relative_to(presets.folder().resolve())
        return f'extends = "{base.with_suffix("").as_posix()}"'

    return _EXTENDS.sub(by_name, _SCHEMA.sub("", file.read_text()))


def summary(name: str) -> str:
    """Return the first sentence of a preset's comment."""
    lines = text_of(name).splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[: _comment_lines(lines)])
    return re.split(r"(?<=\.)\s|:\s", f"{comment} ")[0].rstrip(" .:")


def _comment_lines(lines: Sequence[str]) -> int:
    return next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))


def copy(name: str, file: Path) -> None:
    """Copy a preset to ``file``.

    Raises:
        ConfigError: there is no such preset, or the file exists or cannot be written.
    """
    text = text_of(name)
    with writes("FILE", file), file.open("x", encoding="utf-8") as new:
        new.write(text)


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = command_parser("configs", __doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list")
    actions.add_parser("show").add_argument("name", metavar="NAME")
    copying = actions.add_parser("copy")
    copying.add_argument("name", metavar="NAME")
    copying.add_argument("file", metavar="FILE", type=local_path, nargs="?")
    asked = parser.parse_args(argv)
    if asked.action == "show":
        print(text_of(asked.name), end="")
    elif asked.action == "copy":
        file = asked.file or Path(f"{Path(asked.name).name}.toml")
        copy(asked.name, file)
        print(f"{file}: train it with `llama-toolkit train {file}`")
    else:
        width = max(map(len, presets.names()))
        print("\n".join(f"{name:{width}}  {summary(name)}" for name in presets.names()))
    return EXIT_FINISHED
