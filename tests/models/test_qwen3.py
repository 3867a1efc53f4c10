"""Qwen3: the numbers of transformers' Qwen3ForCausalLM, which is not ours, and published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models.small_llama import tokens_and_labels
from toolkit.errors import DataError
from toolkit.generation.generator import Generator
from toolkit.models.common.args import parameter_count
from toolkit.models.common.decoder import Decoder
from toolkit.models.on_disk import read_hf_config
from toolkit.models.registry import presets, resolve, spec
from toolkit.weights.convert import convert, prepare
from toolkit.weights.safetensors import SafetensorsFolder

# The published counts: of the model cards' safetensors, a tied head once.
PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_sizes_are_those_that_were_published(flavor: str) -> None:
    args = presets()["qwen3"][flavor]
    with torch.device("meta"):
        model = Decoder(args)
    assert parameter_count(args) == sum(p.numel() for p in model.parameters()) == PARAMETERS[flavor]


def save_transformers(folder: Path, *, tied: bool) -> Any:
    """A small model with random weights, as transformers leaves it on disk."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=307, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied,
        attn_implementation="eager", rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():  # transformers' own are too small to tell much
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    model.save_pretrained(folder)
    return model.eval()


def read(folder: Path) -> Decoder:
    source = SafetensorsFolder(folder)
    model = Decoder(source.args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_gradients(tied: bool, tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, tied=tied), read(tmp_path)
    tokens, labels = tokens_and_labels(2, 200)
    logits = reference(input_ids=tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    loss = model(tokens, labels=labels) / (labels != -100).sum()
    loss.backward()
    found = model(tokens)
    # fp32 rounding, the reference's fp32 angles above all; logits are of order 3.
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert abs(loss - expected) < 1e-6 * expected
    reference_grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    adapter = SafetensorsFolder(tmp_path)._adapter
    for name, parameter in model.named_parameters():
        theirs, ours = reference_grads[adapter.to_hf(name)], parameter.grad
        if adapter.reorders_rows(name):
            pairs = ours.unflatten(0, (-1, model.args.head_dim // 2, 2))
            ours = pairs.transpose(1, 2).reshape(theirs.shape)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


def test_documents_of_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, tied=False), read(tmp_path)
    tokens, _ = tokens_and_labels(1, 120)
    lengths = (50, 1, 69)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        found = model(tokens, documents=documents, positions=positions).split(lengths, dim=1)
        alone = [reference(input_ids=part).logits for part in tokens.split(lengths, dim=1)]
    for ours, theirs in zip(found, alone, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_greedy_text(tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, tied=False), read(tmp_path)
    prompt = tokens_and_labels(1, 9)[0]
    out = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    expected = out[0, prompt.shape[1] :].tolist()
    assert Generator(model).generate([prompt[0].tolist()], max_new_tokens=100)[0] == expected
    assert len(set(expected)) > 20, "a text of few tokens shows no mistake"


@pytest.mark.parametrize("tied", [False, True])
def test_files_of_hugging_face_come_back_as_they_were(tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    save_transformers(tmp_path / "hf", tied=tied)
    for step, here, there in (("hf-to-dcp", "hf", "dcp"), ("dcp-to-hf", "dcp", "back")):
        convert(prepare(step, tmp_path / here, tmp_path / there), verify=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert read_hf_config(tmp_path / "back") == read_hf_config(tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again).__name__ == "Qwen3ForCausalLM"
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in before.items())


def test_metas_files_cannot_hold_it(tmp_path: Path) -> None:
    save_transformers(tmp_path / "hf", tied=False)
    with pytest.raises(DataError, match="is of a Qwen3, which Meta's files cannot hold"):
        prepare("hf-to-meta", tmp_path / "hf", tmp_path / "meta")
    convert(prepare("hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", vocab_size=320))
    with pytest.raises(DataError, match="Meta's files cannot hold"):
        prepare("dcp-to-meta", tmp_path / "dcp", tmp_path / "meta")


def test_heads_keep_their_size_with_another_dim() -> None:
    args = resolve("qwen3", "0.6B", dim=512, n_heads=8)
    assert (args.dim, args.n_heads, args.head_dim) == (512, 8, 128)
    with pytest.raises(KeyError, match="no family of models gpt"):
        spec("gpt")
