"""The command ``llama-toolkit``, or ``python -m toolkit``, with one subcommand per task. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from toolkit import __version__
from toolkit.commands import COMMANDS, NAME
from toolkit.errors import EXIT_CONFIG, EXIT_FINISHED, ToolkitError, did_you_mean, report
from toolkit.io import standard_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named by the first argument and return its exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return EXIT_FINISHED
    if name == "--version":
        print(f"{NAME} {__version__}")
        return EXIT_FINISHED
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS, f"`{NAME} --help` lists them")
        print(f"error: {name!r} is not a command of {NAME}\n  fix:  {fix}", file=sys.stderr)
        return EXIT_CONFIG
    command = COMMANDS[name]
    standard_streams.protect(end_with_reader=command.only_prints)
    if name != "chat":  # there, Ctrl-C interrupts an answer
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run_command(name, words)
    return standard_streams.exit_code(code) if command.only_prints else code


def run_command(name: str, words: Sequence[str]) -> int:
    """Run a subcommand and return its exit code; the reporting rank prints the error that ends it."""
    try:
        return COMMANDS[name].main(name)(words)
    except ToolkitError as error:
        from toolkit.config import asks_for_tracebacks  # with pydantic, which `--help` does not need
        from toolkit.launcher.environment import is_reporting_rank

        return report(error, show=is_reporting_rank(os.environ), debug=asks_for_tracebacks(words))


def help_text() -> str:
    """Return the list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return "\n".join(
        [
            f"usage: {NAME} COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            f"`{NAME} COMMAND --help` explains one. `{NAME} train` trains a small model on included text.",
        ]
    )
