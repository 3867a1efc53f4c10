"""Rules about fine-tuning: an adapter fits the model, and something is trained."""

from __future__ import annotations

from dataclasses import asdict

from toolkit.config.finetune import Finetune
from toolkit.config.local_paths import expand_user
from toolkit.config.name_patterns import idle
from toolkit.config.schema import DEFAULT
from toolkit.data.build import corpora
from toolkit.data.corpus import PREFERENCE
from toolkit.data.run_data import BASE_CORPUS
from toolkit.errors import CheckpointError, DataError, Problem, did_you_mean, first_few
from toolkit.finetune.parameters import (
    ALL_LINEAR,
    all_shapes,
    describe_trained,
    hf_linear_names,
    idle_targets,
    lora_targets,
    outside_blocks,
    trained_names,
)
from toolkit.finetune.peft_config import is_peft_folder, unsupported_by_peft
from toolkit.finetune.saved_options import differences, saved_options
from toolkit.models.common.table import EMBEDDING
from toolkit.models.from_config import weights_folder
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import is_classifier_head, linear_layers, parameter_shapes
from toolkit.preflight.planned_run import PlannedRun, note, rule

_SHOWN = 8
_ADAPTERS = "name a folder of PEFT's, or a step-N of a run with an adapter"
_FORMS = "take an adapter of this model, in a form that docs/fine_tuning.md lists"
_TARGETS = "finetune.lora.target_modules"
_FREEZING = ("frozen", "freeze_first_layers", "freeze_last_layers")
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
        _outside_blocks(run, pattern, weight)
        if (weight := outside_blocks(args, pattern))
        else run.problem(
            _TARGETS, f'"{pattern}" is none of the linear layers', did_you_mean(pattern, names, "name one")
        )
        for pattern in idle_targets(args, patterns)
    ]


def _outside_blocks(run: PlannedRun, pattern: str, weight: str) -> Problem:
    """Describe a target that is the embedding or the head."""
    assert run.model is not None
    what = "embedding" if weight == EMBEDDING else "output head"
    rule = f'"{pattern}" is the {what}, and LoRA updates linear layers of the blocks alone'
    if is_classifier_head(weight, run.model):
        return run.problem(_TARGETS, rule, "leave it out: a classifier's head is trained beside any adapter")
    trained = EMBEDDING if run.model.tie_embeddings else weight
    tied = ", with the embedding and the head as one" if run.model.tie_embeddings else ""
    fix = f'leave it out; finetune.trainable = ["{trained}"] trains it whole{tied}'
    return run.problem(_TARGETS, rule, fix)


@rule()
def lora_rank_is_low(run: PlannedRun) -> list[Problem]:
    """A rank is at most that of the weight that is updated."""
    options = run.config.finetune
    if options.adapter != "lora" or run.model is None:
        return []
    shapes, rank = parameter_shapes(run.model), options.lora.rank
    sides = {module: min(shapes[f"{module}.weight"]) for module in lora_targets(run.model, options)}
    least = min(sides, key=sides.__getitem__, default=None)
    if least is None or rank <= (smallest := sides[least]):
        return []
    rule = f"the smallest side of {least}.weight is {smallest}: a larger rank only costs"
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
    key = "finetune.llama_adapter.adapter_layers"
    if options.adapter == "llama_adapter" and run.config.origin(key) != DEFAULT:  # which is all of fewer
        counts[key] = options.llama_adapter.adapter_layers
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
        for pattern in idle(getattr(options, key), names)
    ]
    wanted = options.adapter != "lora" or lora_targets(run.model, options)  # else another rule tells
    if not problems and wanted and not trained_names(names, run.model, options):
        keys = ("frozen", "freeze_first_layers", "freeze_last_layers", "trainable")
        key = next(key for key in keys if getattr(options, key))
        problems = [run.problem(f"finetune.{key}", "leaves no parameter to train", "freeze less")]
    return problems


