"""Rules for a 4-bit base model (NF4)."""

from __future__ import annotations

import math

from toolkit.config.name_patterns import matches_any
from toolkit.errors import Problem, divisors, first_few, join_or
from toolkit.finetune.parameters import NF4_BLOCK, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import block_matrices
from toolkit.parallel.dims import splits_experts
from toolkit.preflight.planned_run import PlannedRun, note, rule, torch_before

_KEY = "finetune.lora.quantize_base"
_TP = "parallelism.tensor_parallel_degree"
_EXPERTS = "the width of experts"
_BITS = 8 * (NF4_BLOCK // 2 + 4) / NF4_BLOCK


def _rows(args: ModelArgs) -> dict[str, int]:
    """Return the row length of each kind of linear layer and experts, by its config name."""
    rows, moe = {"dim": args.dim, "n_heads * head_dim": args.n_heads * args.v_head_dim}, args.moe
    if mla := args.mla:
        rows |= {"kv_lora_rank": mla.kv_lora_rank, "q_lora_rank": mla.q_lora_rank}
    if moe is None or not all(map(moe.has_experts, range(args.n_layers))):
        rows["ffn_dim"] = args.ffn_dim
    if moe is not None:
        rows[_EXPERTS] = moe.ffn_dim
        if moe.num_shared_experts:
            rows["the width of shared experts"] = moe.ffn_dim * moe.num_shared_experts
    return rows


@rule()
def fsdp_takes_bytes(run: PlannedRun) -> list[Problem]:
    """Check that fully_shard supports NF4's integer parameters, which needs torch 2.12 or a single rank."""
    version, config = torch_before((2, 12)), run.config
    skips = config.parallelism.fsdp_skip_on_one_rank and not config.training.enable_cpu_offload
    skips = skips and run.world_size == 1 and run.hardware.device == "cuda"
    if version is None or skips or not run.config.finetune.quantizes:
        return []
    rule = f"fully_shard supports integer weights from torch 2.12 on; this is {version}"
    return [run.problem(_KEY, rule, 'set it to "none", install torch 2.13, or train on one GPU')]


@rule()
def quantized_rows_are_blocks(run: PlannedRun) -> list[Problem]:
    """Check that each row, or each row of a TP shard, consists of whole blocks."""
    if not run.config.finetune.quantizes or run.model is None:
        return []
    rows = _rows(run.model)
    broken = [f"{name} = {size}" for name, size in rows.items() if size % NF4_BLOCK]
    if broken:
        rule = f"{NF4_BLOCK} elements of a row share a scale, but {first_few(broken, 3)} is not a multiple"
        return [run.problem(_KEY, rule, 'set it to "none", or use another model size')]
    tp = run.config.parallelism.tensor_parallel_degree
    whole = {"dim", "kv_lora_rank", "q_lora_rank"}
    if not splits_experts(run.config.parallelism):
        whole.add(_EXPERTS)
    cut = {name: size for name, size in rows.items() if name not in whole}
    if all(size % (NF4_BLOCK * tp) == 0 for size in cut.values()):
        return []
    broken = [f"{name} = {size}" for name, size in cut.items() if size % (NF4_BLOCK * tp)]
    fitting = divisors(math.gcd(run.model.n_kv_heads, *(size // NF4_BLOCK for size in cut.values())))
    rule = (
        f"splits rows of {first_few(broken, 2)} within blocks of {NF4_BLOCK} elements, which share a scale "
        f"in {_KEY} = nf4"
    )
    return [run.problem(_TP, rule, f"set it to {join_or(fitting)}")]


@rule()
def quantized_is_frozen(run: PlannedRun) -> list[Problem]:
    """Check that no 4-bit weight is trained."""
    options = run.config.finetune
    if not options.quantizes or run.model is None:
        return []
    weights = set(block_matrices(run.model))
    asked = sorted(trained_names(weights, run.model, options))
    pattern = next((it for it in options.trainable if asked and matches_any(asked[0], [it])), None)
    if pattern is None:
        return []
    rule = f'"{pattern}" matches {asked[0]}, which {_KEY} = nf4 stores in 4 bits: it cannot be trained'
    fix = 'use norms, tok_embeddings.weight or output.weight, or set quantize_base to "none"'
    return [run.problem("finetune.trainable", rule, fix)]


@note
def quantized_notes(run: PlannedRun) -> list[str]:
    """Note the memory of the 4-bit weights, and how they are merged."""
    options = run.config.finetune
    if not options.quantizes or run.model is None:
        return []
    elements = sum(map(math.prod, block_matrices(run.model).values()))
    size = elements * _BITS / 8
    return [
        f"{_KEY}: {elements:,} frozen parameters are stored in {_BITS:g} bits each, {size / 2**30:.2f} GiB "
        "over all ranks; merging adds the adapter to the original 16-bit weights"
    ]
