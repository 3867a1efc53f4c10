"""Changes to sound files, such as a bad disk, a hurried hand or an attacker makes: the same for a seed."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from typing import Any

import torch

from toolkit.checkpoint.manifest import build_manifest

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
    None, True, False, 0, -1, 1, 3, 10**6, 10**9, 10**18, 10**60, 1.5, -0.0, 1e308, 5e-324, [], {}, [[]],
    [None], {"a": 1}, "", "x", "0", "²", "\0", "../../etc/passwd", "/dev/zero", "a" * 5000, "\u202e",
    [1, "a", None], {"content": {"content": None}}, {"": {}}, [{}] * 3, *_RAW,
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
                holder[key] = copy.deepcopy(chance.choice(_VALUES))
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


def change_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header, of the right length as often as not."""
    length = int.from_bytes(content[:8], "little")
    header = change_either(content[8 : 8 + length], chance)
    told = len(header) if chance.random() < 0.8 else chance.choice((0, 7, length, 10**9, 2**63))
    return told.to_bytes(8, "little") + header + content[8 + length :]


def change_pth(content: bytes, chance: random.Random) -> bytes:
    """A file of torch.save with other tensors under other names, or altered bytes."""
    if chance.random() < 0.4:
        return change_bytes(content, chance)
    held = torch.load(io.BytesIO(content), weights_only=True)
    name = chance.choice(list(held))
    tensor = held[name]
    other: list[Callable[[], Any]] = [
        lambda: tensor.flatten(),
        lambda: tensor.to(chance.choice((torch.int8, torch.float64, torch.complex64))),
        lambda: tensor.to_sparse(),
        lambda: tensor.t() if tensor.dim() == 2 else tensor[None],
        lambda: tensor[..., ::2],
        lambda: tensor[:0],
        lambda: tensor.sum(),
        lambda: chance.choice((None, 1, "a", [tensor], {"a": tensor}, torch.Size([1]))),
        lambda: torch.nn.Parameter(tensor),
    ]
    match chance.randrange(5):
        case 0:
            held[chance.choice((1, None, "", 1.5, "a" * 5000, name.upper(), "layers.²."))] = held.pop(name)
        case 1:
            del held[name]
        case _:
            held[name] = chance.choice(other)()
    written = io.BytesIO()
    torch.save(held, written)
    return written.getvalue()


def change_manifest(content: bytes, chance: random.Random) -> bytes:
    """A manifest whose digest fits what it says, as often as not."""
    changed = change_either(content, chance)
    try:
        found = json.loads(changed)
        made = build_manifest(
            step=found["step"], files=found["files"], tensor_count=0, tensor_bytes=0, run=found["run"]
        )
        made |= {"tensors": found["tensors"]}
        return json.dumps(made).encode() if chance.random() < 0.7 else changed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return changed


def change_text(content: bytes, chance: random.Random) -> bytes:
    """A TOML file or a template with other values, lines and expressions."""
    text = content.decode()
    for _ in range(chance.choice((1, 1, 2))):
        lines = text.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        match chance.randrange(5):
            case 0:
                lines.insert(at, chance.choice(lines))
            case 1:
                lines[at] = lines[at].partition("=")[0] + "= " + chance.choice(_TOML) + "\n"
            case 2:
                lines[at] = "{{ " + chance.choice(_EXPRESSIONS) + " }}\n"
            case 3:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
            case _:
                lines[at : at + 1] = [change_bytes(lines[at].encode(), chance).decode("latin-1")]
        text = "".join(lines)
    return text.encode("utf-8", "replace")


_TOML = [
    "9" * 5000, "1000000", "1000000000", "-1", "0", "inf", "nan", '"x"', "true", "[]", "[1, 2]", "[[1], [2]]",
    "{}", "{a = 1}", '"' + "a" * 5000 + '"', '"\\u0000"', '"None"', "1979-05-27",
    "[" * 3000 + "]" * 3000, "1e400", '"""' + "x\n" * 400 + '"""',
]  # fmt: skip
_EXPRESSIONS = [
    "range(10**10) | list", "'a' * 10**10", "lipsum(10**9)", "[1] * 10**9", "10 ** 10 ** 10",
    "'%10000000000d' % 1", "'a'.center(10**10)", "messages.append(1)", "raise_exception(1)", "1 // 0",
    "undefined.a.b", "f(f)", "caller()", "self", "''.__class__.__mro__", "[[1]] | slice(10**9) | list",
    "messages | batch(10**10) | list", "x.y.z()", "'a' | indent(10**10)", "bos_token | tojson",
    "cycler() | list", "{} | tojson(indent=10**9)", "namespace(a=1).b.c",
]  # fmt: skip
