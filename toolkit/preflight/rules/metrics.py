"""Rules for metrics and profiling."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from toolkit.errors import Problem, install_command
from toolkit.preflight.planned_run import PlannedRun, note, rule


@rule()
def profiler_fits(run: PlannedRun) -> Iterator[Problem]:
    """Check that a trace and its warmup fit into one period."""
    options = run.config.profiling
    needed = options.profiler_warmup + options.profiler_active
    if not options.enable_profiling or options.profile_freq >= needed:
        return
    yield run.problem(
        "profiling.profile_freq",
        f"a trace takes profiler_warmup + profiler_active = {needed} steps",
        f"set profile_freq to at least {needed}, or lower profiler_warmup or profiler_active",
        "profiling.profiler_active",
        "profiling.profiler_warmup",
    )


@note
def metrics_notes(run: PlannedRun) -> list[str]:
    """Note that traces will not be written."""
    profiling, training = run.config.profiling, run.config.training
    if not profiling.enable_profiling or training.epochs or profiling.profile_freq <= training.steps:
        return []
    return [f"profiling.profile_freq {profiling.profile_freq}: no trace within {training.steps} steps"]


@rule()
def prometheus_file_is_read(run: PlannedRun) -> Iterator[Problem]:
    """Check that the file has the extension that the textfile collector requires."""
    path = run.config.metrics.prometheus_file
    if path is None or path.endswith(".prom"):
        return
    yield run.problem(
        "metrics.prometheus_file",
        "node_exporter's textfile collector only reads files that end in .prom",
        f"use {path}.prom",
    )


@rule()
def wandb_ready(run: PlannedRun) -> Iterator[Problem]:
    """Check that wandb is installed and has an API key; without a key, it prompts on a terminal."""
    key = "metrics.enable_wandb"
    if not run.config.metrics.enable_wandb:
        return
    if find_spec("wandb") is None:
        yield run.problem(key, "the package wandb is not installed", install_command("wandb"))
    elif not _may_send():
        rule = f"there is no API key for {_wandb_host()} in WANDB_API_KEY or netrc"
        fix = 'run "wandb login" first, or set WANDB_MODE=offline and "wandb sync" the run later'
        yield run.problem(key, rule, fix)


@rule()
def trackers_ready(run: PlannedRun) -> list[Problem]:
    """Check for the packages of ``metrics.report_to``, and for Comet's API key, without which it prompts."""
    key, asked = "metrics.report_to", run.config.metrics.report_to
    problems = [
        run.problem(key, f"the package {package} is not installed", install_command(name))
        for name, package in _PACKAGES.items()
        if name in asked and find_spec(package) is None
    ]
    if "comet" in asked and not problems and not _comet_may_send():
        fix = "set it, or COMET_START_ONLINE=0 and `comet upload` the run's file later"
        problems.append(run.problem(key, "there is no COMET_API_KEY, and no ~/.comet.config", fix))
    return problems


_PACKAGES = {"comet": "comet_ml", "mlflow": "mlflow", "trackio": "trackio"}


def _comet_may_send() -> bool:
    offline = os.environ.get("COMET_START_ONLINE", "").lower() in ("0", "false")
    return offline or "COMET_API_KEY" in os.environ or os.path.exists(os.path.expanduser("~/.comet.config"))


def _may_send() -> bool:
    variables = os.environ
    if variables.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return True
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        hosts = netrc.netrc(os.path.expanduser(variables.get("NETRC", "~/.netrc"))).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return _wandb_host() in hosts


def _wandb_host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
