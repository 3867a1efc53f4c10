"""Convert an FSDP configuration of accelerate or Hugging Face Trainer into a TOML and a launch command.

    llama-toolkit import-accelerate FILE.yaml [--output run.toml] [--extends FILE.toml]
    llama-toolkit import-accelerate --fsdp "full_shard auto_wrap" [--fsdp_config FILE.json] [--bf16]

Reads FSDP versions 1 and 2. Prints a line for each key with its equivalent and the reason, then the TOML and
the launch commands. Unsupported settings are rejected by name, without a TOML. These files do not contain
model, data and length of the run; --extends gives a TOML that has them. Exit codes: 0 done, 2 invalid
arguments, an unreadable file or rejected keys.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.commands.accelerate.meaning import Refused, number
from toolkit.commands.accelerate.read import ALIASES, KEYS, TABLES, Given, read_file, read_trainer
from toolkit.commands.arguments import command_parser, local_path, writes
from toolkit.config.schema import fields_by_key
from toolkit.config.values import format_toml
from toolkit.errors import EXIT_FINISHED, ConfigError, Problem, did_you_mean, one_line
from toolkit.hardware import detect

PORT = 29500
_OFFLOAD = "training.enable_cpu_offload"
_PRECISION = "training.mixed_precision_param"
_REPLICATE = "parallelism.data_parallel_replicate_degree"
_MESH_REPLICAS = "parallelism_config_dp_replicate_size"
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")


@dataclass
class Imported:
    """The result: a line per key, the settings of the TOML, the launch variables, and the rejected keys."""

    lines: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


# Translating


def translate(
    given: Sequence[Given], *, replicas: int = 0, processes: int | None = None, machines: int | None = None
) -> Imported:
    """Translate each key; ``processes`` and ``machines`` override the file if given. ``replicas``, if not 0,
    is the number of replicas of HYBRID_SHARD."""
    result = Imported()
    asked = {"num_processes": processes, "num_machines": machines}
    given = [item for item in given if asked.get(item.name) is None]
    given += [Given(name, value, f"--{name}") for name, value in asked.items() if value is not None]
    known: dict[str, Given] = {}
    for item in given:
        name = ALIASES.get(item.name, item.name)
        if name not in KEYS:
            result.problems.append(_unknown(item))
        elif name in known:
            fix = f"keep one; the other is {known[name].name} in {known[name].origin}"
            result.problems.append(Problem("is given twice", fix, item.name, item.value, item.origin))
        else:
            known[name] = item
    values: dict[str, Any] = {name: item.value for name, item in known.items() if item.value is not None}
    values |= _counts(values, replicas)
    for name, item in known.items():
        _apply(name, item, values, result)
    if replicas and not result.problems and _REPLICATE not in result.settings:
        rule = "HYBRID_SHARD and HYBRID_SHARD_ZERO2 alone have replicas"
        result.problems.append(Problem(rule, "name one of them, or remove it", "--replicas", replicas))
    return result


def _counts(values: Mapping[str, Any], replicas: int) -> dict[str, int]:
    """Return the number of machines, and of replicas requested by ``replicas`` or the mesh, 0 for none."""
    try:
        machines = number(values.get("num_machines", 1))
        meshed = number(values.get(_MESH_REPLICAS, 1))
    except Refused:  # which its own key tells
        machines = meshed = 1
    return {"machines": machines, "replicas": replicas or (meshed if meshed > 1 else 0)}


def _unknown(item: Given) -> Problem:
    fix = did_you_mean(item.name, [*KEYS, *ALIASES, *TABLES], "remove it")
    return Problem("accelerate has no such key for FSDP", fix, item.name, item.value, item.origin)


def _apply(name: str, item: Given, values: Mapping[str, Any], result: Imported) -> None:
    said = f"{item.name} = {_shown(item.value)}"
    if item.value is None:
        result.lines.append(f"{said} -> nothing (as if it were not there)")
        return
    try:
        meaning = KEYS[name](item.value, values)
        both = result.settings.keys() & meaning.settings.keys()
        for key in (key for key in both if result.settings[key] != meaning.settings[key]):
            rule = f"{key} would be {result.settings[key]} by another key"
            raise Refused(rule, "keep one of the two")
    except Refused as refused:
        result.lines.append(f"{said} rejected: {refused.rule}")
        result.problems.append(Problem(refused.rule, refused.fix, item.name, item.value, item.origin))
        return
    ours = [f"{key} = {format_toml(value)}" for key, value in meaning.settings.items()]
    ours += [f"{key}={value}" for key, value in meaning.launch.items()]
    result.lines.append(f"{said} -> {', '.join(ours) or 'nothing'} ({meaning.why})")
    result.settings |= meaning.settings
    result.launch |= meaning.launch


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# Writing


def toml_text(settings: Mapping[str, Any], *, source: str, extends: str | None = None) -> str:
    """Format the settings as TOML, in the order of the schema."""
    lines = [one_line(f"# {source}, by tools/import_accelerate.py.")]
    if extends:
        lines += ["", f"extends = {format_toml(extends)}"]
    table = ""
    for key in fields_by_key():
        if key in settings:
            here, _, name = key.rpartition(".")
            if here != table:
                lines += ["", f"[{here}]"]
                table = here
            lines.append(f"{name} = {format_toml(settings[key])}")
    return "\n".join(lines) + "\n"


def launch_lines(imported: Imported, config: str) -> list[str]:
    """Return the launch commands of one machine, with run_train.sh and with torchrun."""
    launch: dict[str, Any] = {"rdzv_backend": "c10d", "MASTER_PORT": PORT, **imported.launch}
    machines, rank = launch.get("NNODES", 1), launch.get("NODE_RANK", 0)
    environment = {key: launch[key] for key in _ENVIRONMENT if key in launch}
    names = environment | {key: launch[key] for key in ("NGPU",) if key in launch}
    address, node = "localhost", ""
    if machines > 1:
        address, node = launch.get("MASTER_ADDR", "first-host"), f"--node_rank={rank} "
        names |= {"NNODES": machines, "NODE_RANK": rank, "MASTER_ADDR": address}
        names["MASTER_PORT"] = launch["MASTER_PORT"]
    place = shlex.quote(f"{address}:{launch['MASTER_PORT']}")
    script = f"{_assigned(names | {'CONFIG_FILE': config})}./run_train.sh"
    lines = [
        script,
        f"{_assigned(environment)}torchrun --nproc_per_node={launch.get('NGPU', 'gpu')} --nnodes={machines} "
        f"{node}--rdzv_id=101 --rdzv_backend={launch['rdzv_backend']} --rdzv_endpoint={place} "
        f"-m toolkit.train --job.config_file {shlex.quote(config)}",
    ]
    if machines > 1:
        lines.append(f"# on machine {rank}; the others, from 0, with their own number in its place")
        if "MASTER_ADDR" not in launch:
            lines.append("# first-host stands for the name of machine 0, which the file does not have")
    if imported.settings.get(_OFFLOAD) and detect().device == "cpu":
        lines.append("# to try it here, on the CPU, which has nothing to offload from:")
        lines.append(f"{script} --{_OFFLOAD} false")
    return lines


def _assigned(names: Mapping[str, Any]) -> str:
    return "".join(f"{name}={shlex.quote(str(value))} " for name, value in names.items())


def _relative(extends: Path, output: Path | None) -> str:
    """Return the path of the extended file, relative to the one that extends it."""
    if not extends.is_file():
        raise ConfigError(Problem("there is no such file", "name a TOML", "--extends", str(extends)))
    return os.path.relpath(extends, output.parent if output else Path())


# The program


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("import-accelerate", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("file", nargs="?", type=local_path, metavar="FILE", help="what `accelerate config` wrote")
    add(
        "--fsdp", nargs="?", const="true", metavar="WORDS", help="a Trainer's, such as 'full_shard auto_wrap'"
    )
    add("--fsdp_config", type=local_path, metavar="FILE.json", help="a Trainer's")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="a Trainer's")
    precision.add_argument("--fp16", action="store_true", help="a Trainer's")
    add(
        "--num_processes", type=int, metavar="N", help="ranks on all machines together, instead of the file's"
    )
    add("--num_machines", type=int, metavar="N", help="instead of the file's")
    add("--replicas", type=int, default=0, metavar="N", help="of HYBRID_SHARD, instead of one per machine")
    add("--extends", type=local_path, metavar="FILE.toml", help="TOML with the model, the data and the rest")
    add("--output", type=local_path, metavar="FILE.toml", help="write the TOML there")
    return parser


def _read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[list[Given], str]:
    """Read the keys and describe their source."""
    trainer = options.fsdp is not None or options.fsdp_config or options.bf16 or options.fp16
    if bool(options.file) == bool(trainer):
        parser.error("name one FILE, or a Trainer's --fsdp")
    if options.file:
        given = read_file(options.file)
        if not any(item.name == "distributed_type" or item.name.startswith("fsdp_") for item in given):
            rule = f"{options.file} asks for no FSDP: it has neither distributed_type nor fsdp_config"
            raise ConfigError(Problem(rule, "name what `accelerate config` wrote"))
        return given, f"From {options.file}"
    if options.fsdp is None:
        parser.error("a Trainer's options need --fsdp, for example --fsdp 'full_shard auto_wrap'")
    file = f", {options.fsdp_config}" if options.fsdp_config else ""
    return read_trainer(options), f"From --fsdp {options.fsdp!r}{file}"


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.replicas < 0:
        parser.error("--replicas is at least 1")
    given, source = _read(parser, options)
    imported = translate(
        given, replicas=options.replicas, processes=options.num_processes, machines=options.num_machines
    )
    if not imported.problems and _PRECISION not in imported.settings:  # auto, here, may be bf16
        _apply("mixed_precision", Given("mixed_precision, not given", "no", ""), {}, imported)
    for line in imported.lines:
        print(one_line(line))
    if imported.problems:
        sys.stdout.flush()
        raise ConfigError(imported.problems)
    extends = _relative(options.extends, options.output) if options.extends else None
    text = toml_text(imported.settings, source=source, extends=extends)
    if options.output:
        with writes("--output", options.output):
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("x", encoding="utf-8") as file:
                file.write(text)
    where = f"written to {options.output}" if options.output else "to be saved as run.toml"
    print(f"\nTOML, {where}:\n\n{text}\nTo start it:\n")
    print("\n".join(launch_lines(imported, str(options.output or "run.toml"))))
    if not options.extends:
        print("\nModel, data and steps are the defaults until the TOML, or one that it extends, has others.")
    return EXIT_FINISHED
