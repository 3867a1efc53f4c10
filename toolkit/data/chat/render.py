"""Render chat templates in a separate process with time and memory limits.

A template comes with a downloaded model. jinja's sandbox restricts what a template can access, but does not
prevent infinite loops or unbounded texts, which can occur even during compilation. The process serves one
template, with one line of JSON per request and reply, and exits with its parent. The process imports jinja
but no module of this toolkit.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10
"""CPU time limit, in seconds, to render a dialog; the slowest templates take milliseconds."""
SECONDS_TO_COMPILE = 2
"""CPU time limit, in seconds, to compile a template; the longest templates of models take tens of ms."""
_PATIENCE = 20
"""Ratio of the wall-time limit to the CPU time limit, for a busy machine."""
MEMORY_BYTES = 1 << 30
"""Memory limit of the process; Python and jinja take about 50 MB of it."""
MAX_TEXT = 50_000_000
BEGIN, END = "__generation_begins", "__generation_ends"
"""Variables for the marks around the content of ``{% generation %}``."""
_ROOT = Path(__file__).parents[3]


class RenderError(Exception):
    """A template is invalid, rejects its messages, or takes too much time or memory."""


class LimitedTemplate:
    """A compiled template; each process that renders it starts its own rendering process.

    ``day``, if given, is the current date for the template; ``used`` are the variables that it reads but does
    not set.

    Raises:
        RenderError: It is not a valid template.
    """

    def __init__(self, source: str, day: datetime | None = None):
        self._source, self._day = source, day
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def __reduce__(self) -> tuple[type, tuple[str, datetime | None]]:
        return type(self), (self._source, self._day)

    def render(self, **values: Any) -> str:
        """Render the template with ``values`` of JSON types.

        Raises:
                RenderError: The template rejects the values, or exceeds a limit.
        """
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._start()
        return self._ask(values, SECONDS)["text"]

    def _start(self) -> None:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._owner = os.getpid()
        weakref.finalize(self, self._process.kill)
        day = self._day.isoformat() if self._day else None
        self.used = set(self._ask({"source": self._source, "day": day}, SECONDS_TO_COMPILE)["used"])

    def _ask(self, values: dict[str, Any], seconds: int) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps([seconds, values], default=str).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], seconds * _PATIENCE)
            reply = json.loads(process.stdout.readline()) if ready else {}
        except (OSError, ValueError):  # the process died, by a limit of time, memory or stack
            reply = {}
        if reply and "error" not in reply:
            return reply
        if "error" in reply:
            raise RenderError(reply["error"])
        process.kill()
        late = process.wait() == -signal.SIGXCPU or not ready
        raise RenderError(f"it takes more than {f'{seconds} s' if late else f'{MEMORY_BYTES >> 20:,} MiB'}")


def _environment(day: datetime | None) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: (day or datetime.now()).strftime(form)
    return environment


class _Generation(Extension):
    """Renders the content of ``{% generation %}``, the assistant's text, between two marks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in (BEGIN, END))
        return [begin, *body, end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without HTML escapes for <, > and &, unlike jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _limit_seconds(seconds: int) -> None:
    """End this process after ``seconds`` more of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)


def _limit(kind: int, wanted: int) -> None:
    """Set a resource limit of this process to ``wanted``, or to the hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _serve() -> None:
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    template = None
    for line in sys.stdin:
        seconds, question = json.loads(line)
        _limit_seconds(seconds)
        try:
            if template is None:
                day = question["day"] and datetime.fromisoformat(question["day"])
                environment = _environment(day)
                parsed = environment.parse(question["source"])
                used = sorted(jinja2.meta.find_undeclared_variables(parsed))
                template = environment.from_string(question["source"])
                reply = {"used": used, "text": ""}
            else:
                text = template.render(**question)
                if len(text) > MAX_TEXT:
                    raise ValueError(f"it makes a text of {len(text):,} characters")
                reply = {"text": text}
        except MemoryError:
            reply = {}
        except Exception as error:  # an expression in the template can raise any error
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reply = {"error": f"{line}{str(error)[:1000] or type(error).__name__}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
