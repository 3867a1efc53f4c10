"""``llama-toolkit preflight CONFIG.toml [--world-size N] [--table.key value …]``"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from toolkit import preflight
from toolkit.config import Config, asks_for_tracebacks
from toolkit.config.types import MAX_RANKS
from toolkit.errors import EXIT_FINISHED, ConfigError, Problem, ToolkitError, report
from toolkit.hardware import Hardware
from toolkit.io import standard_streams
from toolkit.launcher.environment import is_number, whole_number

_WORLD_SIZE = "--world-size"


def main(argv: Sequence[str]) -> int:
    """Check a config, print a description of its run and return the exit code."""
    words = [*argv]
    try:
        world_size, words = _world_size(argv)

        def check(config: Config) -> tuple[int, Hardware]:
            hardware = preflight.hardware_of(config)
            ranks = world_size or whole_number(os.environ, "WORLD_SIZE", hardware.count, 1, MAX_RANKS)
            preflight.raise_problems(config, world_size=ranks, hardware=hardware)
            return ranks, hardware

        config = preflight.load(words, check)
        ranks, hardware = check(config)
        about = preflight.describe(config, world_size=ranks, hardware=hardware)
    except ToolkitError as error:
        return report(error, show=True, debug=asks_for_tracebacks(words))
    if config.job.print_config:
        print(config.to_toml())
    print(f"OK     {config.job.config_file or 'defaults'}")
    print(about)
    return EXIT_FINISHED


def _world_size(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split ``--world-size N`` off the arguments."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == _WORLD_SIZE:
            words += [_WORLD_SIZE, value] if equals else [_WORLD_SIZE]
        else:
            words.append(word)
    if _WORLD_SIZE not in words:
        return None, words
    place = words.index(_WORLD_SIZE)
    text = words[place + 1] if place + 1 < len(words) else ""
    if not is_number(text) or not 1 <= int(text) <= MAX_RANKS:
        raise ConfigError(
            Problem(
                f"must be a whole number from 1 to {MAX_RANKS}",
                f"for example {_WORLD_SIZE} 8",
                _WORLD_SIZE,
                text,
                "command line",
            )
        )
    return int(text), [*words[:place], *words[place + 2 :]]


if __name__ == "__main__":
    standard_streams.protect(end_with_reader=True)
    sys.exit(standard_streams.exit_code(main(sys.argv[1:])))
