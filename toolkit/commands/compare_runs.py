"""Find the first step at which two runs differ in any bit, and show the difference.

    llama-toolkit compare-runs outputs/a outputs/b

Compares losses and gradient norms of metrics.jsonl, and the fingerprints of gradients, weights and optimizer
state that ``metrics.fingerprint_every`` writes, on the steps that both runs have. Exits with 0 if all are
equal, 1 if something differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.commands.arguments import command_parser, local_path
from toolkit.commands.plot import read_run
from toolkit.errors import DataError
from toolkit.metrics.jsonl import FINGERPRINTS

LOGGED = ("loss", "grad_norm", "validation_loss")
KINDS = ("gradients", "weights", "optimizer")
_ORDER = ("loss", "gradients", "grad_norm", "weights", "optimizer", "validation_loss")
"""Order in which a step computes them."""
_NAMED = 5
"""Number of names that are shown."""

Steps = dict[int, dict[str, Any]]


def read_steps(folder: Path) -> Steps:
    """Read the values of each step of a run that can be compared.

    Raises:
        DataError: the folder has no metrics.jsonl.
    """
    steps: Steps = {}
    for record in read_run(folder):
        values = {key: record[key] for key in LOGGED if key in record}
        if values:
            steps.setdefault(record["step"], {}).update(values)
    if (folder / FINGERPRINTS).exists():
        for record in read_run(folder, FINGERPRINTS):
            steps.setdefault(record["step"], {}).update({kind: record[kind] for kind in KINDS})
    return steps


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Describe the differences of a step, in the order of their computation; empty if there are none."""
    lines = []
    for key in _ORDER:
        if key not in a or key not in b or a[key] == b[key]:
            continue
        if key not in KINDS:
            lines.append(f"{key}: {a[key]!r} and {b[key]!r}")
            continue
        names = [
            name
            for name in [*a[key], *(b[key].keys() - a[key].keys())]
            if a[key].get(name) != b[key].get(name)
        ]
        shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        lines.append(f"{key} of {len(names)} of {len(a[key])}: {shown}")
    return lines


def main(argv: Sequence[str]) -> int:
    parser = command_parser("compare-runs", __doc__)
    parser.add_argument("a", type=local_path, metavar="RUN", help="folder of a run")
    parser.add_argument("b", type=local_path, metavar="OTHER", help="folder of another run")
    options = parser.parse_args(argv)
    a, b = read_steps(options.a), read_steps(options.b)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise DataError(
            f"{options.a} and {options.b} have no step in common\n"
            "  fix:  compare runs with the same metrics.log_freq, or the same metrics.fingerprint_every"
        )
    hashed = [step for step in common if "weights" in a[step] and "weights" in b[step]]
    about = f"fingerprints of {len(hashed)}" if hashed else "no fingerprints (metrics.fingerprint_every)"
    print(f"compared steps {common[0]} to {common[-1]}, {len(common)} in all, {about}")
    for step in common:
        if lines := difference(a[step], b[step]):
            print(f"first difference: step {step}")
            before = [it for it in hashed if it < step]
            for line in lines:
                print(f"  {line}")
            if before and before[-1] < step - 1:
                print(f"  fingerprints are equal up to step {before[-1]}")
            return 1
    print("equal, bit for bit")
    return 0
