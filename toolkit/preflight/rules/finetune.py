"""Rules for fine-tuning: adapters and trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from toolkit.config.finetune import Finetune
from toolkit.config.local_paths import expand_user
from toolkit.config.name_patterns import unmatched
from toolkit.config.schema import DEFAULT
from toolkit.data.build import corpora
from toolkit.data.corpus import PREFERENCE, UNPAIRED
from toolkit.data.run_data import BASE_CORPUS
from toolkit.errors import CheckpointError, DataError, Problem, did_you_mean, first_few
from toolkit.finetune.parameters import (
    ALL_LINEAR,
    EXPERTS,
    all_shapes,
    describe_trained,
    fixed_end,
    hf_linear_names,
    idle_targets,
    lora_targets,
    trained_names,
)
from toolkit.finetune.peft_config import is_peft_folder, unsupported_by_peft
from toolkit.finetune.saved_options import differences, saved_options
from toolkit.models.common.parameter_table import EMBEDDING
from toolkit.models.from_config import weights_folder
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import adaptable, is_classifier_head, parameter_shapes
from toolkit.preflight.planned_run import PlannedRun, note, rule

_SHOWN = 8
_ADAPTERS = "use a PEFT folder, or a step-N of a run with an adapter"
_FORMS = "use an adapter of this model, in a format listed in docs/fine_tuning.md"
_TARGETS = "finetune.lora.target_modules"
_FREEZING = ("frozen", "freeze_first_layers", "freeze_last_layers")
_ROTATE = "parallelism.context_parallel_rotate_method"


@rule()
def lora_has_targets(run: PlannedRun) -> list[Problem]:
    """Check that each of LoRA's targets is a weight that LoRA may update."""
    options = run.config.finetune
    unused = options.adapter != "lora" and run.config.origin(_TARGETS) == DEFAULT
    if run.model is None or unused:
        return []
    args = run.model
    names = [name for pair in zip(*hf_linear_names(args).items(), strict=True) for name in pair]
    experts = any(row.experts for row in adaptable(args).values())
    names = [*dict.fromkeys(names), *([EXPERTS] if experts else []), ALL_LINEAR]
    patterns = options.lora.target_modules
    routers = any(row.router for row in adaptable(args).values())
    without = ", and LoRA adapts no routers of this model" if args.moe and not routers else ""
    if not patterns:
        return [run.problem(_TARGETS, "LoRA needs at least one target", f"use some of {', '.join(names)}")]
    return [
        _fixed_end(run, pattern, weight)
        if (weight := fixed_end(args, pattern))
        else run.problem(
            _TARGETS,
            f'"{pattern}" is not a linear layer{without}',
            did_you_mean(pattern, names, f"use some of {', '.join(names)}"),
        )
        for pattern in idle_targets(args, patterns)
    ]


def _fixed_end(run: PlannedRun, pattern: str, weight: str) -> Problem:
    """Describe a target that matches a tied embedding or head, or a classifier's head."""
    assert run.model is not None
    if is_classifier_head(weight, run.model):
        rule = f'"{pattern}" is the head of a classifier, which is trained fully with any adapter'
        return run.problem(_TARGETS, rule, "remove it")
    what = "embedding" if weight == EMBEDDING else "output head"
    rule = f'"{pattern}" is the {what}, and LoRA would update one of the tied embedding and head'
    fix = f'remove it; finetune.trainable = ["{EMBEDDING}"] trains it fully, embedding and head as one'
    return run.problem(_TARGETS, rule, fix)


@rule()
def token_rows_exist(run: PlannedRun) -> Iterator[Problem]:
    """Check that single rows of the embedding exist, and are not trained as part of all rows."""
    key, options = "finetune.trainable_token_indices", run.config.finetune
    indices = options.trainable_token_indices
    if run.model is None or options.adapter != "lora" or not indices:
        return
    if beyond := [it for it in indices if it >= run.model.vocab_size]:
        rule = f"{beyond[0]} is not a token of a vocabulary of {run.model.vocab_size}"
        yield run.problem(key, rule, f"use numbers from 0 to {run.model.vocab_size - 1}")
    if len(set(indices)) < len(indices):
        twice = next(it for it in indices if indices.count(it) > 1)
        yield run.problem(key, f"{twice} is listed twice", "list each token once")
    if EMBEDDING in trained_names([EMBEDDING], run.model, options):
        rule = f"finetune.trainable selects {EMBEDDING}, so that all its rows are trained"
        yield run.problem(key, rule, "remove it, or that pattern", "finetune.trainable")
    if "tok_embeddings" in lora_targets(run.model, options):
        rule = f"{_TARGETS} adapts the whole embedding, which cannot have single trained rows as well"
        yield run.problem(key, rule, "remove one of the two", _TARGETS)
    if run.model.tie_embeddings and run.config.parallelism.pipeline_parallel_degree > 1:
        rule = "the last pipeline stage has a copy of the tied embedding, whose rows cannot be trained alone"
        fix = 'set it to 1, or train the whole embedding with finetune.trainable = ["tok_embeddings.weight"]'
        yield run.problem("parallelism.pipeline_parallel_degree", rule, fix, key)


