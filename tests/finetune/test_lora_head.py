"""LoRA of the output head and the embedding: beside PEFT's layers, and without an effect elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.finetune.adapters import ARGS, adapted, adapter_of, check_close, logits
from tests.models.small_llama import VOCAB, build, tokens_and_labels
from tests.models.test_transformers import theirs
from toolkit.config.finetune import Finetune
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, DataError
from toolkit.finetune.apply import added_init, apply_finetune
from toolkit.finetune.lora import LoRAEmbedding, LoRAHead, LoRALinear
from toolkit.finetune.nf4 import NF4Linear
from toolkit.finetune.open_adapter import open_adapter
from toolkit.finetune.parameters import lora_targets
from toolkit.finetune.peft_folder import write_peft
from toolkit.finetune.preferences import without_adapter
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import table

peft = pytest.importorskip("peft")

ENDS = ["tok_embeddings", "output"]


def _options(*targets: str, **options: Any) -> Finetune:
    lora = {"rank": 4, "target_modules": list(targets)} | options
    return Finetune.model_validate({"adapter": "lora", "lora": lora})


def _peft_model(folder: Path, options: Finetune) -> tuple[Decoder, Any]:
    """Our model and PEFT's of one adapter, in fp64."""
    adapter = adapter_of(options, ARGS, folder / "step")
    write_peft(adapter, folder / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    base = theirs(build(ARGS, torch.float32))
    found = peft.PeftModel.from_pretrained(base, str(folder / "peft"), is_trainable=True)
    return adapted(adapter).double(), found.double()


@pytest.mark.parametrize("chunk", [0, 50])
def test_gradients_are_those_of_peft(chunk: int, tmp_path: Path) -> None:
    ours, found = _peft_model(tmp_path, _options("wq", *ENDS, alpha=12.0))
    assert ours.output is not None
    ours.output.loss_chunk_tokens = chunk
    tokens, labels = tokens_and_labels(2, 60)
    loss = ours(tokens, labels=labels)
    loss.backward()
    expected = F.cross_entropy(
        found(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # transformers' angles are fp32
    layers = dict(found.named_modules())
    head = layers["base_model.model.lm_head"]
    embedding = layers["base_model.model.model.embed_tokens"]
    expected_grads = {
        "output.lora_a": head.lora_A.default.weight.grad,
        "output.lora_b": head.lora_B.default.weight.grad,
        "tok_embeddings.lora_a": embedding.lora_embedding_B.default.grad.T,
        "tok_embeddings.lora_b": embedding.lora_embedding_A.default.grad.T,
    }
    for name, grad in expected_grads.items():
        check_close(ours.get_parameter(name).grad, grad)  # type: ignore[arg-type]
    assert ours.output.weight is not None and ours.output.weight.grad is None


def test_a_disabled_update_leaves_the_base(tmp_path: Path) -> None:
    adapter = adapter_of(_options(*ENDS), ARGS, tmp_path)
    model, plain = adapted(adapter), build(ARGS, torch.float32)
    tokens, labels = tokens_and_labels(2, 40)
    with without_adapter([model]), torch.no_grad():
        assert model(tokens).equal(plain(tokens))
        torch.testing.assert_close(model(tokens, labels=labels), plain(tokens, labels=labels))
    assert not logits(model).allclose(logits(plain))


def test_dropout_is_of_the_inputs_of_the_head(tmp_path: Path) -> None:
    model = adapted(adapter_of(_options("output", dropout=0.5), ARGS, tmp_path))
    tokens, _ = tokens_and_labels(1, 40)
    assert model.eval()(tokens).equal(model(tokens))
    assert not model.train()(tokens).equal(model(tokens))


def test_a_small_update_is_not_rounded_away() -> None:
    """In bf16, the sum of a weight of 1 and an update of 2⁻¹⁰ is 1, whose logits would be 0."""
    model = build(ARGS, torch.bfloat16)
    apply_finetune(model, _options("output"), frozen_dtype=torch.bfloat16)
    head: Any = model.output
    signs_D = torch.tensor([1.0, -1.0]).repeat(ARGS.dim // 2)
    with torch.no_grad():
        head.weight.fill_(1.0)
        head.lora_a.copy_(signs_D)
        head.lora_b.fill_(2.0**-10 / head.scale / len(head.lora_a))
        found = head(signs_D.to(torch.bfloat16)[None, None])
    assert found.unique().tolist() == [ARGS.dim * 2.0**-10]


@pytest.mark.parametrize(
    ("targets", "ends"),
    [
        (["all-linear"], []),
        (["*"], []),
        (["layers.*"], []),
        (["all-linear", "lm_head"], ["output"]),
        (["embed_tokens", "wq"], ["tok_embeddings"]),
        (["tok_embeddings", "output"], ENDS),
    ],
)
def test_ends_are_adapted_only_by_name(targets: list[str], ends: list[str]) -> None:
    found = lora_targets(ARGS, _options(*targets))
    assert [name for name in found if not name.startswith("layers.")] == ends


def test_other_selections_of_linear_layers_do_not_change() -> None:
    assert not any(name in table(ARGS).linear for name in ENDS)
    model = build(ARGS, torch.bfloat16)
    apply_finetune(model, _options("all-linear", *ENDS, quantize_base="nf4"), frozen_dtype=torch.bfloat16)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert (kinds["tok_embeddings"], kinds["output"]) == (LoRAEmbedding, LoRAHead)
    assert model.tok_embeddings is not None and model.tok_embeddings.weight.dtype == torch.bfloat16
    assert LoRALinear in kinds.values() and NF4Linear not in kinds.values()


def test_the_first_values_are_distributed_as_those_of_peft() -> None:
    found = peft.get_peft_model(theirs(build(ARGS, torch.float32)), _their_options())
    parts = {name: it for name, it in found.named_parameters() if "lora_" in name}
    rows = {
        "output.lora_a": "lm_head.lora_A.default.weight",
        "output.lora_b": "lm_head.lora_B.default.weight",
        "tok_embeddings.lora_a": "model.embed_tokens.lora_embedding_B.default",
        "tok_embeddings.lora_b": "model.embed_tokens.lora_embedding_A.default",
    }
    for ours, name in rows.items():
        values = parts[f"base_model.model.{name}"].detach()
        shape = tuple(values.T.shape) if "embedding" in name else tuple(values.shape)
        # An estimate from n values is within 4 / √(2n), of which there are at least 256.
        std = values.square().mean().sqrt().item()
        assert added_init(ours, shape).std == pytest.approx(std, rel=4 / math.sqrt(2 * values.numel()))


def _their_options() -> Any:
    return peft.LoraConfig(r=4, target_modules=["lm_head", "embed_tokens"], task_type="CAUSAL_LM")


def test_bases_that_peft_saves_are_ignored_unless_resized(tmp_path: Path) -> None:
    found = peft.get_peft_model(theirs(build(ARGS, torch.float32)), _their_options())
    found.save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    tensors, name = load_file(path), "base_model.model.lm_head.base_layer.weight"
    assert tensors[name].shape == (VOCAB, ARGS.dim)
    adapter = open_adapter(tmp_path, ARGS)
    assert adapter.values.keys() == {f"{end}.lora_{part}" for end in ENDS for part in "ab"}
    assert adapter.options.lora.target_modules == ENDS and not adapter.options.trainable
    save_file(tensors | {name: torch.zeros(VOCAB + 8, ARGS.dim)}, path)
    with pytest.raises(DataError, match="lm_head.base_layer.weight"):
        open_adapter(tmp_path, ARGS)


def test_adapters_that_are_not_supported_are_named(tmp_path: Path) -> None:
    found = peft.get_peft_model(theirs(build(ARGS, torch.float32)), _their_options())
    found.save_pretrained(str(tmp_path))
    with pytest.raises(DataError, match="updates no tied embedding or head"):
        open_adapter(tmp_path, replace(ARGS, tie_embeddings=True))
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(DataError, match="use_dora = true: DoRA of the embedding and the head"):
        open_adapter(tmp_path, ARGS)


def test_an_embedding_of_another_kind_is_rejected() -> None:
    class Scaled(torch.nn.Embedding):
        pass

    model = build(ARGS)
    model.tok_embeddings = Scaled(VOCAB, ARGS.dim)
    with pytest.raises(ConfigError, match="tok_embeddings is a Scaled, and only a plain Embedding"):
        apply_finetune(model, _options("embed_tokens"), frozen_dtype=torch.float32)
