"""Launches on several nodes, or with restarts after failures: their meshes, and the facts that must be equal
on all nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import committed_steps
from toolkit.config import Config, load_config
from toolkit.config.local_paths import expand_user
from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.hardware import Hardware
from toolkit.launcher import fault_reports
from toolkit.launcher.environment import environment_error
from toolkit.launcher.node_terms import terms_from
from toolkit.launcher.nodes import supervise_nodes
from toolkit.launcher.supervisor import Launch
from toolkit.parallel.elastic_mesh import mesh_flags, parse_mesh
from toolkit.preflight import check

MESHES = "parallelism.elastic_meshes"
BATCH = "training.global_batch_size"
LOAD_STEP = "checkpoint.load_step"
_A_NODE_MAY_HAVE_ITS_OWN = {
    "job.config_file", "job.print_config", "job.debug", "data.cache_folder", "compile.cache_folder"
}  # fmt: skip


def at_full_size(config: Config, argv: Sequence[str], launch: Launch) -> tuple[list[str], int]:
    """Return ``argv`` and the number of ranks. If the number of nodes may change and ``config`` lists elastic
    meshes, ``argv`` has the mesh for the largest possible number.

    Raises:
        ConfigError: the run does not support what the launch requests.
    """
    terms = terms_from(os.environ, launch)
    if terms.elastic or terms.restarts:
        name = "NNODES" if terms.elastic else "MAX_RESTARTS"
        if not config.checkpoint.enable or config.checkpoint.load_only:
            rule = "all start again from the newest checkpoint, and this run saves none"
            raise environment_error(name, os.environ[name], rule, "set checkpoint.enable = true")
        if (step := config.checkpoint.load_step) != -1:
            rule = f"with {name} = {os.environ[name]} all start again from the newest checkpoint"
            fix = (
                f"move the later steps away, or copy step-{step} into another checkpoint.folder; then set -1"
            )
            raise ConfigError(Problem(rule, fix, LOAD_STEP, step, config.origin(LOAD_STEP)))
        if terms.elastic and config.training.global_batch_size == -1:
            rule = "with other numbers of ranks −1 is another batch, and another run"
            fix = "give the number of samples, one that each number of nodes divides"
            raise ConfigError(Problem(rule, fix, BATCH, -1, config.origin(BATCH)))
    if not (terms.elastic and config.parallelism.elastic_meshes):
        return [*argv], launch.world_size
    flags, size = largest_mesh(config, launch.processes, terms.least, terms.most)
    return [*argv, *flags], size


def largest_mesh(config: Config, processes: int, least: int, most: int) -> tuple[list[str], int]:
    """Return the flags and the number of ranks of the largest listed mesh for ``least`` to ``most`` nodes
    with ``processes`` ranks each.

    Raises:
        ConfigError: no listed mesh fits.
    """
    meshes = filter(None, map(parse_mesh, config.parallelism.elastic_meshes))
    allowed = range(least * processes, most * processes + 1, processes)
    size = max((mesh.world_size for mesh in meshes if mesh.world_size in allowed), default=allowed[-1])
    return _flags(config, size), size


def _flags(config: Config, world_size: int) -> list[str]:
    """Return the flags of the first listed mesh with ``world_size`` ranks.

    Raises:
        ConfigError: there is none.
    """
    meshes = config.parallelism.elastic_meshes
    for text in meshes:
        mesh = parse_mesh(text)
        if mesh and mesh.world_size == world_size:
            return mesh_flags(mesh)
    rule = f"none of these meshes has {world_size} ranks"
    raise ConfigError(Problem(rule, "add one", MESHES, meshes, config.origin(MESHES)))


def layouts(
    config: Config, argv: Sequence[str], launch: Launch, hardware: Hardware
) -> Callable[[int], list[str]]:
    """Return a function from a number of nodes to the flags of their mesh.

    Raises (when called):
        ConfigError: this number of nodes cannot train.
    """

    @functools.cache
    def flags_for(nodes: int) -> list[str]:
        size, flags, sized = nodes * launch.processes, list[str](), config
        if nodes == launch.nodes:
            return _flags(config, size) if _has_list(config, launch) else []
        if _has_list(config, launch):
            flags = _flags(config, size)
            sized = load_config([*argv, *flags])
        if problems := check(sized, world_size=size, hardware=hardware):
            raise ConfigError(problems)
        return flags

    return flags_for


def _has_list(config: Config, launch: Launch) -> bool:
    return bool(config.parallelism.elastic_meshes) and terms_from(os.environ, launch).elastic


def run_nodes(
    command: Sequence[str],
    config: Config,
    argv: Sequence[str],
    launch: Launch,
    hardware: Hardware,
    prepare: Callable[[], None],
) -> int:
    """Take part in the multi-node run that ``launch`` describes; return the exit code.

    Raises:
        ConfigError: the minimum number of nodes cannot train, or node 0 cannot listen.
        ToolkitError: preparation failed.
    """
    terms = terms_from(os.environ, launch)
    flags_for = layouts(config, argv, launch, hardware)
    try:
        flags_for(terms.least)
    except ConfigError as error:
        problem = error.problems[0]
        rule = f"{terms.least} nodes are allowed, and cannot train: {problem.key}: {problem.rule}"
        fix = f"{problem.fix}; or name meshes in {MESHES}, or raise the least number"
        raise environment_error("NNODES", os.environ["NNODES"], rule, fix) from None

    def fits(nodes: int) -> list[str] | None:
        try:
            return flags_for(nodes)
        except ConfigError:
            return None

    prefix = fault_reports.traces_prefix(config.job, config.comm)
    saved = expand_user(config.checkpoint.folder, inside=expand_user(config.job.dump_folder))

    def hung(nodes: int, known: Mapping[int, str]) -> str:
        return _who_hangs(prefix, nodes * launch.processes, known)

    return supervise_nodes(
        command, launch, terms, _facts(config, hardware), prepare, prefix, fits, lambda: _newest(saved), hung
    )


def _newest(folder: Path) -> int:
    """Return the newest saved step; 0 if there is none, or if the storage does not answer."""
    with suppress(OSError, ToolkitError):
        return max(committed_steps(folder), default=0)
    return 0


def _facts(config: Config, hardware: Hardware) -> dict[str, Any]:
    """Return facts that must be equal on all nodes: the device, and the configuration without local paths."""
    keys = [field.key for field in config.present_fields() if field.key not in _A_NODE_MAY_HAVE_ITS_OWN]
    device = {"device": hardware.device, "bfloat16 in hardware": hardware.native_bf16}
    return device | {key: config.value(key) for key in keys}


def _who_hangs(prefix: Path, world_size: int, known: Mapping[int, str]) -> str:
    reports = fault_reports.gather(prefix, world_size, seconds=2.0)
    return fault_reports.tell(reports, world_size, known, more=prefix.parent)
