"""A ``sitecustomize.py`` that changes a method in one rank of a run, as the module is imported."""

from __future__ import annotations

_TEXT = """
import importlib.abc, importlib.util, os, signal, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "MODULE":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.METHOD = sabotaged(module.METHOD)

        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "BAD_RANK":
    sys.meta_path.insert(0, Finder())
"""


def sabotage(at: str, sabotaged: str, *, rank: int) -> str:
    """The text that has ``rank`` run what ``sabotaged`` makes of a method; ``at`` is module:Class.method, and
    ``sabotaged`` the source of a function of that name, from the method to the one in its place."""
    module, _, method = at.partition(":")
    text = _TEXT.replace("MODULE", module).replace("METHOD", method).replace("BAD_RANK", str(rank))
    return text + sabotaged
