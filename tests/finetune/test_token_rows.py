"""Rows of the embedding are trained beside LoRA as PEFT trains them, and nothing else of it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.adapters import ARGS, LORA, TOKENS, OfModel, adapted, adapter_of, check_close, logits
from tests.models.small_llama import VOCAB, build
from tests.models.test_transformers import theirs
from toolkit.config.finetune import Finetune
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, DataError
from toolkit.finetune.apply import apply_finetune, init_from_weights
from toolkit.finetune.combine import combine
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapter
from toolkit.finetune.parameters import TOKEN_ROWS
from toolkit.finetune.peft_folder import write_peft
from toolkit.finetune.preferences import without_adapter
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING

peft = pytest.importorskip("peft")

INDICES = [int(TOKENS[0, 3]), int(TOKENS[1, 7]), VOCAB - 1, 0]
OPTIONS = Finetune.model_validate({"adapter": "lora", "lora": LORA, "trainable_token_indices": INDICES})
TIED = replace(ARGS, tie_embeddings=True)
untied_and_tied = pytest.mark.parametrize("args", [ARGS, TIED], ids=["untied", "tied"])


@untied_and_tied
def test_peft_reads_what_is_written(args: ModelArgs, tmp_path: Path) -> None:
    adapter = adapter_of(OPTIONS, args, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    found = peft.PeftModel.from_pretrained(theirs(build(args, torch.float32)), str(tmp_path / "peft"))
    assert torch.equal(_rows_of(found), adapter.values[TOKEN_ROWS])
    check_close(logits(found), logits(adapted(adapter)))


def _rows_of(model: Any) -> torch.nn.Parameter:
    [rows] = [it for name, it in model.named_parameters() if "trainable_tokens_delta" in name]
    return rows


def _theirs(args: ModelArgs, indices: Any = INDICES) -> Any:
    """A model of PEFT's with values as large as trained ones."""
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], trainable_token_indices=indices
    )
    model = peft.get_peft_model(theirs(build(args, torch.float32)), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("args", "indices"),
    [
        (ARGS, INDICES),
        (ARGS, {"model.embed_tokens": INDICES}),
        (TIED, INDICES),
        (TIED, {"embed_tokens": INDICES, "lm_head": INDICES}),
    ],
)
def test_what_peft_writes_is_read_and_has_its_gradients(
    args: ModelArgs, indices: Any, tmp_path: Path
) -> None:
    found = _theirs(args, indices)
    found.save_pretrained(str(tmp_path))
    adapter = open_adapter(tmp_path, args)
    assert adapter.options.trainable_token_indices == INDICES
    model = adapted(adapter)
    check_close(logits(model), logits(found))
    for loss in (model(TOKENS), found(TOKENS).logits):
        loss.logsumexp(-1).sum().backward()
    rows, expected = model.get_parameter(TOKEN_ROWS).grad, _rows_of(found).grad
    assert rows is not None and expected is not None and model.get_parameter(EMBEDDING).grad is None
    check_close(rows, expected)
    assert rows[:2].abs().amax(1).min() > 0  # of tokens that occur


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ({"embed_tokens": INDICES, "lm_head": INDICES}, "may have only rows of embed_tokens"),
        ([3, 3], "must be different tokens below 307"),
        ([VOCAB], "must be different tokens below 307"),
        ("all", "must be different tokens below 307"),
    ],
)
def test_other_rows_of_peft_are_rejected(indices: Any, says: str, tmp_path: Path) -> None:
    _theirs(ARGS).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": indices}))
    with pytest.raises(DataError, match=f"trainable_token_indices.*{says}"):
        open_adapter(tmp_path, ARGS)


@untied_and_tied
def test_merged_is_unmerged(args: ModelArgs, tmp_path: Path) -> None:
    adapter = adapter_of(OPTIONS, args, tmp_path)
    model = build(args, torch.float32)
    merged = Merged(OfModel(model, tmp_path), adapter)
    table = merged.read(EMBEDDING)
    region = [slice(INDICES[0], VOCAB - 1), slice(3, 20)]
    assert torch.equal(merged.read(EMBEDDING, region), table[tuple(region)])
    others = [index for index in range(VOCAB) if index not in INDICES]
    assert torch.equal(table[others], model.get_parameter(EMBEDDING)[others])
    assert torch.equal(table[INDICES], adapter.values[TOKEN_ROWS])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(merged.read(name))
    check_close(logits(model), logits(adapted(adapter)))


@untied_and_tied
def test_rows_start_with_the_values_of_the_weight(args: ModelArgs) -> None:
    model = build(args, torch.float32).eval()
    before = logits(model)
    apply_finetune(model, OPTIONS, frozen_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                parameter.fill_(0.0)
    init_from_weights([model])
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        model.get_parameter(TOKEN_ROWS).add_(1.0)
    assert not torch.equal(logits(model), before)
    with without_adapter([model]):  # the reference of DPO
        assert torch.equal(logits(model), before)


def test_what_rows_cannot_be_combined_with(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has more than updates of LoRA"):
        combine([(adapter_of(OPTIONS, ARGS, tmp_path), 1.0)])
    model = build(ARGS)
    model.tok_embeddings = type("Scaled", (torch.nn.Embedding,), {})(VOCAB, ARGS.dim)
    with pytest.raises(ConfigError, match="tok_embeddings is a Scaled, and only a plain Embedding"):
        apply_finetune(model, OPTIONS, frozen_dtype=torch.float32)
