"""Rules for the devices and features that attention backends support."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.hardware import lacks_c_compiler
from toolkit.models.common.attention_choice import WITH_SINKS, flavor_attention
from toolkit.preflight.planned_run import PlannedRun, note, rule

_FLASH_KERNEL = ("flash", "varlen")
_NOT_ON_CPU = {
    "flex": "FlexAttention has no backward on CPU",
    "varlen": "varlen needs the flash kernel of a CUDA device",
    "flash": "this flash kernel needs CUDA; sdpa uses the CPU's own",
}
_ON_CPU_ALONE = {"blockwise": "blockwise is for CPUs; GPUs have kernels that do not wait for the host"}


def _chooser(run: PlannedRun) -> str:
    """Return the key that selected the backend."""
    named = run.config.model.attention == "auto" and flavor_attention(run.config.model.flavor or "")
    return "model.flavor" if named else "model.attention"


def active_window(run: PlannedRun) -> int | None:
    """Return the model's sliding window, or chunk, if the run's sequences are longer."""
    validation = ["validation.seq_len"] if run.config.validation.enable else []
    longest = max(run.config.value(key) for key in ["training.seq_len", *validation])
    window = run.model.sliding_window if run.model else None
    return window if window is not None and window < longest else None


def lacks_window(run: PlannedRun, window: int) -> str:
    """Return the rule broken by a kernel that supports no mask."""
    chunked = run.model is not None and run.model.irope is not None
    what = ("chunked attention", "the model's chunk") if chunked else ("sliding window", "the model's")
    return f"has no {what[0]}, and {what[1]}, {window} tokens, is shorter than a sequence"


@rule()
def attention_runs_on_device(run: PlannedRun) -> list[Problem]:
    """Check that the backend supports the device."""
    asked, on_cpu = run.config.model.attention, run.hardware.device == "cpu"
    reason = _NOT_ON_CPU.get(asked) if on_cpu else _ON_CPU_ALONE.get(asked)
    if reason is None:
        return []
    fix = 'set it to "auto", which selects by device, or to "sdpa"'
    return [run.problem("model.attention", reason, fix)]


@rule()
def attention_keeps_documents_apart(run: PlannedRun) -> Iterator[Problem]:
    """Check that documents can be masked: flash supports no mask, but varlen is the same kernel with
    boundaries."""
    if run.hardware.device == "cpu" or run.attention != "flash" or not run.config.data.document_mask:
        return
    yield run.problem(
        "model.attention",
        "the flash kernel supports no mask: documents would attend to one another",
        'set it to "varlen", or data.document_mask = false',
    )


@rule()
def triton_has_a_compiler(run: PlannedRun) -> list[Problem]:
    """Check that Triton can compile the kernels of FlexAttention and inductor on GPUs."""
    compiling = run.config.compile
    users = {
        "compile.enable": compiling.enable and compiling.backend == "inductor",
        "model.attention": run.attention == "flex",
        "training.fused_parts": bool(run.config.training.fused_parts),
    }
    key = next((key for key, compiles in users.items() if compiles), None)
    lacks = lacks_c_compiler()
    if run.hardware.device == "cpu" or key is None or lacks is None:
        return []
    without = 'compile.enable = false, model.attention = "sdpa" and training.fused_parts = []'
    return [run.problem(key, lacks, f"install gcc, or set CC to a compiler; or set {without}")]


@rule()
def attention_takes_window(run: PlannedRun) -> list[Problem]:
    """Check that a sliding window is supported: flash has none, but varlen is the same kernel with one."""
    window = active_window(run)
    if run.hardware.device == "cpu" or run.attention != "flash" or window is None:
        return []
    rule = f"this flash kernel {lacks_window(run, window)}"
    fix = f'set it to "varlen", or training.seq_len to {window} or less'
    return [run.problem("model.attention", rule, fix)]


@rule()
def attention_takes_sinks(run: PlannedRun) -> list[Problem]:
    """Check that the backend supports the model's attention sinks."""
    if run.model is None or not run.model.sinks or run.attention in WITH_SINKS:
        return []
    rule = f"{run.attention} does not support the attention sinks of this model"
    return [run.problem(_chooser(run), rule, 'set model.attention = "auto" or "sdpa"')]


@rule()
def attention_takes_precision(run: PlannedRun) -> list[Problem]:
    """Check that the flash kernel runs in bfloat16."""
    choice = run.attention
    if run.hardware.device == "cpu" or choice not in _FLASH_KERNEL or run.precision == "bfloat16":
        return []
    fix = 'set model.attention = "flex" or "sdpa"'
    if run.hardware.native_bf16:
        fix = f'set training.mixed_precision_param = "bfloat16", or {fix[4:]}'
    rule = f"{choice} computes in bfloat16, while this run computes in float32"
    return [run.problem(_chooser(run), rule, fix, "training.mixed_precision_param")]


@rule()
def attention_takes_head_dim(run: PlannedRun) -> list[Problem]:
    """Check that the backend supports the head dimension."""
    if run.model is None or run.hardware.device == "cpu":
        return []
    head_dim, choice = run.model.head_dim, run.attention
    # SDPA pads to a multiple of 8 before it calls the flash kernel; varlen does not.
    limit = {
        "flex": "at least 16" if head_dim < 16 else "",
        "flash": "at most 256" if head_dim > 256 else "",
        "varlen": "a multiple of 8, at most 256" if head_dim > 256 or head_dim % 8 else "",
    }.get(choice)
    if not limit:
        return []
    rule = f"{choice} needs a head_dim of {limit}, not {head_dim}"
    fix = 'set model.attention = "sdpa", or change model.head_dim'
    return [run.problem(_chooser(run), rule, fix, "model.head_dim", "model.n_heads", "model.dim")]


@note
def attention_notes(run: PlannedRun) -> Iterator[str]:
    """Note a backend other than the flavor's, and a backend that needs a lot of memory."""
    model, flavors = run.config.model, flavor_attention(run.config.model.flavor or "")
    choice = run.attention
    if flavors and choice != flavors:
        why = _NOT_ON_CPU[flavors] if model.attention == "auto" else "model.attention overrides it"
        yield f"model.flavor {model.flavor} selects {flavors} attention, but this run uses {choice}: {why}"
    masked = ["the documents"] if run.config.data.document_mask else []
    masked += ["the model's window"] if active_window(run) else []
    if run.hardware.device != "cpu" and choice == "sdpa" and masked:
        yield (
            "model.attention sdpa needs a dense mask of seq_len² bytes per sample for "
            f"{' and '.join(masked)}, and no flash kernel supports it; flex and varlen need no dense mask"
        )
