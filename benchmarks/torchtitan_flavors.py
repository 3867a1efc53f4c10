"""torchtitan 0.2.2's integration tests for Llama 3, their flags unchanged, run by this toolkit on a CPU.

    python -m benchmarks.torchtitan_flavors [--only NAME …] [--folder FOLDER]
                                            [--output docs/torchtitan_flavors.md]

``tests/torchtitan_flavors.py`` has the flags. What they are added to is torchtitan's configuration with a
sequence length of 256. Flavors are kept in FOLDER as they end, and one that has ended well is not run again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.resumable import Kept, Results, command_line, part, publish
from tests.torchtitan_flavors import CONFIG_FILE, FLAVORS, GENERATE, Flavor
from toolkit.errors import EXIT_CONFIG

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN = 256
LIMIT_SECONDS = 900.0
BY_NAME = {flavor.name: flavor for flavor in FLAVORS}


def run_flavor(flavor: Flavor, folder: Path, cache: Path) -> dict[str, Any]:
    """Give the commands of ``flavor`` one after another; return how each ended, or the first ``failure``."""
    shutil.rmtree(folder, ignore_errors=True)
    endings = []
    for flags in flavor.commands:
        before = len(_losses(folder))
        command = _command(flags, folder, cache)
        environment = os.environ | {"NGPU": str(flavor.ranks), "CONFIG_FILE": str(CONFIG_FILE)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"no end in {LIMIT_SECONDS:.0f} s"}
        losses = _losses(folder)
        if len(losses) > before:  # the run has gone on; another run begins another file
            losses = losses[before:]
        if flavor.refused and done.returncode == EXIT_CONFIG and f"{flavor.refused} = " in done.stderr:
            endings.append(f"refused: {_rule(done.stderr, flavor.refused)}")
        elif flavor.refused or done.returncode or not (losses or flags == GENERATE):
            return {"failure": f"exit {done.returncode}: {(done.stdout + done.stderr)[-600:]}"}
        elif flags == GENERATE:
            endings.append("text")
        else:
            (first, at_first), (last, at_last) = losses[0], losses[-1]
            endings.append(f"loss {at_first:.3f} in step {first}, {at_last:.3f} in step {last}")
    return {"endings": endings}


def _command(flags: str, folder: Path, cache: Path) -> list[str]:
    if flags == GENERATE:
        return [
            sys.executable,
            "-m",
            "toolkit",
            "generate",
            str(folder),
            "--prompt",
            "What is the meaning of life?",
        ]
    words = shlex.split(flags.format(folder=folder))
    ours = ["--training.seq_len", SEQ_LEN, "--job.dump_folder", folder, "--data.cache_folder", cache]
    return ["./run_train.sh", *words, *map(str, ours)]


def _losses(folder: Path) -> list[tuple[int, float]]:
    file = folder / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def _rule(message: str, key: str) -> str:
    """The last rule that ``message`` names for ``key``."""
    return re.findall(rf"{re.escape(key)} = .*\n  rule: (.*)", message)[-1]


def report(results: dict[str, Kept], machine: str) -> str:
    """The table in Markdown, a line a command."""
    done = [results[flavor.name] for flavor in FLAVORS if flavor.name in results]
    failures = [kept for kept in done if "failure" in kept]
    refused = sum(bool(BY_NAME[kept["row"]].refused) for kept in done)
    lines = [
        "# torchtitan's integration tests",
        "",
        f"`python -m benchmarks.torchtitan_flavors` runs the {len(FLAVORS)} enabled Llama 3 flavors of "
        "torchtitan 0.2.2's integration tests on a CPU. It uses torchtitan's configuration at "
        f"`training.seq_len` {SEQ_LEN}, and the flags of each flavor unchanged. The commands of a flavor run "
        f"one after another in the same folder. {len(done) - refused - len(failures)} flavors ran, {refused} "
        f"were rejected before launch, and {len(failures)} failed. {machine}",
        "",
        "| flavor | ranks | flags | ended with |",
        "|---|---|---|---|",
    ]
    for kept in done:
        flavor = BY_NAME[kept["row"]]
        endings = kept.get("endings") or [f"**failed**: {kept['failure'].strip().splitlines()[-1]}"]
        for flags, ending in zip(flavor.commands, endings, strict=False):
            shown = "`llama-toolkit generate`" if flags == GENERATE else f"`{flags}`"
            lines.append(f"| {flavor.name} | {flavor.ranks} | {shown} | {ending} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command_line(__doc__.partition("\n")[0], name="torchtitan_flavors")
    parser.add_argument("--only", nargs="+", choices=BY_NAME, help="these flavors", default=list(BY_NAME))
    options = parser.parse_args()
    machine = describe()
    results = Results(options.folder, str, BY_NAME.__contains__)
    results.forget_failures()
    for name in part(options.only, options.part):
        if name not in results.all():
            kept = run_flavor(BY_NAME[name], options.folder / name, options.folder / "cache")
            results.keep(name, kept)
            print(name, kept.get("endings") or kept["failure"], flush=True)
    publish(report(results.all(), machine), options.output)


if __name__ == "__main__":
    main()
