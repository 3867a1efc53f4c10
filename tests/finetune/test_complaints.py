"""Reports of fine-tuning by users of other libraries, each with the name of the report."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.loss import IGNORED_LABEL
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve

CHAT = Path(__file__).parents[1] / "assets/chat/sums.jsonl"
MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
LORA = {"adapter": "lora", "lora": {"rank": 4, "target_modules": ["all-linear"]}}


def _trainer(folder: Path, *, local: int = 4, **tables: dict[str, Any]) -> Any:
    training = {
        "dataset_path": str(CHAT),
        "steps": 2,
        "seq_len": 128,
        "global_batch_size": 8,
        "local_batch_size": local,
        "dtype": "float64",
        "mixed_precision_param": "float64",
        "mixed_precision_reduce": "float64",
    }
    data = {"format": "messages", "packing": False}
    trainer = small_trainer(small_config(folder, model=MODEL, training=training, data=data, **tables))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer


def test_a_saved_adapter_is_not_rank_0s_shard_alone_accelerate_4206(tmp_path: Path) -> None:
    run_world(_save_adapter, 2, str(tmp_path))
    with safe_open(tmp_path / "run/hf/step-2/adapter_model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    of_q = "base_model.model.model.layers.0.self_attn.q_proj"
    assert shapes[f"{of_q}.lora_A.weight"] == (4, 32) and shapes[f"{of_q}.lora_B.weight"] == (32, 4)
    assert len(shapes) == 2 * 7 * MODEL["n_layers"]


def _save_adapter(folder: str) -> None:
    _trainer(Path(folder, "run"), finetune=LORA, checkpoint={"enable": True, "last_save_in_hf": True})


def test_packing_does_not_contaminate_trl_805() -> None:
    args = resolve("llama3", "debugmodel", vocab_size=64, **MODEL)
    torch.manual_seed(0)
    model = Decoder(args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(64, (1, 24))
    documents, positions = torch.tensor([[0] * 10 + [1] * 14]), torch.tensor([[*range(10), *range(14)]])
    packed = model(tokens, documents=documents, positions=positions)
    alone = model(tokens[:, 10:])
    other = tokens.clone()
    other[:, :10] = torch.randint(64, (1, 10))
    torch.testing.assert_close(packed[:, 10:], alone, rtol=1e-4, atol=1e-5)
    changed = model(other, documents=documents, positions=positions)
    assert torch.equal(packed[:, 10:], changed[:, 10:]) and not torch.equal(packed[:, :10], changed[:, :10])


def _all_masked(folder: str) -> tuple[float, float, int, bool]:
    trainer = _trainer(Path(folder, "masked"), local=8)
    before = [parameter.full_tensor().clone() for _, parameter in trainer.model_parts.named_parameters()]
    [batch] = [next(iter(trainer.loader))]
    batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0
    trainer.optimizer.state.clear()
    result = trainer.train_step([batch], learning_rate=1e-2)
    after = [parameter.full_tensor() for _, parameter in trainer.model_parts.named_parameters()]
    same = all(map(torch.equal, before, after))
    return result.loss, result.grad_norm, result.tokens, same


def test_a_batch_that_is_all_masked_is_neither_nan_nor_a_step_trl_6668(tmp_path: Path) -> None:
    assert run_world(_all_masked, 1, str(tmp_path))[0] == (0.0, 0.0, 0, True)


def _accumulated(folder: str) -> list[list[tuple[float, float]]]:
    found = []
    for local in (8, 2, 1):
        trainer = _trainer(Path(folder, str(local)), local=local, finetune=LORA)
        found.append([(record["loss"], record["grad_norm"]) for record in trainer.history])
    return found


def test_accumulation_counts_tokens_not_micro_batches_transformers_34191(tmp_path: Path) -> None:
    """Conversations have unequal numbers of tokens to learn, so that a mean of means would differ."""
    at_once, *parts = run_world(_accumulated, 1, str(tmp_path))[0]
    for losses in parts:
        for found, expected in zip(losses, at_once, strict=True):
            assert found == pytest.approx(expected, rel=1e-12)
