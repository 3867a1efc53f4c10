"""Experts that a Hugging Face folder fuses, gate and up side by side or interleaved, in bf16 and in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.families import read
from toolkit.errors import DataError
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import table
from toolkit.models.registry import resolve, spec
from toolkit.weights.convert import convert, prepare
from toolkit.weights.safetensors import SafetensorsFolder

QUANTIZED = {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}


def publish(
    folder: Path, *, quantized: bool, name: str = "gpt_oss", **fields: object
) -> tuple[ModelArgs, dict[str, Tensor]]:
    """A small model as the large one is published, and its weights by name as they should be read."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    args = resolve(name, "debugmodel", n_layers=2, dim=96, n_heads=6, vocab_size=320)
    config = spec(args.family).hf_config().write(args, dtype="bfloat16", bos=0, eos=1, pad=None)
    config |= {"quantization_config": QUANTIZED} if quantized else {}
    (folder / "config.json").write_text(json.dumps(config | fields))
    torch.manual_seed(1)
    files: dict[str, Tensor] = {}
    expected = {}
    for name, shape in table(args).hf_shapes.items():
        if quantized and name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = shape
            files[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16)).byte()
            files[f"{name}_scales"] = torch.randint(100, 125, (experts, rows, columns // 32)).byte()
            expected[name] = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
        else:
            files[name] = expected[name] = (torch.randn(shape) * 0.05).bfloat16()
    save_file(files, folder / "model.safetensors")
    return args, expected


@pytest.mark.parametrize(("name", "quantized"), [("gpt_oss", False), ("gpt_oss", True), ("llama4", False)])
def test_weights_and_regions_of_them_are_those_of_transformers(
    name: str, quantized: bool, tmp_path: Path
) -> None:
    args, expected = publish(tmp_path, quantized=quantized, name=name)
    source = SafetensorsFolder(tmp_path)
    assert source.args == args and source.note == ""
    for name, row in table(args).items():
        if (fused := row.fused) is None:
            continue
        whole = expected[row.hf][..., fused.columns(row.shape[1])].movedim(-1, 1)
        assert source.tensors[name].dtype == torch.bfloat16 and source.tensors[name].shape == whole.shape
        assert torch.equal(source.read(name), whole), name
        for part in (3, 7):  # at bounds of blocks and within them
            region = tuple(slice(size // part, size - size // 4) for size in whole.shape)
            assert torch.equal(source.read(name, region), whole[region]), name
    assert torch.isfinite(read(tmp_path)(torch.arange(20)[None])).all()


def test_a_checkpoint_of_them_is_exact(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    _, expected = publish(tmp_path / "hf", quantized=True)
    for step, here, there in (("hf-to-dcp", "hf", "dcp"), ("dcp-to-hf", "dcp", "back")):
        convert(prepare(step, tmp_path / here, tmp_path / there), verify=True)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[it], expected[it]) for it in found)


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, quantized=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    for scales in (None, torch.ones(8, 96, 3).byte()):
        broken = {key: it for key, it in tensors.items() if key != f"{name}_scales"}
        broken |= {} if scales is None else {f"{name}_scales": scales}
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(DataError, match=f"{name}_blocks as U8"):
            SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization_config": QUANTIZED | {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types = .*: must alternate"),
        ({"attention_bias": False}, "attention_bias = false: must be true"),
        ({"sliding_window": None}, "sliding_window: must be a number of tokens"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0: must be"),
    ],
)
def test_models_that_compute_something_else_are_refused(
    fields: dict[str, object], says: str, tmp_path: Path
) -> None:
    publish(tmp_path, quantized=False, **fields)
    with pytest.raises(DataError, match=says):
        SafetensorsFolder(tmp_path)