@rule()
def freezing_acts(run: PlannedRun) -> list[Problem]:
    """Beside an adapter there is something to freeze only where ``trainable`` names it."""
    options = run.config.finetune
    asked = {key: value for key in _FREEZING if (value := getattr(options, key))}
    if run.model is None or not options.adds or not asked:
        return []
    names = list(all_shapes(run.model, options))
    without = options.model_copy(update={key: type(value)() for key, value in asked.items()})
    if trained_names(names, run.model, options) != trained_names(names, run.model, without):
        return []
    rule = "does nothing beside an adapter, which freezes the model, and is itself trained in every block"
    fix = "leave it out"
    if options.adapter == "lora":
        fix += f'; {_TARGETS} = ["layers.5.*"] and the like keep a LoRA out of the other blocks'
    return [run.problem(f"finetune.{key}", rule, fix) for key in asked]


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
def dpo_has_a_reference(run: PlannedRun) -> list[Problem]:
    """The reference is the model as it was, which is there as long as an adapter alone is trained."""
    options, key = run.config.finetune, "finetune.objective"
    if options.objective != "dpo":
        return []
    if not options.adds:
        rule = "the reference is the model without its adapter, and this run has none"
        return [run.problem(key, rule, 'set finetune.adapter = "lora" (or prefix_tuning, llama_adapter)')]
    if options.classification.num_labels:
        rule = "a classifier writes no answers that could be compared"
        return [run.problem(key, rule, 'set it to "sft"')]
    if options.trainable:
        rule = "it trains parts of the model beside the adapter: without it, it would not be the reference"
        return [run.problem("finetune.trainable", rule, "leave it empty")]
    if options.adapter_path:
        rule = "what it holds would be no part of the reference, which is the model without its adapter"
        fix = "merge it into the model (tools.convert_weights merge), and begin with that"
        return [run.problem("finetune.adapter_path", rule, fix)]
    return []


@rule()
def dpo_reads_pairs(run: PlannedRun) -> list[Problem]:
    """Each corpus has pairs of answers, of which none sees another."""
    if run.config.finetune.objective != "dpo":
        return []
    learnt = [corpus for corpus in corpora(run.config) if corpus.table != BASE_CORPUS]
    keys = {corpus.format_key for corpus in learnt if corpus.format != PREFERENCE}
    rule = "DPO learns from rows with two answers to a prompt"
    problems = [run.problem(key, rule, f'set it to "{PREFERENCE}"') for key in sorted(keys)]
    if not run.config.data.document_mask:
        rule = "an answer must not see the one that it is compared with"
        problems.append(run.problem("data.document_mask", rule, "set it to true"))
    if run.config.data.train_on == "all":
        rule = "of a pair the answers are compared, not the prompt that they have in common"
        problems.append(run.problem("data.train_on", rule, 'set it to "assistant" or "last_assistant"'))
    return problems


@rule()
def exports_have_a_form(run: PlannedRun) -> list[Problem]:
    """An adapter is written as a folder of PEFT's, or as a model that it can be merged into."""
    options, checkpoint = run.config.finetune, run.config.checkpoint
    if run.model is None or not options.adds:
        return []
    if options.merge_on_export:
        return _unmerged(run)
    if not (checkpoint.last_save_in_hf or checkpoint.hf_export_interval):
        return []
    replaced = trained_names(parameter_shapes(run.model), run.model, options)
    problem = unsupported_by_peft(run.model, options, replaced)
    key = "checkpoint.last_save_in_hf" if checkpoint.last_save_in_hf else "checkpoint.hf_export_interval"
    if not problem:
        return []
    fix = "leave it out"
    if not unsupported_by_peft(run.model, _with_plain_gate(options), replaced):
        fix += ', or set finetune.llama_adapter.gate = "layer"'
    if not _unmerged(run):
        fix += ", or set finetune.merge_on_export = true"
    return [run.problem(key, f"PEFT has no form of this adapter: {problem}", fix)]


def _with_plain_gate(options: Finetune) -> Finetune:
    plain = options.llama_adapter.model_copy(update={"gate": "layer"})
    return options.model_copy(update={"llama_adapter": plain})


