"""Folders of weights that are not what they should be: one message each, before any weight is read."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.tampering import shorten_storage
from tests.weights.stories import ASSETS, needs_assets
from toolkit.cli import run_command
from toolkit.errors import DataError
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder

pytestmark = needs_assets
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def rewrite_header(folder: Path, change: Callable[[str], str]) -> None:
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].decode()).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def in_two(folder: Path, *, both: str = "", index: dict[str, str] | None = None) -> None:
    """Two files and their index, with the tensor ``both`` in each, and ``index`` written over the truth."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    truth = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        save_file(
            {name: tensors[name] for name in dict.fromkeys([*part, *filter(None, [both])])}, folder / file
        )
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": truth | (index or {})}))


def cut(folder: Path, *, by: int = 0, to: int | None = None) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) - by if to is None else to])


def retype(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {UP: tensors[UP].to(torch.int8)}, folder / WEIGHTS)


def quantize(folder: Path) -> None:
    """As GPTQ does."""
    tensors = load_file(folder / WEIGHTS)
    packed = tensors.pop("model.layers.0.self_attn.q_proj.weight").to(torch.int32)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.qweight": packed}, folder / WEIGHTS)


def widen_head(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    head = torch.cat([tensors["model.embed_tokens.weight"]] * 2)
    save_file(tensors | {"lm_head.weight": head}, folder / WEIGHTS)


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "data cut short": (lambda f: cut(f, by=1), "is truncated: its header describes"),
    "header cut short": (
        lambda f: cut(f, to=1000),
        "not a safetensors file, or truncated: it has 1,000 bytes",
    ),
    "empty": (lambda f: cut(f, to=0), "not a safetensors file, or truncated: it has 0 bytes"),
    "more than described": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"x"),  # type: ignore[arg-type, return-value]
        "has bytes after its last tensor",
    ),
    "no JSON": (lambda f: rewrite_header(f, lambda h: h.replace("{", "[", 1)), "damaged header"),
    "metadata that are none": (
        lambda f: rewrite_header(f, lambda h: h.replace('{"format":"pt"}', "1.5", 1)),
        "its __metadata__ must be strings by name",
    ),
    "a shape that lies": (
        lambda f: rewrite_header(f, lambda h: h.replace("[172,64]", "[173,64]", 1)),
        "invalid header: model.layers.",
    ),
    "a dtype that lies": (
        lambda f: rewrite_header(f, lambda h: h.replace('"F32"', '"F16"', 1)),
        "invalid header: ",
    ),
    "a name twice": (
        lambda f: rewrite_header(f, lambda h: h.replace("layers.1.mlp.up", "layers.0.mlp.up", 1)),
        f"{UP} occurs twice",
    ),
    "integers": (retype, f"has {UP} as I8; weights must be one of F64, F32, F16, BF16"),
    "weights of integers beside them": (quantize, "q_proj.qweight as I32; weights must be one of F64, F32"),
    "a tied head of another shape": (widen_head, "stores an output head that differs from the embedding"),
    "nothing": (lambda f: (f / WEIGHTS).unlink(), f"it has neither {WEIGHTS} nor {INDEX}"),
    "pickles": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin") and None, ".bin files are pickles"),
    "a file missing": (
        lambda f: in_two(f, index={NORM: "c.safetensors"}),
        "lists files that do not exist: c.safetensors",
    ),
    "in two files": (
        lambda f: in_two(f, both=NORM),
        f"has duplicate tensors: {NORM} in a.safetensors and in b.safetensors",
    ),
    "in another file": (
        lambda f: in_two(f, index={UP: "b.safetensors"}),
        f"lists tensors that do not exist: {UP} in b.safetensors",
    ),
    "a path in the index": (lambda f: in_two(f, index={NORM: "../a.safetensors"}), "no weight_map"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_refused_by_what_is_wrong(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "stories260K/hf", folder)
    damage, message = DAMAGED[case]
    damage(folder)
    with pytest.raises(DataError) as caught:
        SafetensorsFolder(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_shards_that_are_sound_are_read_through_their_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "stories260K/hf", folder)
    before = SafetensorsFolder(folder)
    norm = before.read("norm.weight")
    in_two(folder)
    after = SafetensorsFolder(folder)
    assert after.tensors == before.tensors
    assert torch.equal(after.read("norm.weight"), norm)


def test_a_file_that_shrinks_after_it_was_opened_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "stories260K/hf", folder)
    source = SafetensorsFolder(folder)
    cut(folder, to=2000)
    with pytest.raises(DataError, match="ends .* bytes too early"):
        source.read("norm.weight")


