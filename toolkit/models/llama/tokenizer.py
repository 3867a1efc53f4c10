"""Pre-tokenization regexes and special tokens of Llama 3 and 4, missing from their tiktoken files. Imports no
torch.

The ids of the special tokens are the same in all Llama 3 releases; the names differ.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.io.json_fields import read_if_there
from toolkit.models.common.tiktoken_form import TiktokenForm

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LLAMA4_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_N_LLAMA3, _N_LLAMA4 = 256, 2048


def llama3_names(*, older: bool = False) -> list[str]:
    """Return the 256 special tokens of Llama 3.0 (``older``) or of Llama 3.1 and later, in id order."""
    names: list[str | None] = [None] * _N_LLAMA3
    names[0], names[1] = "<|begin_of_text|>", "<|end_of_text|>"
    names[6], names[7], names[9] = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    if not older:
        names[4], names[8], names[10] = "<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>"
    reserved = (f"<|reserved_special_token_{index}|>" for index in range(_N_LLAMA3))
    return [name or next(reserved) for name in names]


def _llama4_names(count: int) -> list[str]:
    """Return the ``count`` special tokens of Llama 4, in id order."""

    def reserved(part: str, first: int, last: int) -> list[str]:
        return [f"{part}reserved_special_token_{index}" for index in range(first, last + 1)]

    text, vision, reasoning = "text_post_train_", "vision_", "reasoning_"
    names = [
        *("begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix"),
        *("header_start", "header_end", "eom", "eot", "step", *reserved(text, 0, 5)),
        *("python_start", "python_end", "finetune_right_pad", *reserved(text, 8, 68)),
        *("image_start", "image_end", *reserved(vision, 0, 1), "tile_x_separator", "tile_y_separator"),
        *(*reserved(vision, 2, 5), "image", *reserved(vision, 6, 6), "patch", *reserved(vision, 7, 1047)),
        *(*reserved(reasoning, 0, 7), "reasoning_thinking_start", "reasoning_thinking_end"),
    ]
    names += reserved("", 0, count - len(names) - 1)
    return [f"<|{name}|>" for name in names]


def _is_llama3_0(folder: Path) -> bool:
    """Return whether the model in ``folder`` is Llama 3.0; later releases scale RoPE."""
    hugging_face, meta = read_if_there(folder / "config.json"), read_if_there(folder / "params.json")
    if hugging_face.get("model_type") == "llama":
        rope = hugging_face.get("rope_parameters")
        return not (hugging_face.get("rope_scaling") or (isinstance(rope, dict) and rope.get("factor")))
    return bool(meta) and not meta.get("use_scaled_rope", False)


FORMS = (
    TiktokenForm(
        "Llama 3", 128_000, LLAMA3_PATTERN, _N_LLAMA3,
        lambda folder: llama3_names(older=folder is not None and _is_llama3_0(folder)),
        trained=True,
    ),
    TiktokenForm("Llama 4", 200_000, _LLAMA4_PATTERN, _N_LLAMA4, lambda folder: _llama4_names(_N_LLAMA4)),
)  # fmt: skip
