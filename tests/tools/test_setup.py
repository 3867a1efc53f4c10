"""Set-up and run script with a stand-in for Python that notes what it is asked to install and to start."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.registry import known_implementations
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from toolkit.compat import tomllib
from tools.dependencies import missing

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]
COMMANDS = """
bash cat chmod cksum cp dirname env find flock grep head mkdir printf readlink rm sed sleep tail touch
"""
# The Python that runs the tests, or 3.$MINOR. "-m venv DIR" copies itself there; pip notes its arguments,
# waits while there is a pipe, fails if told to.
STAND_IN = f"""#!/usr/bin/env bash
here=$STAND_IN_NOTES
case "$*" in
  "-c import ensurepip, venv") [[ ! -e $here/no-venv ]] ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*)
    printf '%s\\n' "$*" >>"$here/pip"
    if [[ -p $here/wait ]]; then cat "$here/wait"; fi
    if [[ -e $here/fail ]]; then echo "ERROR: no such version" >&2; exit 1; fi ;;
  *dependencies.py*) [[ -e $here/complete ]] || {{ echo torch, numpy; exit 1; }} ;;
  "-m toolkit.launch"*) printf '%s\\n' "$PWD" "$@" >"$here/launch" ;;
  "-c import sys; "*) exec {sys.executable} -c "import sys; ${{MINOR:+sys.version_info = (3, $MINOR)}}