@rule()
def noise_has_lengths(run: PlannedRun) -> list[Problem]:
    """Check that NEFTune, whose noise is scaled by the number of tokens, can recognize padding."""
    key, data = "finetune.neftune_noise_alpha", run.config.data
    if run.config.finetune.neftune_noise_alpha is None or data.packing or data.document_mask:
        return []
    rule = "is scaled by the tokens of a document, which padded rows without data.document_mask do not tell"
    return [run.problem(key, rule, "set data.document_mask = true, or data.packing = true")]


@rule()
def lora_rank_is_low(run: PlannedRun) -> list[Problem]:
    """Check that LoRA's rank does not exceed the rank of an adapted weight."""
    options = run.config.finetune
    if options.adapter != "lora" or run.model is None:
        return []
    rows, rank = adaptable(run.model), options.lora.rank
    sides = {rows[it].name: min(rows[it].shape[-2:]) for it in lora_targets(run.model, options)}
    least = min(sides, key=sides.__getitem__, default=None)
    if least is None or rank <= (smallest := sides[least]):
        return []
    rule = f"the smallest dimension of {least} is {smallest}: a larger rank has no benefit"
    fix = f"set finetune.lora.rank to at most {smallest}; 8 to 64 is common"
    return [run.problem("finetune.lora.rank", rule, fix, _TARGETS, "finetune.adapter")]


@rule()
def dora_has_linear_layers(run: PlannedRun) -> list[Problem]:
    """Reject DoRA on experts, embedding and head."""
    options = run.config.finetune
    if options.adapter != "lora" or not options.lora.use_dora or run.model is None:
        return []
    rows = adaptable(run.model)
    others = [it for it in lora_targets(run.model, options) if rows[it].experts or rows[it].outer]
    if not others:
        return []
    key = "finetune.lora.use_dora"
    rule = f"experts, embedding and head have no magnitudes, and {_TARGETS} has {others[0]}"
    fix = f'set it to false, or {_TARGETS} = ["wq", "wk", "wv", "wo"]'
    return [run.problem(key, rule, fix, _TARGETS)]


@rule()
def enough_blocks(run: PlannedRun) -> Iterator[Problem]:
    """Check that the model has at least as many blocks as are to be adapted or frozen."""
    options = run.config.finetune
    if run.model is None:
        return
    layers = run.model.n_layers
    counts = {
        "finetune.freeze_first_layers": options.freeze_first_layers,
        "finetune.freeze_last_layers": options.freeze_last_layers,
    }
    key = "finetune.llama_adapter.adapter_layers"
    if options.adapter == "llama_adapter" and run.config.origin(key) != DEFAULT:  # the default means all
        counts[key] = options.llama_adapter.adapter_layers
    for key, count in counts.items():
        if count > layers:
            yield run.problem(key, f"the model has {layers} blocks", f"set it to at most {layers}")


@rule()
def patterns_match(run: PlannedRun) -> list[Problem]:
    """Check that each pattern matches a parameter and that some parameter is trained."""
    options = run.config.finetune
    if run.model is None:
        return []
    names = list(all_shapes(run.model, options))
    fix = f"use names of parameters such as {first_few(names, _SHOWN)}; * matches any characters"
    problems = [
        run.problem(f"finetune.{key}", f'"{pattern}" matches no parameter', fix)
        for key in ("trainable", "frozen")
        for pattern in unmatched(getattr(options, key), names)
    ]
    wanted = options.adapter != "lora" or lora_targets(run.model, options)  # otherwise reported elsewhere
    if not problems and wanted and not trained_names(names, run.model, options):
        key = next(key for key in (*_FREEZING, "trainable") if getattr(options, key))
        problems = [run.problem(f"finetune.{key}", "leaves no parameter to train", "freeze fewer")]
    return problems


