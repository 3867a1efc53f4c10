"""Rules about attention: which back end can do what is asked of it, and what else may surprise."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.hardware import lacks_c_compiler
from toolkit.models.common.attention_choice import flavor_attention
from toolkit.preflight.planned_run import PlannedRun, note, rule

_FLASH_KERNEL = ("flash", "varlen")
_NOT_ON_CPU = {
    "flex": "FlexAttention has no backward on CPU",
    "varlen": "varlen needs the flash kernel of a CUDA device",
    "flash": "this flash kernel is CUDA's; sdpa takes the CPU's own",
}
_ON_CPU_ALONE = {"blockwise": "blockwise is for CPUs, a GPU has kernels that do not wait for the host"}


def _chooser(run: PlannedRun) -> str:
    """The key that chose it."""
    named = run.config.model.attention == "auto" and flavor_attention(run.config.model.flavor or "")
    return "model.flavor" if named else "model.attention"


def active_window(run: PlannedRun) -> int | None:
    """The window of the model, where a sequence of the run is longer."""
    validation = ["validation.seq_len"] if run.config.validation.enable else []
    longest = max(run.config.value(key) for key in ["training.seq_len", *validation])
    window = run.model.sliding_window if run.model else None
    return window if window is not None and window < longest else None


@rule()
def attention_runs_on_device(run: PlannedRun) -> list[Problem]:
    """SDPA trains everywhere, the others on some devices."""
    asked, on_cpu = run.config.model.attention, run.hardware.device == "cpu"
    reason = _NOT_ON_CPU.get(asked) if on_cpu else _ON_CPU_ALONE.get(asked)
    if reason is None:
        return []
    fix = 'set it to "auto", which is what suits the device, or to "sdpa"'
    return [run.problem("model.attention", reason, fix)]


@rule()
def attention_keeps_documents_apart(run: PlannedRun) -> list[Problem]:
    """The flash kernel takes no mask; varlen is the same kernel, told where documents begin."""
    if run.hardware.device == "cpu" or run.attention != "flash" or not run.config.data.document_mask:
        return []
    return [
        run.problem(
            "model.attention",
            "the flash kernel takes no mask: with data.document_mask documents would see one another",
            'set it to "varlen", or data.document_mask = false',
        )
    ]


@rule()
def triton_has_a_compiler(run: PlannedRun) -> list[Problem]:
    """FlexAttention, and what inductor compiles, are kernels of Triton on a GPU."""
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
    return [run.problem(key, lacks, f"install gcc, or name a compiler in CC; or set {without}")]


@rule()
def attention_takes_window(run: PlannedRun) -> list[Problem]:
    """The flash kernel takes no mask, as a window is one; varlen is the same kernel, told of it."""
    window = active_window(run)
    if run.hardware.device == "cpu" or run.attention != "flash" or window is None:
        return []
    rule = f"this flash kernel has no window, and the model's, {window} tokens, is shorter than a sequence"
    fix = f'set it to "varlen", or training.seq_len to {window} or less'
    return [run.problem("model.attention", rule, fix)]


@rule()
def attention_takes_precision(run: PlannedRun) -> list[Problem]:
    """The flash kernel multiplies in 16 bits only."""
    choice = run.attention
    if run.hardware.device == "cpu" or choice not in _FLASH_KERNEL or run.precision == "bfloat16":
        return []
    fix = 'set model.attention = "flex" or "sdpa"'
    if run.hardware.native_bf16:
        fix = f'set training.mixed_precision_param = "bfloat16", or {fix[4:]}'
    return [run.problem(_chooser(run), f"{choice} computes in bfloat16, this run in float32", fix)]


@rule()
def attention_takes_head_dim(run: PlannedRun) -> list[Problem]:
    """Kernels are made for some sizes of a head."""
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
    rule = f"{choice} needs heads of {limit} dimensions, these have {head_dim}"
    return [run.problem(_chooser(run), rule, 'set model.attention = "sdpa", or change model.head_dim')]


@note
def attention_notes(run: PlannedRun) -> list[str]:
    """Tell what becomes of a choice that was made otherwise than here, and of one that is dear."""
    model, named = run.config.model, flavor_attention(run.config.model.flavor or "")
    choice = run.attention
    said = []
    if named and choice != named:
        why = _NOT_ON_CPU[named] if model.attention == "auto" else "model.attention goes before it"
        said.append(f"model.flavor {model.flavor} names {named} attention, this run takes {choice}: {why}")
    masked = ["the documents"] if run.config.data.document_mask else []
    masked += ["the model's window"] if active_window(run) else []
    if run.hardware.device != "cpu" and choice == "sdpa" and masked:
        said.append(
            f"model.attention sdpa keeps a dense mask of seq_len² bytes a sample for {' and '.join(masked)}, "
            "and has no flash kernel for it; flex and varlen need neither"
        )
    return said