def view_past_its_storage(part: Path) -> None:
    """A matrix of which the pickle tells twice as many rows as there are."""
    with zipfile.ZipFile(part) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        records = {name: archive.read(name) for name in archive.namelist()}
    # BININT1 64, BININT1 64: the shape of wq; M is BININT2
    old, new = b"K@K@\x86", b"M\x80\x00K@\x86"
    assert old in records[name]
    records[name] = records[name].replace(old, new, 1)
    with zipfile.ZipFile(part, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)


META_DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (
        lambda part: part.write_bytes(part.read_bytes()[:-2000]),
        "consolidated.00.pth is damaged or truncated",
    ),
    "empty": (lambda part: part.write_bytes(b""), "consolidated.00.pth is damaged or truncated"),
    "only begun": (
        lambda part: part.write_bytes(b"\x80\x02"),
        "consolidated.00.pth is damaged or truncated",
    ),
    "a pickle that reads from nothing": (
        lambda part: part.write_bytes(b"\x80\x02K\x01e."),
        "consolidated.00.pth is damaged or truncated",
    ),
    "not of torch": (lambda part: part.write_bytes(b"x" * 5000), "consolidated.00.pth"),
    "code": (
        lambda part: torch.save({"a": Path("a")}, part),
        "contains other objects than tensors and is not loaded",
    ),
    "a list": (lambda part: torch.save([torch.ones(1)], part), "does not contain a dictionary of tensors"),
    "integers": (
        lambda part: torch.save(torch.load(part) | {"norm.weight": torch.ones(64, dtype=torch.int8)}, part),
        "has norm.weight as torch.int8",
    ),
    "weights of integers beside them": (
        lambda part: torch.save(
            {
                name.replace("0.attention.wq.weight", packed): t.int() if "0.attention.wq" in name else t
                for name, t in torch.load(part).items()
                for packed in ("0.attention.wq.packed",)
            },
            part,
        ),
        "has layers.0.attention.wq.packed as torch.int32",
    ),
    "an object": (
        lambda part: torch.save(torch.load(part) | {"epoch": 3}, part),
        "has epoch as int; weights must be tensors",
    ),
    "a tensor larger than its storage": (
        lambda part: part.write_bytes(shorten_storage(part.read_bytes(), by=4)),
        "it should have ",
    ),
    "compressed": (
        lambda part: part.write_bytes(shorten_storage(part.read_bytes(), by=0, compress=True)),
        "are stored",
    ),
    "a view past its storage": (view_past_its_storage, "it should have "),
    "of before zip files": (
        lambda part: torch.save(torch.load(part), part, _use_new_zipfile_serialization=False),
        "has torch's old format: save it again with a newer torch",
    ),
    "no embedding": (
        lambda part: torch.save({"norm.weight": torch.ones(64)}, part),
        "is not a supported model",
    ),
    "no parts": (lambda part: part.unlink(), "there is no consolidated.00.pth"),
    "a part missing": (
        lambda part: part.rename(part.with_name("consolidated.01.pth")),
        "lacks files of the model: consolidated.00.pth",
    ),
    "parts that differ": (
        lambda part: torch.save(
            {name: t for name, t in torch.load(part).items() if name != "layers.0.attention.wq.weight"},
            part.with_name("consolidated.01.pth"),
        ),
        "lacks tensors: layers.0.attention.wq.weight in file 01",
    ),
    "parts of other sizes": (
        lambda part: torch.save(
            {name: t[..., :32].clone() if "w1" in name else t for name, t in torch.load(part).items()},
            part.with_name("consolidated.01.pth"),
        ),
        "do not match one another: layers.0.feed_forward.w1.weight: (172, 64), (172, 32)",
    ),
}


@pytest.mark.parametrize("case", META_DAMAGED)
def test_damaged_parts_are_refused_by_what_is_wrong(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "stories260K/meta", folder)
    damage, message = META_DAMAGED[case]
    damage(folder / "consolidated.00.pth")
    with pytest.raises(DataError) as caught:
        MetaFolder(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_buffers_of_integers_are_ignored_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Meta's files as in Hugging Face's, where ``tests/weights/test_open.py`` has them."""
    shutil.copytree(ASSETS / "stories260K/meta", tmp_path / "model")
    before, part = MetaFolder(tmp_path / "model"), tmp_path / "model/consolidated.00.pth"
    torch.save(torch.load(part) | {"layers.0.attention.steps": torch.tensor(9)}, part)
    assert MetaFolder(tmp_path / "model").tensors == before.tensors and not before.note
    assert run_command("convert", ["meta-to-dcp", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    assert "also stores layers.0.attention.steps: ignored" in capsys.readouterr().out
