"""Rules for float8 linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from toolkit.config.types import FLOAT8
from toolkit.errors import Problem, did_you_mean, first_few, install_command
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import linear_layers, table
from toolkit.parallel.float8_layers import MULTIPLE, can_gather_in_float8, float8_layers
from toolkit.preflight.planned_run import PlannedRun, note, rule

_CONVERTERS = "model.converters"
_TABLE = "quantize.linear.float8"
_EMULATE = f"{_TABLE}.emulate"
_FILTER = f"{_TABLE}.filter_fqns"
_GATHER = f"{_TABLE}.enable_fsdp_float8_all_gather"
_CAPABILITY = 8.9
"""Lowest compute capability with float8 matmuls."""
_PRECOMPUTE = f"{_TABLE}.precompute_float8_dynamic_scale_for_fsdp"
_TOKENS = (
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
    "training.local_batch_size",
    "training.global_batch_size",
)
"""Keys that determine, together with training.seq_len, the tokens of a micro-batch."""
_AUTO = "auto_filter_small_kn"


def _on(run: PlannedRun) -> bool:
    return any(name in FLOAT8 for name in run.config.model.converters)


def _emulates(run: PlannedRun) -> bool:
    return run.config.quantize.linear.float8.emulate


@rule()
def float8_runs(run: PlannedRun) -> list[Problem]:
    """Check that torchao is installed, and that float8 matmuls are supported by the device or emulated."""
    if not _on(run):
        return []
    if find_spec("torchao") is None:
        return [run.problem(_CONVERTERS, "the package torchao is not installed", install_command("float8"))]
    if _emulates(run):
        return []
    if run.hardware.capability < _CAPABILITY:
        rule = f"needs a GPU of compute capability {_CAPABILITY} or above; this is {run.hardware.name}"
        fix = f"set {_EMULATE} = true, which gives the same results slowly, or remove it"
        return [run.problem(_CONVERTERS, rule, fix)]
    if run.precision == "float64":
        rule = "float8 matmuls return bfloat16 or float32"
        return [run.problem("training.mixed_precision_param", rule, "use one of these")]
    return []


@rule()
def float8_sizes(run: PlannedRun) -> Iterator[Problem]:
    """Check that the sizes of TP shards, and the number of tokens over which a weight's gradient is summed,
    are multiples of 16, as float8 GEMMs require."""
    model, batch, options = run.model, run.batch, run.config.parallelism
    if not _on(run) or _emulates(run) or model is None or batch is None:
        return
    tp, unit = options.tensor_parallel_degree, f"{MULTIPLE} per rank, which float8 matmuls need"
    cut = {name: size for name, size in _cut(model).items() if size // tp % MULTIPLE}
    if tp > 1 and cut:
        sizes = first_few([f"{name} = {size}" for name, size in cut.items()], 3)
        rule = f"splits {sizes} into shards that are no multiple of {unit}"
        yield run.problem("parallelism.tensor_parallel_degree", rule, "use a smaller one")
    samples = options.pipeline_parallel_microbatch_size if run.pp > 1 else batch.local
    tokens = samples * run.config.training.seq_len // options.context_parallel_degree
    if tokens % MULTIPLE and run.config.quantize.linear.float8.recipe_name != "rowwise_with_gw_hp":
        rule = f"gives micro-batches of {tokens:,} tokens, not a multiple of {unit}"
        key, fix = "training.seq_len", f"use a training.seq_len of a multiple of {MULTIPLE}"
        yield run.problem(key, rule, fix, *_TOKENS, _CONVERTERS)


def _cut(model: ModelArgs) -> dict[str, int]:
    """Return the sizes that tensor parallelism splits, by their config names."""
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = {"n_heads * head_dim": queries, "n_kv_heads * head_dim": keys, "ffn_dim": model.ffn_dim}
    if model.mla:
        sizes["n_heads * v_head_dim"] = model.n_heads * model.v_head_dim
    return {name: size for name, size in sizes.items() if size % MULTIPLE == 0}


@rule()
def float8_filter(run: PlannedRun) -> list[Problem]:
    """Check that filter_fqns matches modules and leaves some layers in float8."""
    options = run.config.quantize.linear.float8
    if not _on(run) or run.model is None:
        return []
    if _AUTO in options.filter_fqns:
        rule = f"{_AUTO} is based on torchao's measurements on one kind of GPU"
        return [run.problem(_FILTER, rule, 'list small layers, such as "attention.wk" and "attention.wv"')]
    modules = [*(row.module for row in table(run.model).values()), "output"]
    for part in options.filter_fqns:
        if not any(part in name for name in modules):
            known = dict.fromkeys(name for module in modules for name in (module, module.rpartition(".")[2]))
            fix = did_you_mean(part, known, 'use names of modules, such as "output" or "attention.wk"')
            return [run.problem(_FILTER, f'"{part}" matches no module', fix)]
    if not float8_layers(run.model, options):
        rule = f"leaves no layer in float8, which needs sizes that are multiples of {MULTIPLE}"
        return [run.problem(_FILTER, rule, f"shorten it, or remove {_CONVERTERS}", _CONVERTERS)]
    return []


@rule()
def float8_gathered(run: PlannedRun) -> Iterator[Problem]:
    """Check that weights can be gathered in float8: one scale per weight, on the device, from all ranks."""
    config, options = run.config, run.config.quantize.linear.float8
    if not _on(run):
        return
    if not options.enable_fsdp_float8_all_gather:
        return
    recipe = options.recipe_name
    if recipe not in (None, "tensorwise"):
        rule = f"needs one scale per matrix, but {_TABLE}.recipe_name = {recipe} has one per row"
        yield run.problem(_GATHER, rule, 'remove it, or set recipe_name = "tensorwise"')
    if config.training.enable_cpu_offload:
        rule = "casts weights on the device, but training.enable_cpu_offload keeps them on the host"
        yield run.problem(_GATHER, rule, "remove one of the two")
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int):
        rule = (
            "needs weights that are always gathered from all ranks, not from the fewer ranks of "
            f"parallelism.fsdp_reshard_after_forward = {config.parallelism.fsdp_reshard_after_forward}"
        )
        yield run.problem(_GATHER, rule, "remove one of the two")


@rule()
def float8_without_adapter(run: PlannedRun) -> list[Problem]:
    """Check that no adapter is trained on float8 layers."""
    if not _on(run) or not run.config.finetune.adds:
        return []
    rule = "an adapter trains on weights in their own precision, and its updates are too small for float8"
    fix = f"remove {_CONVERTERS}, or train without an adapter"
    return [run.problem("finetune.adapter", rule, fix)]


@note
def float8_notes(run: PlannedRun) -> Iterator[str]:
    """Note the float8 layers and the dependencies of their scales."""
    options = run.config.quantize.linear.float8
    if not _on(run) or run.model is None or run.mesh is None:
        return
    layers, all_layers = float8_layers(run.model, options), linear_layers(run.model)
    yield (
        f"{len(layers)} of the blocks' {len(all_layers)} linear layers compute in float8"
        f"{', emulated' * options.emulate}; embedding and output do not"
    )
    if options.recipe_name != "rowwise_with_gw_hp":
        yield (
            "float8 scales are computed per micro-batch: runs match only with the same "
            "training.local_batch_size (pipeline_parallel_microbatch_size)"
        )
    if options.enable_fsdp_float8_all_gather:
        shards, tp = run.mesh.dp_shard * run.mesh.cp, run.mesh.tp
        uneven = [it for it in layers if not can_gather_in_float8(layers[it][0], shards=shards, tp=tp)]
        if uneven:
            yield (
                f"{first_few(uneven, 2)} are gathered in {run.precision}, not in float8: their rows are not "
                f"divisible by {shards} shards × tp {tp}"
            )
