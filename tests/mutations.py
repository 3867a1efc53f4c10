"""Changes to sound files, such as a bad disk, a hurried hand or an attacker makes: the same for the same seed."""

# ruff: noqa: E501
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

# What json.dumps would not write: a string that stands for it in the text until it is written.
_RAW = {
    "@digits@": "9" * 5000,
    "@negative digits@": "-" + "9" * 4000,
    "@infinity@": "1e999",
    "@Infinity@": "-Infinity",
    "@NaN@": "NaN",
    "@deep@": "[" * 50_000 + "]" * 50_000,
    "@deep object@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@half a pair@": '"\\ud800"',
}
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**6, 10**9, 10**18, 10**60, 1.5, -0.0, 1e308, 5e-324, [], {}, [[]], [None],
    {"a": 1}, "", "x", "0", "²", "\0", "../../etc/passwd", "/dev/zero", "a" * 5000, "\u202e", [1, "a", None],
    {"content": {"content": None}}, {"": {}}, [{}] * 3, *_RAW,
]  # fmt: skip


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of all that lies in a JSON value."""
    found = [] if found is None else found
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        found.append((value, key))
        places(value[key], found)
    return found


def written(value: Any) -> bytes:
    """A JSON value as text, with what json.dumps would not write."""
    text = json.dumps(value)
    for stand_in, raw in _RAW.items():
        text = text.replace(json.dumps(stand_in), raw)
    return text.encode()


def change_json(content: bytes, chance: random.Random) -> bytes:
    """A document of which one to three values are other values, are gone, or have another name."""
    document = [json.loads(content)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        around = places(document)
        shallow = [place for place in around if len(around) < 50 or isinstance(place[0], dict)]
        holder, key = chance.choice(shallow or around or [(document, 0)])
        match chance.randrange(6):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                name = chance.choice([key.upper(), "", "a" * 5000, "@half a pair@", key + ".x", "7", "²"])
                holder[name] = holder.pop(key)
            case 2 if isinstance(holder, list):
                holder.append(holder[key])
            case _:
                holder[key] = chance.choice(_VALUES)
    return written(document[0] if document else None)


def change_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes that are cut, altered, doubled or added to."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : at + chance.choice((1, 2, 64))]
            case 2:
                changed[at:at] = chance.choice(
                    (b"\xff", b"\0", b"{", b"}", b'"', b"\n", b"\xef\xbb\xbf", b"\xd8\x00")
                )
            case 3:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 4:
                changed[at:at] = changed[max(0, at - 64) : at]
            case _:
                changed[at : at + 8] = chance.randbytes(8)
    return bytes(changed)


def change_either(content: bytes, chance: random.Random) -> bytes:
    """A JSON document that is no longer what it was."""
    return (change_json if chance.random() < 0.75 else change_bytes)(content, chance)