def _unmerged(run: PlannedRun) -> list[Problem]:
    """Why the adapter cannot be merged at the end of the run."""
    checkpoint, key = run.config.checkpoint, "finetune.merge_on_export"
    if not (checkpoint.last_save_in_hf or checkpoint.hf_export_interval):
        rule = "nothing is exported"
        fix = "set checkpoint.last_save_in_hf or checkpoint.hf_export_interval, or leave it out"
        return [run.problem(key, rule, fix)]
    if run.config.finetune.adapter != "lora":
        rule = f"{run.config.finetune.adapter} adds to the attention, and LoRA alone to weights"
    elif weights_folder(run.config) is None and checkpoint.initial_load_path is None:
        rule = "the model that the adapter is trained on is nowhere on disk: it was drawn by debug.seed"
    elif checkpoint.initial_load_broadcast:
        rule = "every rank reads the base, which with checkpoint.initial_load_broadcast rank 0 alone sees"
    else:
        return []
    return [run.problem(key, rule, "leave it out")]


@rule(DataError)
def adapter_path_fits(run: PlannedRun) -> list[Problem]:
    """The adapter to start from is there, of this model, and of the kind and size that is trained."""
    key, options = "finetune.adapter_path", run.config.finetune
    if run.model is None or not options.adds or options.adapter_path is None:
        return []
    if not run.config.checkpoint.enable:
        rule = "is loaded as checkpoints are, and checkpoint.enable is false"
        return [run.problem(key, rule, "set checkpoint.enable = true")]
    if run.start.own:
        return []  # the run's own goes before it
    folder = expand_user(options.adapter_path)
    try:
        saved = saved_options(folder, run.model)
    except (DataError, CheckpointError) as error:
        said, _, fix = str(error).partition("\n  fix:  ")
        otherwise = _FORMS if is_peft_folder(folder) else _ADAPTERS
        return [run.problem(key, said, fix or otherwise)]
    if not saved.adds:
        return [run.problem(key, f"{folder} is a checkpoint of a run without an adapter", _ADAPTERS)]
    problems = [
        run.problem(key, f"the adapter in {folder} has {wanted} = {value!r}", f"set {wanted} to that")
        for wanted, value in differences(saved, options, run.model).items()
    ]
    shapes = parameter_shapes(run.model)
    replaced = trained_names(shapes, run.model, saved) - trained_names(shapes, run.model, options)
    if not problems and replaced:
        rule = (
            f"the adapter in {folder} has trained {first_few(sorted(replaced), _SHOWN)} of the model itself"
        )
        problems.append(run.problem(key, rule, "name them in finetune.trainable"))
    return problems


@note
def finetune_notes(run: PlannedRun) -> list[str]:
    """Tell how much is trained, and what dropout does."""
    options = run.config.finetune
    if run.model is None:
        return []
    notes = [f"fine-tuning: trains {describe_trained(run.model, options)}"]
    notes += _reshaped(run)
    if options.adapter == "lora" and options.lora.dropout:
        notes.append("finetune.lora.dropout: what is dropped depends on the mesh, and so does the curve")
    return notes


def _reshaped(run: PlannedRun) -> list[str]:
    """Tell what a folder of PEFT's will not say of the model that the adapter was trained with."""
    checkpoint, options = run.config.checkpoint, run.config.finetune
    exports = checkpoint.last_save_in_hf or checkpoint.hf_export_interval
    folder = weights_folder(run.config)
    if run.model is None or folder is None or not (options.adds and exports) or options.merge_on_export:
        return []
    try:
        base = asdict(read_hf_config(folder))
    except DataError:
        return []  # another rule tells
    changed = [key for key, value in asdict(run.model).items() if value != base[key] and key != "max_seq_len"]
    if "classifier" in changed:  # the head is in the folder, and nothing ties it; names of classes are not
        changed = [key for key in changed if key not in ("classifier", "tie_embeddings")]
        changed += ["finetune.classification.label_names"] * bool(options.classification.label_names)
    if not changed:
        return []
    said = f"a folder of PEFT's does not tell of {', '.join(changed)}, which {folder} has otherwise"
    return [f"finetune.adapter: {said}; finetune.merge_on_export hands a LoRA on with them"]


@rule()
def loss_of_tokens(run: PlannedRun) -> list[Problem]:
    """Losses of tokens are what a language model learns from."""
    config = run.config
    tuned = config.finetune
    if tuned.objective == "sft" and not tuned.classification.num_labels:
        return []
    other = "classes" if tuned.classification.num_labels else f'finetune.objective = "{tuned.objective}"'
    return [
        run.problem(field.key, f"the loss of {other} is another", "leave it out")
        for field in config.present_fields()
        if field.key.startswith("loss.") and config.value(field.key) != field.default
    ]