${{2#import sys; }}" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


class Sandbox:
    """A repository with the scripts alone, and a PATH on which the only Python is the stand-in."""

    def __init__(self, folder: Path):
        self.root, self.notes, self.bin = folder / "repository", folder / "notes", folder / "bin"
        for path in (self.root / "tools", self.notes, self.bin):
            path.mkdir(parents=True)
        for name in (
            "run_train.sh",
            "tools/setup.sh",
            "tools/dependencies.py",
            "pyproject.toml",
            "constraints.txt",
        ):
            shutil.copy(ROOT / name, self.root / name)
        for command in COMMANDS.split():
            found = shutil.which(command)
            if found:
                (self.bin / command).symlink_to(found)
        self.add_python("python3")
        self.environment = {"PATH": str(self.bin), "STAND_IN_NOTES": str(self.notes)}

    def add_python(self, name: str, text: str = STAND_IN) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *command: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.environment,
            cwd=cwd or self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(self.root / "tools" / "setup.sh", *arguments)
        out, err = process.communicate(timeout=30)
        return process.returncode, out.strip(), err

    def installed(self) -> list[str]:
        """Requests to pip, one for each call."""
        notes = self.notes / "pip"
        return [line.split()[-1] for line in notes.read_text().splitlines()] if notes.exists() else []


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    yield Sandbox(tmp_path)


def test_the_active_python_is_used_if_it_has_everything(sandbox):
    (sandbox.notes / "complete").touch()
    assert sandbox.set_up()[:2] == (0, sys.executable)
    assert sandbox.installed() == [] and not (sandbox.root / ".venv").exists()


def test_a_venv_is_made_once_and_again_only_for_other_requirements(sandbox):
    python = str(sandbox.root / ".venv/bin/python")
    assert sandbox.set_up()[:2] == (0, python)
    assert "constraints.txt" in (sandbox.notes / "pip").read_text()
    assert sandbox.set_up() == (0, python, "")
    assert sandbox.installed() == [f"{sandbox.root}"]
    assert sandbox.set_up("test")[:2] == (0, python)
    assert sandbox.set_up("test")[:2] == (0, python)
    assert sandbox.set_up()[:2] == (0, python)
    assert sandbox.installed() == [f"{sandbox.root}", f"{sandbox.root}[test]"]
    with (sandbox.root / "constraints.txt").open("a") as constraints:
        constraints.write("six==1.17.0\n")
    assert sandbox.set_up()[:2] == (0, python)
    assert len(sandbox.installed()) == 3


def test_check_installs_nothing(sandbox):
    assert sandbox.set_up("--check") == (1, "", "")
    assert not (sandbox.root / ".venv").exists()


def test_a_failed_installation_says_why_and_is_done_again_from_nothing(sandbox):
    (sandbox.notes / "fail").touch()
    code, out, err = sandbox.set_up()
    assert code != 0 and out == "" and "ERROR: no such version" in err
    (sandbox.root / ".venv/half-installed").touch()
    (sandbox.notes / "fail").unlink()
    code, _, err = sandbox.set_up()
    assert code == 0 and "interrupted" in err
    assert not (sandbox.root / ".venv/half-installed").exists()


def test_an_extra_that_cannot_be_installed_costs_nothing(sandbox):
    assert sandbox.set_up()[0] == 0
    (sandbox.root / ".venv/package").touch()
    (sandbox.notes / "fail").touch()
    assert sandbox.set_up("test")[0] != 0
    assert sandbox.set_up()[0] == 0 and len(sandbox.installed()) == 2
    (sandbox.notes / "fail").unlink()
    assert sandbox.set_up("test")[0] == 0
    assert (sandbox.root / ".venv/package").exists()


def test_an_installation_that_is_cut_short_is_done_again_from_nothing(sandbox):
    assert sandbox.set_up()[0] == 0
    os.mkfifo(sandbox.notes / "wait")
    killed = sandbox.start(sandbox.root / "tools" / "setup.sh", "test")
    (sandbox.notes / "wait").open("w").close()  # pip has begun
    killed.kill()
    killed.communicate(timeout=20)
    (sandbox.notes / "wait").unlink()
    (sandbox.root / ".venv/half-installed").touch()
    code, _, err = sandbox.set_up()
    assert code == 0 and "interrupted" in err
    assert not (sandbox.root / ".venv/half-installed").exists()


def test_an_active_venv_is_no_base_of_its_own(sandbox):
    """As its activation puts it before the other Pythons, or as the only one."""
    (sandbox.notes / "fail").touch()
    assert sandbox.set_up()[0] != 0
    (sandbox.notes / "fail").unlink()
    scripts = sandbox.root / ".venv/bin"
    (scripts / "python3").symlink_to("python")
    sandbox.environment["PATH"] = f"{scripts}:{sandbox.bin}"
    code, _, err = sandbox.set_up()
    assert code == 0 and "interrupted" in err and f"({sandbox.bin}/python3)" in err
    (scripts / "python3").symlink_to("python")
    (sandbox.bin / "python3").unlink()
    assert sandbox.set_up("test")[0] == 0


def test_two_set_ups_at_once_install_once(sandbox):
    os.mkfifo(sandbox.notes / "wait")
    script = sandbox.root / "tools" / "setup.sh"
    first = sandbox.start(script)
    end = time.monotonic() + 20
    while not sandbox.installed() and time.monotonic() < end:
        time.sleep(0.02)
    second = sandbox.start(script)
    assert "waiting" in second.stderr.readline()
    (sandbox.notes / "wait").write_text("go\n")
    for process in (first, second):
        assert process.communicate(timeout=20)[0].strip() == str(sandbox.root / ".venv/bin/python")
    assert len(sandbox.installed()) == 1


def test_a_venv_that_someone_else_made_is_left_alone(sandbox):
    (sandbox.root / ".venv/bin").mkdir(parents=True)
    (sandbox.bin / "python3").rename(sandbox.root / ".venv/bin/python")
    sandbox.add_python("python3")
    code, _, err = sandbox.set_up()
    assert code == 1 and "torch, numpy" in err and "fix:" in err
    assert sandbox.installed() == []


def test_a_command_that_only_pretends_to_be_python_is_passed_over(sandbox):
    sandbox.add_python("python3", "#!/usr/bin/env bash\necho 'python3: command not found' >&2; exit 127\n")
    sandbox.add_python("python3.12", "#!/usr/bin/env bash\nexit 127\n")
    code, _, err = sandbox.set_up()
    assert code == 1 and f"no Python {PYTHONS[0]} to {PYTHONS[-1]} found" in err
    assert "apt install python3-venv" in err and "dnf install python3 " in err
    sandbox.add_python("python3.11")
    assert sandbox.set_up()[0] == 0


@pytest.mark.parametrize("minor", [9, *(int(python[2:]) for python in PYTHONS), 15])
def test_the_pythons_of_pyproject_are_used_and_no_others(sandbox, minor):
    sandbox.environment["MINOR"] = str(minor)
    code, _, err = sandbox.set_up()
    assert (code == 0) == (f"3.{minor}" in PYTHONS), err


@pytest.mark.parametrize("name", [f"python{python}" for python in PYTHONS])
def test_a_python_that_is_not_the_system_s_is_found(sandbox, name):
    (sandbox.bin / "python3").unlink()
    sandbox.add_python(name)
    assert sandbox.set_up()[0] == 0


def test_a_python_without_venv_names_the_package(sandbox):
    (sandbox.notes / "no-venv").touch()
    code, _, err = sandbox.set_up()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert code == 1 and f"apt install python{version}-venv" in err


def test_the_run_script_works_from_anywhere_and_through_a_link(sandbox, tmp_path):
    link = tmp_path / "train"
    link.symlink_to(sandbox.root / "run_train.sh")
    config = tmp_path / "mine.toml"
    config.touch()
    sandbox.environment["CONFIG_FILE"] = "mine.toml"
    assert sandbox.start(link, "--training.steps", "a b", cwd=tmp_path).wait(timeout=20) == 0
    where, *command = (sandbox.notes / "launch").read_text().splitlines()
    assert where == str(sandbox.root)
    assert command == ["-m", "toolkit.launch", "--job.config_file", str(config), "--training.steps", "a b"]


def test_help_needs_no_set_up(sandbox):
    process = sandbox.start(sandbox.root / "run_train.sh", "--help")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "NGPU" in out and sandbox.installed() == []


def test_missing_dependencies_are_named_with_versions():
    project = {
        "name": "this",
        "requires-python": ">=3",
        "dependencies": [
            "packaging>=1",
            "numpy>=999",
            "no-such-package-here>1",
            "nor-this; python_version < '3'",
        ],
        "optional-dependencies": {"test": ["pytest>=999"], "dev": ["this[test]", "absent-too"]},
    }
    base = list(missing(project))
    assert base[0].startswith("numpy ") and base[0].endswith("(needs >=999)")
    assert base[1:] == ["no-such-package-here"]
    names = [item.split()[0] for item in missing(project, "dev")]
    assert sorted(names) == ["absent-too", "no-such-package-here", "numpy", "pytest"]
    (python,) = missing({"requires-python": "<3", "dependencies": [], "optional-dependencies": {}})
    assert python.startswith("Python 3.") and "needs <3" in python


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_give_each_requirement_one_version_that_it_takes(python):
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pinned: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(where):
                (version,) = pin.specifier
                pinned.setdefault(canonicalize_name(pin.name), []).append(version.version)
    assert {name: versions for name, versions in pinned.items() if len(versions) > 1} == {}
    for text in [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]:
        requirement = Requirement(text)
        needed = requirement.marker is None or requirement.marker.evaluate(where)
        if needed and requirement.name != PROJECT["name"]:  # an extra that includes others
            assert pinned[canonicalize_name(requirement.name)][0] in requirement.specifier, text


def test_each_extra_is_imported_by_some_code():
    used = set()
    for file in (file for folder in ("toolkit", "tools") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                used.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Import):
                used.update(name.name.split(".")[0] for name in node.names)
    assert "fsspec" in used  # which imports a store's package when its URL is named
    used |= {str(entry["class"]).partition(".")[0] for entry in known_implementations.values()}
    for extra in PROJECT["optional-dependencies"].keys() - {"test", "dev", "docs"}:  # programs
        packages = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
        modules = {name: name.removesuffix("-skinny").replace("-", "_") for name in packages}
        assert {name for name, module in modules.items() if module not in used} == set(), extra