@rule()
def freezing_acts(run: PlannedRun) -> list[Problem]:
    """Check that freezing has an effect: with an adapter, it affects only ``trainable``."""
    options = run.config.finetune
    asked = {key: value for key in _FREEZING if (value := getattr(options, key))}
    if run.model is None or not options.adds or not asked:
        return []
    names = list(all_shapes(run.model, options))
    without = options.model_copy(update={key: type(value)() for key, value in asked.items()})
    if trained_names(names, run.model, options) != trained_names(names, run.model, without):
        return []
    rule = "has no effect with an adapter, which freezes the model and is itself trained in every block"
    fix = "remove it"
    if options.adapter == "lora":
        fix += f'; to keep LoRA out of some blocks, set {_TARGETS} = ["layers.5.*"] and so on'
    return [run.problem(f"finetune.{key}", rule, fix) for key in asked]


@rule()
def adapter_fits_attention(run: PlannedRun) -> list[Problem]:
    """Check that adapters of keys and values have separate heads to add to, and no sinks or chunks."""
    adapter = run.config.finetune.adapter
    if run.model is None or adapter not in ("prefix_tuning", "llama_adapter"):
        return []
    if not run.model.mla and not run.model.sinks and not run.model.irope:
        return []
    rule = "learned keys have no position, which chunks and blocks without RoPE depend on"
    if run.model.sinks:
        rule = "attention sinks are part of the softmax over a token's own keys, and support no learned keys"
    if run.model.mla:
        rule = "latent attention makes the keys and values of all heads from one vector, and takes no others"
    return [run.problem("finetune.adapter", rule, 'set it to "lora"')]


@rule()
def prefix_has_a_backend(run: PlannedRun) -> Iterator[Problem]:
    """Check that prefix tuning runs with SDPA, the only backend that supports its dense mask."""
    if run.config.finetune.adapter != "prefix_tuning":
        return
    if run.config.model.attention not in ("auto", "sdpa"):
        rule = "prefix tuning needs sdpa: the other backends do not support a prefix"
        yield run.problem("model.attention", rule, 'set it to "sdpa" or "auto"')
    if run.config.parallelism.context_parallel_degree > 1 and run.config.value(_ROTATE) == "alltoall":
        rule = "ring attention does not support a prefix, because each of its steps has its own softmax"
        yield run.problem(_ROTATE, rule, 'set it to "allgather"')


@rule()
def pairs_are_read(run: PlannedRun) -> list[Problem]:
    """Check that each corpus has pairs of answers, and that answers cannot attend to each other."""
    if not run.config.finetune.compares:
        return []
    if run.config.finetune.classification.num_labels:
        rule = "a classifier generates no answers to compare"
        if run.config.finetune.objective == "reward":
            rule = "a reward model has one score instead of classes"
        return [run.problem("finetune.objective", rule, 'set it to "sft"')]
    trained = [corpus for corpus in corpora(run.config) if corpus.table != BASE_CORPUS]
    formats = (PREFERENCE, UNPAIRED) if run.config.finetune.unpaired else (PREFERENCE,)
    keys = {corpus.format_key for corpus in trained if corpus.format not in formats}
    rule = "the objective needs rows with two answers to one prompt"
    if run.config.finetune.unpaired:
        rule += f', or with one answer and its label ("{UNPAIRED}")'
    objective = "finetune.objective"
    problems = [run.problem(key, rule, f'set {key} to "{PREFERENCE}"', objective) for key in sorted(keys)]
    if not run.config.data.document_mask:
        rule = "an answer must not attend to the one that it is compared with"
        problems.append(run.problem("data.document_mask", rule, "set it to true"))
    if run.config.data.train_on == "all":
        rule = "the objective compares the answers of a pair, not their common prompt"
        problems.append(run.problem("data.train_on", rule, 'set it to "assistant" or "last_assistant"'))
    if run.config.finetune.objective == "reward":
        rule = "a reward model scores whole conversations, and trains on no single tokens"
        unused = {"train_on": "last_assistant", "mask_empty_thinking": True}
        problems += [
            run.problem(f"data.{name}", rule, "remove it", objective)
            for name, value in unused.items()
            if getattr(run.config.data, name) == value
        ]
    return problems


@rule()
def adapter_exportable(run: PlannedRun) -> list[Problem]:
    """Check that an adapter can be exported: as a PEFT folder, or merged into the model."""
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
    fix = "remove it"
    if not unsupported_by_peft(run.model, _with_plain_gate(options), replaced):
        fix += ', or set finetune.llama_adapter.gate = "layer"'
    if not _unmerged(run):
        fix += ", or set finetune.merge_on_export = true"
    return [run.problem(key, f"PEFT has no format for this adapter: {problem}", fix)]


def _with_plain_gate(options: Finetune) -> Finetune:
    plain = options.llama_adapter.model_copy(update={"gate": "layer"})
    return options.model_copy(update={"llama_adapter": plain})


