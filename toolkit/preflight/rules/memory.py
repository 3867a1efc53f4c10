"""Rules for activation checkpointing and torch.compile."""

from __future__ import annotations

import shutil
from importlib.metadata import entry_points
from importlib.util import find_spec

from toolkit.config.parallelism import OPERATORS
from toolkit.errors import Problem, closest, install_command
from toolkit.hardware import lacks_cpp_compiler
from toolkit.launcher.environment import is_number
from toolkit.preflight.planned_run import PlannedRun, rule, torch_before

_TABLE = "activation_checkpoint"
_STRIDE = f"{_TABLE}.selective_ac_option"
_RECOMPUTES = ("selective", "full")
_CHOOSING = ("inductor", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")
"""Backends of torch that choose which activations forward saves."""
_BACKENDS = (*_CHOOSING, "aot_eager_default_partitioner", "eager", "eager_noexcept")
"""Backends that support training; packages may register others as entry points."""


@rule()
def selective_checkpointing(run: PlannedRun) -> list[Problem]:
    """Check that ``selective_ac_option`` is "op", "matmul" or a stride over blocks."""
    stride = run.config.activation_checkpoint.selective_ac_option
    if stride in OPERATORS or (is_number(stride) and int(stride) >= 1):
        return []
    rule = 'must be "op", "matmul" or a whole number of at least 1, in quotes'
    return [run.problem(_STRIDE, rule, 'for example "2"')]


@rule()
def checkpointing_debug(run: PlannedRun) -> list[Problem]:
    """Check that debugging is not combined with compiled blocks or checkpointing per operator."""
    options, key = run.config.activation_checkpoint, f"{_TABLE}.debug"
    if not options.debug or options.mode not in _RECOMPUTES:
        return []
    if run.config.compile.blocks:
        fix = "set compile.enable = false while you look for the operator"
        return [run.problem(key, "torch does not support it for compiled blocks", fix)]
    if options.by_operator:
        rule = f'torch does not support it for selective_ac_option = "{options.selective_ac_option}"'
        return [run.problem(key, rule, f'set {_TABLE}.mode = "full" while you look for the operator')]
    return []


@rule()
def dropout_recomputed_identically(run: PlannedRun) -> list[Problem]:
    """Check that recomputation of a block drops the same elements as its forward."""
    options, tuning, key = (
        run.config.activation_checkpoint,
        run.config.finetune,
        f"{_TABLE}.preserve_rng_state",
    )
    if options.preserve_rng_state or tuning.adapter != "lora" or not tuning.lora.dropout:
        return []
    rule = f"finetune.lora.dropout = {tuning.lora.dropout} would drop other elements in a recomputed block "
    rule += "than in its forward, and gradients would be wrong"
    return [run.problem(key, rule, "remove it, or set finetune.lora.dropout = 0")]


@rule()
def memory_budget_needs(run: PlannedRun) -> list[Problem]:
    """Check that blocks are compiled, because torch.compile applies the memory budget, and that matplotlib is
    installed if a plot is requested."""
    compiling, key = run.config.compile, f"{_TABLE}.mode"
    if run.config.activation_checkpoint.mode != "memory_budget":
        return []
    if not compiling.enable or "model" not in compiling.components:
        off = "compile.enable is false" if not compiling.enable else 'compile.components lacks "model"'
        fix = f'set compile.enable = true with "model" in compile.components, or {key} = "selective"'
        return [run.problem(key, f"torch.compile chooses what blocks save, and {off}", fix)]
    if compiling.backend in _BACKENDS and compiling.backend not in _CHOOSING:
        rule = f'compile.backend "{compiling.backend}" does not choose what is saved for backward'
        return [run.problem(key, rule, f'set compile.backend = "inductor", or {key} = "selective"')]
    picture = f"{_TABLE}.visualize_memory_budget_pareto"
    if run.config.value(picture) and find_spec("matplotlib") is None:
        rule = "needs the package matplotlib, which is not installed"
        return [run.problem(picture, rule, install_command("plot"))]
    return []


@rule()
def compiled_components(run: PlannedRun) -> list[Problem]:
    """Check that there is something to compile."""
    if not run.config.compile.enable or run.config.compile.components:
        return []
    fix = 'set it to ["model", "loss"], or compile.enable = false'
    return [run.problem("compile.components", "is empty, so nothing would be compiled", fix)]


@rule()
def compile_backend(run: PlannedRun) -> list[Problem]:
    """Check that the compile backend exists and that its requirements are met."""
    backend, key = run.config.compile.backend, "compile.backend"
    known = [*_BACKENDS, *(entry.name for entry in entry_points(group="torch_dynamo_backends"))]
    if backend not in known:
        near = closest(backend, known)
        fix = f'did you mean "{near}"?' if near else 'set it to "inductor"'
        return [run.problem(key, f"the backends are {', '.join(known)}", fix)]
    if not run.config.compile.enable:
        return []
    if backend == "cudagraphs" and run.hardware.device != "cuda":
        return [run.problem(key, "CUDA graphs need a CUDA device", 'set it to "inductor"')]
    on_cpu = backend == "inductor" and run.hardware.device == "cpu"
    if on_cpu and (lacks := lacks_cpp_compiler()):
        return [
            run.problem(
                key,
                lacks,
                "install g++, or set CXX to another compiler"
                f"{' (clang++ is installed)' if shutil.which('clang++') else ''}; "
                f'{key} = "aot_eager" needs none but is no faster than eager',
                "compile.enable",
            )
        ]
    return []


@rule()
def compile_mode(run: PlannedRun) -> list[Problem]:
    """Check that the compile mode is supported; only inductor has modes."""
    compiling, key = run.config.compile, "compile.mode"
    if compiling.mode == "default" or not compiling.enable:
        return []
    if compiling.backend != "inductor":
        rule = f"only inductor has modes, and compile.backend is {compiling.backend}"
        return [run.problem(key, rule, 'set compile.backend = "inductor", or remove it')]
    if compiling.mode == "reduce-overhead" and run.hardware.device != "cuda":
        return [run.problem(key, "uses CUDA graphs, which need a CUDA device", "remove it")]
    return []


@rule()
def inductor_attends_in_fp64(run: PlannedRun) -> list[Problem]:
    """Check for torch 2.13: older versions of inductor assume that tensors saved by CPU attention for
    backward are fp32."""
    compiling, version = run.config.compile, torch_before((2, 13))
    if not compiling.blocks or compiling.backend != "inductor":
        return []
    exact = run.config.training.mixed_precision_param == "float64"
    if version is None or not exact or run.hardware.device != "cpu":
        return []
    rule = f"inductor compiles attention in float64 on a CPU from torch 2.13 on; this is {version}"
    precision = "training.mixed_precision_param"
    fix = f'set compile.backend = "aot_eager" or {precision} = "float32", or install torch 2.13'
    return [run.problem("compile.backend", rule, fix, precision)]
