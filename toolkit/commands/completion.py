"""Print the completion script of a shell.

    eval "$(llama-toolkit completion bash)"     in ~/.bashrc
    eval "$(llama-toolkit completion zsh)"      in ~/.zshrc, after compinit
    llama-toolkit completion fish | source      in ~/.config/fish/config.fish

Completes commands, presets, flags, config keys and those of their values that can be listed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout, suppress
from typing import Literal, get_args, get_origin

from toolkit.commands import COMMANDS
from toolkit.commands.arguments import command_parser
from toolkit.config import presets
from toolkit.config.schema import fields, find_field
from toolkit.errors import EXIT_FINISHED

SCRIPTS = {
    "bash": """\
_llama_toolkit() {
  local IFS=$'\\n'
  COMPREPLY=($(llama-toolkit completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _llama_toolkit llama-toolkit
""",
    "zsh": """\
_llama_toolkit() {
  local -a found
  found=("${(@f)$(llama-toolkit completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n $found ]]; then compadd -a found; else _files; fi
}
compdef _llama_toolkit llama-toolkit
""",
    "fish": """\
complete -c llama-toolkit -a '(llama-toolkit completion words (commandline -opc)[2..] (commandline -ct))'
""",
}
_TAKE_CONFIGS = {
    "train", "preflight", "plan", "draw-plan", "inspect-data", "prepare-data", "check-cluster",
}  # fmt: skip
_TAKE_PRESETS = {"configs"}
_ACTIONS = {"configs": ("list", "show", "copy"), "completion": tuple(SCRIPTS)}


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of ``words``, the words after ``llama-toolkit``."""
    *before, last = words or [""]
    return sorted({word for word in _possible(before, last) if word.startswith(last)})


def _possible(before: Sequence[str], last: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version"]
    name = before[0]
    if name not in COMMANDS:
        return []
    if last.startswith("-"):
        keys = [f"--{field.key}" for field in fields()] if name in _TAKE_CONFIGS else []
        return [*keys, *_flags(name)]
    if before[-1].startswith("--"):
        return _values(before[-1].removeprefix("--"))
    if len(before) == 1:
        return [*_ACTIONS.get(name, ()), *(presets.names() if name in _TAKE_CONFIGS else ())]
    return presets.names() if name in _TAKE_PRESETS else []


def _flags(name: str) -> list[str]:
    """Return the flags in the help of a command, except config keys."""
    if name in ("train", "preflight"):
        return ["--help"]
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        COMMANDS[name].main(name)(["--help"])
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w.-])", text.getvalue())


def _values(key: str) -> list[str]:
    found = find_field(key)
    choices = get_args(found.annotation) if found and get_origin(found.annotation) is Literal else ()
    return ["true", "false"] if found and found.annotation is bool else [str(choice) for choice in choices]


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    if argv[:1] == ["words"]:  # as the scripts call it
        print("\n".join(candidates(argv[1:])))
        return EXIT_FINISHED
    parser = command_parser("completion", __doc__)
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL")
    print(SCRIPTS[parser.parse_args(argv).shell], end="")
    return EXIT_FINISHED
