"""Multimodal folders of Llama 4, fields of its config.json, and its choice of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.families import FAMILIES, read, save_transformers
from tests.models.small_llama import tokens_and_labels
from toolkit.errors import DataError
from toolkit.models.common.args import IRoPEArgs, MoEArgs
from toolkit.models.common.moe import Router
from toolkit.models.on_disk import read_hf_config
from toolkit.weights.hf_assets import special_tokens_of
from toolkit.weights.safetensors import SafetensorsFolder

VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
    "vision_output_dim": 32, "image_size": 28, "patch_size": 14, "projector_input_dim": 32,
    "projector_output_dim": 32,
}  # fmt: skip


def _rewrite(folder: Path, **fields: Any) -> Path:
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    save_transformers(folder, "llama4")
    return folder


def test_the_text_model_of_a_multimodal_folder_is_read(tmp_path: Path) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    options = FAMILIES["llama4"].options | {
        "vocab_size": 307, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": 5, "eos_token_id": [7, 8],
    }  # fmt: skip
    config = Llama4Config(text_config=options, vision_config=VISION, image_token_index=300)
    torch.manual_seed(1)
    reference = Llama4ForConditionalGeneration(config).eval()
    for tensor in reference.language_model.parameters():
        torch.nn.init.normal_(tensor, std=0.15)
    reference.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in stored} == {
        "language_model", "vision_model", "multi_modal_projector",
    }  # fmt: skip
    source, ignored = SafetensorsFolder(tmp_path), sum(not it.startswith("language") for it in stored)
    assert f"vision_model.* and multi_modal_projector.*, {ignored} tensors: ignored" in source.note
    tokens, _ = tokens_and_labels(2, 60)
    with torch.no_grad():
        found, expected = read(tmp_path)(tokens), reference(input_ids=tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert special_tokens_of(source) == {"bos": 5, "eos": [7, 8]}
    with pytest.raises(DataError, match="text_config: must describe the text model"):
        read_hf_config(_rewrite(tmp_path, text_config=None))
    with pytest.raises(DataError, match="architectures"):
        read_hf_config(_rewrite(tmp_path, text_config=options, architectures=["Llama4ForCausalLM"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size: must be a number of tokens"),
        ({"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers = .*: must be 0 at equal distances"),
        ({"no_rope_layers": "none"}, "no_rope_layers = .*: must be 0 at equal distances"),
        ({"layer_types": ["full_attention"] * 4}, 'layer_types = .*: must be "chunked_attention" with RoPE'),
        ({"moe_layers": [0, 1]}, "moe_layers = .*: must be every block of interleave_moe_layer_step, .1, 3."),
        ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning = .*: must be true or false"),
        ({"attention_bias": True}, "attention_bias = true: must be false"),
    ],
)
def test_models_that_compute_something_else_are_refused(
    fields: dict[str, Any], says: str, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((text / "config.json").read_text())
    with pytest.raises(DataError, match=says):
        read_hf_config(_rewrite(tmp_path, **fields))


def test_fields_of_older_files(text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((text / "config.json").read_text())
    args = read_hf_config(tmp_path)
    assert args.full_attention_step == 2 and args.irope == IRoPEArgs(temperature_floor=20)
    assert read_hf_config(_rewrite(tmp_path, attn_temperature_tuning=4)) == args
    assert read_hf_config(_rewrite(tmp_path, no_rope_layers=[], layer_types=None, moe_layers=None)) == args
    every = read_hf_config(_rewrite(tmp_path, no_rope_layers=[1] * 4, num_hidden_layers=4))
    assert [every.window(layer) for layer in range(4)] == [13] * 4


def test_experts_are_chosen_by_logits_that_have_the_same_sigmoid() -> None:
    router = Router(4, MoEArgs(4, 1, 8, score_func="sigmoid", score_before_experts=True))
    with torch.no_grad():
        router.gate.weight.copy_(torch.diag(torch.tensor([30.0, 31.0, 32.0, 29.0])))
        routing = router(torch.ones(1, 4), None)
    assert routing.scores_TE.tolist() == [[1.0] * 4] and routing.experts_Tk.tolist() == [[2]]
