"""Lines of keys, for every way in which TOML can write them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compat import tomllib
from toolkit.config.key_lines import key_lines

TRICKY = '''\
# [comment] = "x"
top = 1 # top2 = 2
"quoted.key" = '# no comment'
a.b . c = [ # [x]
  "]", "# no", # "y"
  [1, 2,],
  { inner = "}", deep.er = [
     3 ] },
]

[table]   # x = 1
text = """
[not.a.table]
key = "value"
escaped \\""" quote
"""
raw = \'\'\'
z = 1\'\'\'\'
date = 1979-05-27 07:32:00Z
inline = { one = 1, two = { three = "a,b" }, four.five = [1, 2] }
  [ table . "sub table" ]
  last = inf'''


def test_tricky_document() -> None:
    tomllib.loads(TRICKY)
    assert [(".".join(path), line) for path, line in key_lines(TRICKY)] == [
        ("top", 2),
        ("quoted.key", 3),
        ("a.b.c", 4),
        ("table", 11),
        ("table.text", 12),
        ("table.raw", 17),
        ("table.date", 19),
        ("table.inline.one", 20),
        ("table.inline.two.three", 20),
        ("table.inline.four.five", 20),
        ("table.sub table", 21),
        ("table.sub table.last", 22),
    ]


VALUES = [
    *("1", "-1.5e3", "true", "[]", "{}", "1979-05-27 07:32:00"),
    *('"# [x] = \\" "', "'a = \"'", '"""\n[x]\ny = 1\n\\""""', "'''\n\n'x'''"),
    *("[\n# ]\n1,\n2]", '["a]", [\n"b"]]'),
]
GAPS = ["", "\n", "  \t", "# k9 = [\n", "\n\n# '''\n"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_leaf_has_the_line_it_was_written_on(data: st.DataObject) -> None:
    text, expected, header = "", {}, ()
    for index in range(data.draw(st.integers(1, 12))):
        text += data.draw(st.sampled_from(GAPS))
        line = text.count("\n") + 1
        style = data.draw(st.sampled_from(["header", "plain", "dotted", "quoted", "inline"]))
        key, value = f"k{index}", data.draw(st.sampled_from(VALUES))
        if style == "header":
            header = (f"t{index}", "sub")
            text += f"[t{index}.'sub']"
        elif style == "inline":
            text += f"{key} = {{ a = {value}, b.c = 1 }}" if "\n" not in value else f"{key} = {{ b.c = 1 }}"
            expected[(*header, key, "b", "c")] = line
        else:
            written = {"plain": key, "dotted": f"{key} . x", "quoted": f'"{key}"'}[style]
            text += f"{written}={value}"
            expected[(*header, key, "x") if style == "dotted" else (*header, key)] = line
        text += data.draw(st.sampled_from(["\n", " # end\n", "\r\n"]))
    found = dict(key_lines(text))
    assert {path: found.get(path) for path in expected} == expected
    assert {path for path in _paths(tomllib.loads(text)) if path not in found} == set(), (
        "a leaf without a line"
    )


def _paths(document: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in document.items():
        here = (*prefix, key)
        paths += _paths(value, here) if isinstance(value, dict) and value else [here]
    return paths