def _unmerged(run: PlannedRun) -> list[Problem]:
    """Describe why the adapter cannot be merged at the end of the run."""
    checkpoint, key = run.config.checkpoint, "finetune.merge_on_export"
    if not (checkpoint.last_save_in_hf or checkpoint.hf_export_interval):
        rule = "nothing is exported"
        fix = "set checkpoint.last_save_in_hf or checkpoint.hf_export_interval, or remove it"
        return [run.problem(key, rule, fix)]
    if run.config.finetune.adapter != "lora":
        rule = f"{run.config.finetune.adapter} changes the attention; only LoRA can be merged into weights"
    elif weights_folder(run.config) is None and checkpoint.initial_load_path is None:
        rule = "the adapter's base model is not on disk: it was initialized from debug.seed"
    elif checkpoint.initial_load_broadcast:
        rule = "every rank reads the base model, but with checkpoint.initial_load_broadcast only rank 0 can"
    else:
        return []
    return [run.problem(key, rule, "remove it")]


@rule(DataError)
def adapter_path_fits(run: PlannedRun) -> list[Problem]:
    """Check that the initial adapter exists and fits the model and the adapter to train."""
    key, options = "finetune.adapter_path", run.config.finetune
    if run.model is None or not options.adds or options.adapter_path is None:
        return []
    if not run.config.checkpoint.enable:
        rule = "needs checkpoint.enable, which is false"
        return [run.problem(key, rule, "set checkpoint.enable = true")]
    if run.start.own:
        return []  # the run's own checkpoint takes precedence
    folder = expand_user(options.adapter_path)
    try:
        saved = saved_options(folder, run.model)
    except (DataError, CheckpointError) as error:
        rule, _, fix = str(error).partition("\n  fix:  ")
        otherwise = _FORMS if is_peft_folder(folder) else _ADAPTERS
        return [run.problem(key, rule, fix or otherwise)]
    if not saved.adds:
        return [run.problem(key, f"{folder} is a checkpoint of a run without adapter", _ADAPTERS)]
    problems = [
        run.problem(key, f"the adapter in {folder} has {wanted} = {value!r}", f"set {wanted} to that")
        for wanted, value in differences(saved, options, run.model).items()
    ]
    shapes = parameter_shapes(run.model)
    replaced = trained_names(shapes, run.model, saved) - trained_names(shapes, run.model, options)
    if not problems and replaced:
        rule = (
            f"the adapter in {folder} also trained {first_few(sorted(replaced), _SHOWN)} of the model itself"
        )
        problems.append(run.problem(key, rule, "add them to finetune.trainable"))
    return problems


@note
def finetune_notes(run: PlannedRun) -> Iterator[str]:
    """Note the trainable parameters and the effect of dropout."""
    options = run.config.finetune
    if run.model is None:
        return
    yield f"fine-tuning: trains {describe_trained(run.model, options)}"
    yield from _reshaped(run)
    if options.adapter == "lora" and options.lora.dropout:
        yield "finetune.lora.dropout: dropout, and therefore the curve, depends on the mesh"


def _reshaped(run: PlannedRun) -> list[str]:
    """Note changes to the base model that a PEFT folder cannot express."""
    checkpoint, options = run.config.checkpoint, run.config.finetune
    exports = checkpoint.last_save_in_hf or checkpoint.hf_export_interval
    folder = weights_folder(run.config)
    if run.model is None or folder is None or not (options.adds and exports) or options.merge_on_export:
        return []
    try:
        base = asdict(read_hf_config(folder))
    except DataError:
        return []  # another rule reports it
    changed = [key for key, value in asdict(run.model).items() if value != base[key] and key != "max_seq_len"]
    if "classifier" in changed:  # PEFT saves the (untied) head, but not the class names
        changed = [key for key in changed if key not in ("classifier", "tie_embeddings")]
        changed += ["finetune.classification.label_names"] * bool(options.classification.label_names)
    if not changed:
        return []
    message = f"a PEFT folder does not record {', '.join(changed)}, which differ in {folder}"
    return [f"finetune.adapter: {message}; finetune.merge_on_export exports a LoRA with them"]


@rule()
def loss_options_apply(run: PlannedRun) -> list[Problem]:
    """Check that options of the token loss are set only for language models."""
    config = run.config
    options = config.finetune
    if options.objective == "sft" and not options.classification.num_labels:
        return []
    objective = (
        "a classifier" if options.classification.num_labels else f'finetune.objective = "{options.objective}"'
    )
    return loss_options(run, objective)


def loss_options(run: PlannedRun, owner: str) -> list[Problem]:
    """Return a problem for each option of the token loss that is set, because ``owner`` has its own loss."""
    return [
        run.problem(field.key, f"{owner} has its own loss", "remove it")
        for field in run.config.present_fields()
        if field.key.startswith("loss.") and run.config.value(field.key) != field.default
    ]
