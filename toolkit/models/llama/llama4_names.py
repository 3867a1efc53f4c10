"""Names of the special tokens of Llama 4, which its tiktoken file leaves to the program. Imports no torch."""

from __future__ import annotations


def llama4_names(count: int) -> list[str]:
    """The ``count`` special tokens by offset."""

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
