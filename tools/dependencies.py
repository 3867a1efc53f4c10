"""Print the missing dependencies of this project, nothing if all are installed.

    python tools/dependencies.py [EXTRA]

Reads versions from the metadata of installed packages, which takes milliseconds. Needs only the standard
library, ``packaging`` and, on Python 3.10, ``tomli``.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def missing(project: Mapping[str, Any], extra: str = "") -> Iterator[str]:
    """Yield "name" or "name 1.0 (needs >=2)" for each unmet requirement of ``project`` with ``extra``."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(project.get("requires-python", "")).contains(platform.python_version()):
        yield f"Python {platform.python_version()} (needs {project['requires-python']})"
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(extras[extra] if extra else ())]
    while wanted:
        requirement = Requirement(wanted.pop(0))
        if requirement.marker and not requirement.marker.evaluate():
            continue
        if requirement.name == project["name"]:  # an extra that includes another
            wanted += [item for name in requirement.extras for item in extras[name]]
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield requirement.name
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} {found} (needs {requirement.specifier})"


def main() -> int:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        lacking = list(missing(tomllib.loads(PYPROJECT.read_text())["project"], *sys.argv[1:2]))
    except ModuleNotFoundError as error:
        lacking = [str(error.name)]
    print(", ".join(lacking))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
