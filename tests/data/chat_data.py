"""Conversations for tests, generated in every shape, and a tokenizer with the special tokens of other
families."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[1] / "assets"
WORDS = (
    "add",
    "the",
    "two",
    "Zahlen",
    "😀",
    "naïve",
    "x<|eot_id|>y",
    "</s>",
    "a\nb",
    "3.14",
    "日本",
    "[x]",
    "\t",
)
OTHERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|system|>",
    "<|prompter|>",
    "<|assistant|>",
    "<|endoftext|>",
    "<|end|>",
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""With marks, the text of a turn right after a line end, which joins it where the turn begins with
another."""

UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that treats turns before the last as Qwen3's does: they have no thinking, and the last has."""

OPEN_ASSISTANT = (
    "{% for message in messages %}<|{{ 'prompter' if message.role == 'user' else message.role }}|>"
    "{{ message.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""<|system|> … <|endoftext|> <|prompter|> … <|endoftext|> <|assistant|> … <|endoftext|>"""

ENDS_WHOLE_DIALOG = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
"""A token after the last turn alone, which is the end of no other."""


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))).strip() or "tab"


def conversation(rng: random.Random, *, turns: int = 3) -> list[dict[str, str]]:
    """User and assistant in turns, one to ``turns`` of each, perhaps after a system message."""
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, turns)):
        messages += [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": text(rng)}]
    return messages


def as_row(shape: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The row of a file that holds a conversation; alpaca has one turn, whose question it may have in two."""
    if shape == "messages":
        return {"messages": messages}
    if shape == "sharegpt":
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
    by_role = {message["role"]: message["content"] for message in messages}
    if shape == "prompt_completion":
        if len(messages) == 2:
            return {"prompt": by_role["user"], "completion": by_role["assistant"]}
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    asked, _, rest = by_role["user"].partition("\n\n")
    row = {"instruction": asked, "input": rest, "output": by_role["assistant"]}
    return row | {name: held for name, held in by_role.items() if name == "system"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def other_tokenizer(folder: Path) -> Path:
    """The shipped tokenizer.json with names of other families in place of some reserved ones."""
    content = (ASSETS / "tokenizer_json" / "tokenizer.json").read_text(encoding="utf-8")
    for number, name in enumerate(OTHERS, start=50):
        content = content.replace(f"<|reserved_special_token_{number}|>", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder
