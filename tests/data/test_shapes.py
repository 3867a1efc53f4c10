"""Rows of any shape: they are read alike from every kind of file, or rejected with file and line."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chat_data import ASSETS, write_rows
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
from toolkit.data.chat.shapes import FORMATS, Shape
from toolkit.data.corpus import CLASSIFICATION, PREFERENCE
from toolkit.data.labeled_texts import LabeledTextEncoder, LabeledTexts
from toolkit.data.sources import open_corpus
from toolkit.data.tokenize import TextEncoder
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

CASES = 200
FILES = ("a.jsonl", "b.jsonl", "c.parquet", "d.jsonl")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": ["z"]}}}
ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}]
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
ANSWER = [{"role": "assistant", "content": "two", "weight": 1, "reasoning_content": "r"}]
WHOLE = [*ASKED, *CALLED, *ANSWER]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"enum": [1]}}}}}]
SAID = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "some words"}],
    CLASSIFICATION: [{"text": "some words", "label": "good"}, {"text": "some words", "label": 1}],
    "messages": [
        {"messages": WHOLE, "tools": TOOLS},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *ANSWER]},
    ],
    "sharegpt": [{"conversations": [*SAID, *SAID], "system": "s"}, {"conversations": SAID}],
    "alpaca": [{"instruction": "q", "input": "i", "output": "a", "system": "s"}],
    "prompt_completion": [
        {"prompt": "q", "completion": "a"},
        {"prompt": [*ASKED, *CALLED], "completion": ANSWER, "tools": TOOLS},
    ],
    PREFERENCE: [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": ASKED, "chosen": ANSWER, "rejected": CALLED[:1], "tools": TOOLS},
        {"chosen": WHOLE, "rejected": [*ASKED, *ANSWER]},
    ],
}
"""Rows that are right, by format."""


def _deep() -> Any:
    value: Any = "x"
    for level in range(300):
        value = {"a": value} if level % 2 else [value]
    return value


VALUES: list[list[Any]] = [
    [...],
    [None],
    [True, 0, 1, 2, -1, 10**30, "x", "\ud800", "{", "[1]"],
    ["", " ", [], {}, [None], [[]], [{}], [""], {"a": None}],
    [_deep(), {"\ud800": 1}, [["x"]], WHOLE, ANSWER[0], TOOLS, [CALL], SAID, [ANSWER[0], None]],
]
"""Values in place of a key's own: none at all (``...``), null, of another type, empty, nested."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list in a value, with each of its keys."""
    if isinstance(value, Mapping | list):
        for key in list(value) if isinstance(value, Mapping) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _changed(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A row of which one or two values are others."""
    row = copy.deepcopy(row)
    for _ in range(rng.choice([1, 1, 2])):
        if places := list(_places(row)):
            holder, key = rng.choice(places)
            value = copy.deepcopy(rng.choice(rng.choice(VALUES)))
            if value is ...:
                del holder[key]
            else:
                holder[key] = value
    return row


@functools.cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer")


def _shape(name: str) -> Shape | LabeledTexts | None:
    if name == CLASSIFICATION:
        return LabeledTexts("text", "label", ("bad", "good"))
    return None if name == "text" else Shape(name)


@functools.cache  # a template takes longer to compile than to use
def _encoder(name: str, folder: Path) -> Any:
    shape = _shape(name)
    if isinstance(shape, LabeledTexts):
        return LabeledTextEncoder(_tokenizer(), shape, "uint32")
    if shape is None:
        return TextEncoder("text", _tokenizer(), "uint32")
    files = tuple(folder / file for file in FILES)
    return ConversationEncoder(_tokenizer(), shape, ChatOptions(TEMPLATE), "uint32", files)


def _outcome(name: str, path: Path) -> list[Any] | str:
    """Tokens, and masks or classes, of all rows of a file, or the message of its error."""
    encode, found = _encoder(name, path.parent), []
    try:
        for encoded in map(encode, open_corpus("x", str(path), shape=_shape(name)).chunks()):
            extra = [values for key, values in (encoded.extra or {}).items() if key != "conversations.bin"]
            found += [values.tolist() for values in (encoded.tokens, encoded.lengths, *extra)]
    except DataError as error:
        return str(error)
    return found


def _table(rows: list[dict[str, Any]]) -> pa.Table | None:
    """The rows as a table; None where it cannot hold them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in columns})
        pq.write_table(table, pa.BufferOutputStream())
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None
    return table


def _alike(one: list[Any] | str, other: list[Any] | str) -> bool:
    return one == other or (isinstance(one, str) and isinstance(other, str))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_any_shape_is_read_or_rejected_with_file_and_line(name: str, tmp_path: Path) -> None:
    """Alike from JSON lines, from Parquet, and from JSON lines that are exported from a table."""
    lines, alone, parquet, exported = (tmp_path / file for file in FILES)
    rng, tables = random.Random(name), 0
    for _ in range(-(-CASES // len(ROWS))):
        right = rng.choice(ROWS[name])
        rows = [right, _changed(right, rng)]
        found = _outcome(name, write_rows(lines, rows))
        assert isinstance(found, list) or re.search(r"a\.jsonl, line 2\b(.|\n)*\n  fix:  ", found), rows
        first = _outcome(name, write_rows(alone, rows[1:]))  # which the checks before launch look at
        assert isinstance(first, list) or re.search(r"b\.jsonl, line 1\b(.|\n)*\n  fix:  ", first), rows
        assert type(found) is type(first), rows
        table = _table(rows)
        if table is None:
            continue
        pq.write_table(table, parquet)
        of_table = _outcome(name, parquet)
        assert isinstance(of_table, list) or re.search(r"c\.parquet\b(.|\n)*\n  fix:  ", of_table), rows
        of_export = _outcome(name, write_rows(exported, table.to_pylist()))
        assert _alike(of_export, of_table), rows
        if rows[0].keys() == rows[1].keys():  # a column that a line lacks is one of nulls
            assert _alike(found, of_export), rows
        tables += isinstance(of_table, list)
    assert tables


def test_every_format_has_rows_that_are_right(tmp_path: Path) -> None:
    assert set(ROWS) == {*FORMATS, PREFERENCE, CLASSIFICATION, "text"}
    for name, rows in ROWS.items():
        for row in rows:
            assert isinstance(_outcome(name, write_rows(tmp_path / FILES[0], [row])), list)
