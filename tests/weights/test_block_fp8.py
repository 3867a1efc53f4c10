"""Weights in fp8 with a scale per block, and layers of multi-token prediction, in Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.families import read
from toolkit.errors import DataError
from toolkit.io import tensor_file
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import table
from toolkit.models.registry import resolve, spec
from toolkit.weights.block_fp8 import read_block_fp8
from toolkit.weights.convert import convert, prepare
from toolkit.weights.safetensors import SafetensorsFolder

QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
CODE = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek's own: the largest value of a block becomes 448, the largest of the format."""
    scales = torch.empty([-(-size // 128) for size in weight.shape])
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row, column in torch.cartesian_prod(*map(torch.arange, scales.shape)):
        block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        scales[row, column] = weight[block].abs().max() / 448
        stored[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    """As the ``weight_dequant`` of DeepSeek's fp8_cast_bf16.py."""
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[tuple(map(slice, stored.shape))]
    return (stored.float() * full).bfloat16()


def publish(folder: Path, **fields: object) -> tuple[ModelArgs, dict[str, Tensor]]:
    """A small model as the large one is published, and its weights by name as they should be read."""
    args = resolve("deepseek_v3", "debugmodel", n_layers=2, vocab_size=320)
    config = spec(args.family).hf_config().write(args, dtype="bfloat16", bos=0, eos=1, pad=None)
    config |= {"quantization_config": QUANTIZED, "auto_map": CODE, "num_nextn_predict_layers": 1} | fields
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    files: dict[str, Tensor] = {}
    expected = {}
    for name, shape in table(args).hf_shapes.items():
        weight = torch.randn(shape) * 0.05
        if name.endswith("proj.weight") or "_proj_with_mqa" in name:
            files[name], files[f"{name}_scale_inv"] = quantize(weight)
            expected[name] = dequantize(files[name], files[f"{name}_scale_inv"])
        else:
            bias = name.endswith("e_score_correction_bias")
            files[name] = expected[name] = weight if bias else weight.bfloat16()
    predictor = "model.layers.2."
    files |= {
        predictor + it: torch.ones(3) for it in ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    }
    files[predictor + "self_attn.o_proj.weight"], scales = quantize(torch.randn(130, 7))
    files[predictor + "self_attn.o_proj.weight_scale_inv"] = scales
    save_file(files, folder / "model.safetensors")
    return args, expected


def test_matrices_are_those_of_the_published_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, expected = publish(tmp_path)
    source, rows = SafetensorsFolder(tmp_path), table(args)
    assert source.args == args
    for buffer in (1 << 23, 1000):  # few rows at a time
        monkeypatch.setattr(tensor_file, "BUFFER_BYTES", buffer)
        monkeypatch.setattr(f"{read_block_fp8.__module__}.BUFFER_BYTES", buffer)
        for name, row in rows.items():
            whole = torch.stack([expected[it] for it in row.hf_names])
            whole = whole if row.experts else whole[0]
            assert source.tensors[name].dtype == whole.dtype and source.tensors[name].shape == whole.shape
            assert torch.equal(source.read(name), whole), name
            region = tuple(slice(size // 3, size - size // 4) for size in whole.shape)
            assert torch.equal(source.read(name, region), whole[region]), name
    assert torch.isfinite(read(tmp_path)(torch.arange(20)[None])).all()


def test_a_checkpoint_of_them_is_exact(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    _, expected = publish(tmp_path / "hf")
    for step, here, there in (("hf-to-dcp", "hf", "dcp"), ("dcp-to-hf", "dcp", "back")):
        convert(prepare(step, tmp_path / here, tmp_path / there), verify=True)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[it], expected[it]) for it in found)


def test_prediction_layers_are_ignored_with_a_note(tmp_path: Path) -> None:
    publish(tmp_path)
    assert "also stores model.layers.2.*, 5 tensors: ignored" in SafetensorsFolder(tmp_path).note
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]  # another block, then
    save_file(tensors, tmp_path / "model.safetensors")
    names = SafetensorsFolder(tmp_path).tensors
    assert "model.layers.2.enorm.weight (not of this model)" in names


def test_a_matrix_without_its_scales_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    for scales in (None, torch.ones(1, 1)):
        broken = {key: it for key, it in tensors.items() if key != f"{name}_scale_inv"}
        save_file(
            broken if scales is None else broken | {f"{name}_scale_inv": scales},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(DataError, match=f"{name} as F8_E4M3"):
            SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": QUANTIZED | {"weight_block_size": [64, 64]}},
        {"quantization_config": QUANTIZED | {"quant_method": "awq"}},
        {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
    ],
    ids=str,
)
def test_other_formats_and_other_code_are_refused(fields: dict[str, object], tmp_path: Path) -> None:
    publish(tmp_path, **fields)
    with pytest.raises(DataError, match="quantization_config|auto_map"):
        SafetensorsFolder(tmp_path)
