"""Runs that break the rules of ``rules.chat``, and what rules of corpora say of conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tests.preflight.bad_runs import bad

CODE = "data.mixture.code"
ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def _rows(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps(ROW) + "\n")


def _text(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"text": "hello"}) + "\n")
    (folder / "b.txt").write_text("hello")


def _narrator(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"messages": [{"role": "narrator", "content": "a"}]}) + "\n")


def _template(text: str):  # type: ignore[no-untyped-def]
    def prepare(folder: Path) -> None:
        _rows(folder)
        (folder / "mine.jinja").write_text(text)

    return prepare


HERE = "training.dataset_path=a.jsonl data.format=messages"

CASES = [
    bad("formats_act", "data.train_on=all", "no corpus of the run contains conversations", "set data.format"),
    bad("formats_act", "data.empty_mask=drop", "no corpus of the run contains conversations"),
    bad("formats_act", "data.chat_template=llama3", "no corpus of the run contains conversations"),
    bad(
        "formats_act",
        "data.format=alpaca training.format=messages training.dataset_path=a.jsonl",
        "every corpus sets its own format",
        prepare=_rows,
    ),
    bad(
        "formats_act",
        f"data.columns=messages=dialog training.columns=role=role {HERE}",
        "every corpus sets its own columns",
        prepare=_rows,
    ),
    bad("columns_known", "data.columns=messages=dialog", "set by text_column", "set data.text_column"),
    bad(
        "columns_known",
        f"data.columns=instruction=ask {HERE}",
        "messages has no 'instruction': its names are messages, tools, weight, role, content",
        prepare=_rows,
    ),
    bad(
        "corpus_readable",
        f"data.columns=messages=dialog {HERE}",
        "a.jsonl, line 1 has no column 'dialog', which format messages needs; it has 'messages'",
        'set data.columns, such as {messages = "messages"}',
        key="data.format",
        prepare=_rows,
    ),
    bad(
        "corpus_readable",
        "validation.format=messages validation.enable=true",
        "no column 'messages', which format messages needs; it has 'text'",
        "set validation.dataset_path: the included c4_validation is plain text",
    ),
    bad(
        "corpus_readable",
        f"{CODE}.format=messages {CODE}.dataset_path=a.jsonl",
        "no column 'messages', which format messages needs; it has 'text'",
        f"or another {CODE}.format",
        prepare=_text,
    ),
    bad(
        "corpus_readable",
        "data.format=messages",
        "it has 'text'",
        "or another data.format",
    ),
    bad(
        "corpus_readable",
        "training.dataset_path=b.txt data.format=messages",
        "b.txt is plain text, but format messages needs columns",
        prepare=_text,
    ),
    bad(
        "corpus_readable",
        HERE,
        "line 1, message 1: role 'narrator'",
        "roles are system",
        prepare=_narrator,
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=mine.jinja {HERE}",
        "chat template mine.jinja, line 2:",
        "correct the template",
        prepare=_template("{{ bos_token }}\n{% for %}"),
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=other.jinja {HERE}",
        "there is no such format or file",
        "or a file with a jinja template",
        prepare=_rows,
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=mine.jinja data.chat_template_kwargs=day=1 {HERE}",
        "has no variable 'day'",
        "the template uses bos_token, messages",
        prepare=_template("{{ bos_token }}{{ messages }}"),
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=llama3 data.chat_template_kwargs=day=1 {HERE}",
        "the format llama3 has no variables, but day are set",
        prepare=_rows,
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=llama3 data.mask_empty_thinking=true {HERE}",
        "the format llama3 has no think block",
        "set data.mask_empty_thinking = false",
        prepare=_rows,
    ),
    bad(
        "chat_template_readable",
        f"data.chat_template=mine.jinja data.mask_empty_thinking=true {HERE}",
        "chat template mine.jinja has no variable 'enable_thinking'",
        prepare=_template("{{ messages }}"),
    ),
    bad(
        "empty_thinking_is_masked",
        f"data.mask_empty_thinking=true data.train_on=all {HERE}",
        "every token is trained on",
        prepare=_rows,
    ),
    bad("new_tokens_have_rows", "model.additional_special_tokens=<|a|>,<|a|>", "<|a|> is listed twice"),
    bad(
        "new_tokens_have_rows",
        "model.additional_special_tokens=<|a|> finetune.adapter=lora",
        "an adapter's base model has no rows for them",
    ),
    bad(
        "text_column_acts",
        f"data.text_column=body {HERE}",
        "no corpus that it applies to has columns",
        prepare=_rows,
    ),
]
