"""Rules about fine-tuning: an adapter fits the model, and something is trained."""

from __future__ import annotations

from fnmatch import fnmatchcase

from toolkit.errors import Problem, did_you_mean, first_few
from toolkit.finetune.parameters import (
    ALL_LINEAR,
    all_shapes,
    describe_trained,
    hf_linear_names,
    linear_layers,
    lora_targets,
    targets,
    trained_names,
)
from toolkit.preflight.planned_run import PlannedRun, note, rule

_SHOWN = 8
_TARGETS = "finetune.lora.target_modules"
_ROTATE = "parallelism.context_parallel_rotate_method"


@rule()
def lora_has_targets(run: PlannedRun) -> list[Problem]:
    """Each of LoRA's targets is a linear layer of the blocks."""
    options = run.config.finetune
    if run.model is None:
        return []
    args, layers = run.model, linear_layers(run.model)
    last = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    names = [*last, *(hf_linear_names(args)[name] for name in last), ALL_LINEAR]
    patterns = options.lora.target_modules
    if not patterns:
        return [run.problem(_TARGETS, "LoRA updates at least one layer", f"name some of {', '.join(names)}")]
    return [
        run.problem(
            _TARGETS, f'"{pattern}" is none of the linear layers', did_you_mean(pattern, names, "name one")
        )
        for pattern in patterns
        if not any(targets(args, pattern, layer) for layer in layers)
    ]


@rule()
def lora_rank_is_low(run: PlannedRun) -> list[Problem]:
    """A rank is at most that of the weight that is updated."""
    options = run.config.finetune
    if options.adapter != "lora" or run.model is None:
        return []
    args = run.model
    smallest = min(args.dim, args.n_kv_heads * args.head_dim, args.ffn_dim)
    if options.lora.rank <= smallest:
        return []
    rule = f"the smallest side of a weight of this model is {smallest}: a larger rank only costs"
    return [run.problem("finetune.lora.rank", rule, f"set it to at most {smallest}; 8 to 64 is usual")]


@rule()
def blocks_are_there(run: PlannedRun) -> list[Problem]:
    """No more blocks are adapted or frozen than the model has."""
    options = run.config.finetune
    if run.model is None:
        return []
    layers = run.model.n_layers
    counts = {
        "finetune.freeze_first_layers": options.freeze_first_layers,
        "finetune.freeze_last_layers": options.freeze_last_layers,
    }
    if options.adapter == "llama_adapter":
        counts["finetune.llama_adapter.adapter_layers"] = options.llama_adapter.adapter_layers
    return [
        run.problem(key, f"the model has {layers} blocks", f"set it to at most {layers}")
        for key, count in counts.items()
        if count > layers
    ]


@rule()
def patterns_match(run: PlannedRun) -> list[Problem]:
    """Each pattern names some parameter, and something is trained."""
    options = run.config.finetune
    if run.model is None:
        return []
    names = list(all_shapes(run.model, options))
    fix = f"name parameters such as {first_few(names, _SHOWN)}; * stands for any characters"
    problems = [
        run.problem(f"finetune.{key}", f'"{pattern}" matches no parameter', fix)
        for key in ("trainable", "frozen")
        for pattern in getattr(options, key)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    wanted = options.adapter != "lora" or lora_targets(run.model, options)  # else another rule tells
    if not problems and wanted and not trained_names(names, run.model, options):
        keys = ("frozen", "freeze_first_layers", "freeze_last_layers", "trainable")
        key = next(key for key in keys if getattr(options, key))
        problems = [run.problem(f"finetune.{key}", "leaves no parameter to train", "freeze less")]
    return problems


@rule()
def prefix_has_a_back_end(run: PlannedRun) -> list[Problem]:
    """A prefix is seen through SDPA, whose mask is dense."""
    if run.config.finetune.adapter != "prefix_tuning":
        return []
    problems = []
    if run.config.model.attention not in ("auto", "sdpa"):
        rule = "prefix tuning attends through sdpa: the other back ends take no prefix"
        problems.append(run.problem("model.attention", rule, 'set it to "sdpa" or "auto"'))
    if run.config.parallelism.context_parallel_degree > 1 and run.config.value(_ROTATE) == "alltoall":
        rule = "a ring takes no prefix, since each of its steps has a softmax of its own"
        problems.append(run.problem(_ROTATE, rule, 'set it to "allgather"'))
    return problems


@rule()
def exports_have_a_model(run: PlannedRun) -> list[Problem]:
    """A Hugging Face folder is written of a whole model."""
    options = run.config.checkpoint
    if not run.config.finetune.adds:
        return []
    asked = {
        "checkpoint.last_save_in_hf": options.last_save_in_hf,
        "checkpoint.hf_export_interval": options.hf_export_interval is not None,
    }
    rule = "the checkpoint of an adapter holds no model to write as a Hugging Face folder"
    return [run.problem(key, rule, "leave it out") for key, is_asked in asked.items() if is_asked]


@note
def finetune_notes(run: PlannedRun) -> list[str]:
    """Tell how much is trained, and what dropout does."""
    options = run.config.finetune
    if run.model is None:
        return []
    notes = [f"fine-tuning: trains {describe_trained(run.model, options)}"]
    if options.adapter == "lora" and options.lora.dropout:
        notes.append("finetune.lora.dropout: what is dropped depends on the mesh, and so does the curve")
    return notes
