"""Rules about linear layers that compute in float8."""

from __future__ import annotations

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
"""Compute capability from which GPUs multiply float8."""
_PRECOMPUTE = f"{_TABLE}.precompute_float8_dynamic_scale_for_fsdp"
_AUTO = "auto_filter_small_kn"


def _on(run: PlannedRun) -> bool:
    return any(name in FLOAT8 for name in run.config.model.converters)


def _emulates(run: PlannedRun) -> bool:
    return run.config.quantize.linear.float8.emulate


@rule()
def float8_runs(run: PlannedRun) -> list[Problem]:
    """torchao has the casts and kernels, and what the device does not multiply is emulated where that is
    asked for."""
    if not _on(run):
        return []
    if find_spec("torchao") is None:
        return [run.problem(_CONVERTERS, "the package torchao is not installed", install_command("float8"))]
    if _emulates(run):
        return []
    if run.hardware.capability < _CAPABILITY:
        rule = f"needs a GPU of compute capability {_CAPABILITY} or above; this is {run.hardware.name}"
        fix = f"set {_EMULATE} = true, which computes the same slowly, or remove it"
        return [run.problem(_CONVERTERS, rule, fix)]
    if run.precision == "float64":
        rule = "a product of float8 matrices is bfloat16 or float32"
        return [run.problem("training.mixed_precision_param", rule, "take one of these")]
    return []


@rule()
def float8_sizes(run: PlannedRun) -> list[Problem]:
    """GPUs multiply matrices whose sizes are multiples of 16: parts that tp leaves a rank, and the tokens
    over which the gradient of a weight sums up."""
    model, batch, options = run.model, run.batch, run.config.parallelism
    if not _on(run) or _emulates(run) or model is None or batch is None:
        return []
    problems = []
    tp, unit = options.tensor_parallel_degree, f"{MULTIPLE} on each rank, which GPUs multiply in float8"
    cut = {name: size for name, size in _cut(model).items() if size // tp % MULTIPLE}
    if tp > 1 and cut:
        sizes = first_few([f"{name} = {size}" for name, size in cut.items()], 3)
        rule = f"leaves of {sizes} no multiple of {unit}"
        problems.append(run.problem("parallelism.tensor_parallel_degree", rule, "take a smaller one"))
    samples = options.pipeline_parallel_microbatch_size if run.pp > 1 else batch.local
    tokens = samples * run.config.training.seq_len // options.context_parallel_degree
    if tokens % MULTIPLE and run.config.quantize.linear.float8.recipe_name != "rowwise_with_gw_hp":
        rule = f"gives micro-batches of {tokens:,} tokens, no multiple of {unit}"
        problems.append(run.problem("training.seq_len", rule, f"take a multiple of {MULTIPLE}"))
    return problems


def _cut(model: ModelArgs) -> dict[str, int]:
    """Those of the sizes that tensor parallelism cuts, by what the configuration calls them."""
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = {"n_heads * head_dim": queries, "n_kv_heads * head_dim": keys, "ffn_dim": model.ffn_dim}
    return {name: size for name, size in sizes.items() if size % MULTIPLE == 0}


@rule()
def float8_filter(run: PlannedRun) -> list[Problem]:
    """filter_fqns names modules, and leaves some."""
    options = run.config.quantize.linear.float8
    if not _on(run) or run.model is None:
        return []
    if _AUTO in options.filter_fqns:
        rule = f"{_AUTO} takes its choice from what torchao measured on one kind of GPU"
        return [run.problem(_FILTER, rule, 'name what is small, as "attention.wk" and "attention.wv"')]
    modules = [*(row.module for row in table(run.model).values()), "output"]
    for part in options.filter_fqns:
        if not any(part in name for name in modules):
            known = dict.fromkeys(name for module in modules for name in (module, module.rpartition(".")[2]))
            fix = did_you_mean(part, known, 'name a module, as "output" or "attention.wk"')
            return [run.problem(_FILTER, f'"{part}" is in no name of a module', fix)]
    if not float8_layers(run.model, options):
        rule = f"leaves no layer to compute in float8, whose sizes have to be multiples of {MULTIPLE}"
        return [run.problem(_FILTER, rule, f"shorten it, or remove {_CONVERTERS}")]
    return []


@rule()
def float8_gathered(run: PlannedRun) -> list[Problem]:
    """Weights that are gathered in float8 have one scale, and lie on the device and whole shards of it."""
    config, options = run.config, run.config.quantize.linear.float8
    if not _on(run):
        return []
    if not options.enable_fsdp_float8_all_gather:
        return []
    problems = []
    recipe = options.recipe_name
    if recipe not in (None, "tensorwise"):
        rule = f"is for matrices of one scale, and {_TABLE}.recipe_name = {recipe} gives each row its own"
        problems.append(run.problem(_GATHER, rule, 'remove it, or take recipe_name = "tensorwise"'))
    if config.training.enable_cpu_offload:
        rule = "casts what is on the device, and training.enable_cpu_offload keeps weights on the host"
        problems.append(run.problem(_GATHER, rule, "remove one of the two"))
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int):
        rule = (
            "is for weights that are gathered from all ranks each time, and not from the fewer of "
            f"parallelism.fsdp_reshard_after_forward = {config.parallelism.fsdp_reshard_after_forward}"
        )
        problems.append(run.problem(_GATHER, rule, "remove one of the two"))
    return problems


@rule()
def float8_without_adapter(run: PlannedRun) -> list[Problem]:
    """An adapter is beside layers that are as they were."""
    if not _on(run) or not run.config.finetune.adds:
        return []
    rule = "an adapter trains beside weights in their own precision, and updates too small for float8"
    fix = f"remove {_CONVERTERS}, or train without an adapter"
    return [run.problem("finetune.adapter", rule, fix)]


@note
def float8_notes(run: PlannedRun) -> list[str]:
    """Tell which layers compute in float8, and what scales depend on."""
    options = run.config.quantize.linear.float8
    if not _on(run) or run.model is None or run.mesh is None:
        return []
    layers, all_layers = float8_layers(run.model, options), linear_layers(run.model)
    said = [
        f"{len(layers)} of the blocks' {len(all_layers)} linear layers compute in float8"
        f"{', emulated' * options.emulate}; embedding and output do not"
    ]
    if options.recipe_name != "rowwise_with_gw_hp":
        said.append(
            "float8 scales are those of a micro-batch: runs are alike where training.local_batch_size "
            "(pipeline_parallel_microbatch_size) is"
        )
    if options.enable_fsdp_float8_all_gather:
        shards, tp = run.mesh.dp_shard * run.mesh.cp, run.mesh.tp
        uneven = [it for it in layers if not can_gather_in_float8(layers[it][0], shards=shards, tp=tp)]
        if uneven:
            said.append(
                f"{first_few(uneven, 2)} are gathered in {run.precision}, not in float8: their rows do not "
                f"divide by {shards} shards × tp {tp}"
            )
    return said
