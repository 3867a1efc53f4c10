"""Reward models: the loss is trl's, and transformers reads the exported model and gives the same scores."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import run_world
from tests.mesh_runs import write_margins
from tests.meshes import PAIR_TEMPLATE
from tests.models.small_llama import small
from tests.training import small_config, small_trainer
from toolkit.config.finetune import Finetune
from toolkit.data.build import open_data
from toolkit.data.chat.shapes import Shape
from toolkit.data.preference_rows import ScoredRows, conversation_rows
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError
from toolkit.finetune.preferences import preference_objective
from toolkit.models.common.args import Classifier
from toolkit.models.common.decoder import Decoder

trl = pytest.importorskip("trl.trainer.reward_trainer")
transformers = pytest.importorskip("transformers")


def _config(folder: Path) -> Any:
    rows = {
        name: write_margins(folder.parent / f"{name}.jsonl", n) for name, n in (("train", 60), ("held", 18))
    }
    return small_config(
        folder,
        data={"format": "preference", "chat_template": PAIR_TEMPLATE},
        finetune={"objective": "reward"},
        model={"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
        training={
            "steps": 8, "seq_len": 64, "global_batch_size": 4, "local_batch_size": 2, "dtype": "float32",
            "mixed_precision_param": "float32", "dataset_path": rows["train"],
        },
        validation={
            "enable": True, "freq": 4, "seq_len": 64, "local_batch_size": 2, "dataset_path": rows["held"],
        },
        optimizer={"lr": 1e-2},
        lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
        checkpoint={"enable": True, "interval": 4, "last_save_in_hf": True, "export_dtype": "float32"},
    )  # fmt: skip


def _examples(cache: TokenCache) -> list[dict[str, Any]]:
    """The pairs of a corpus as trl tokenizes them."""
    assert cache.margins is not None
    ids = [
        cache.tokens[begin:end].tolist()
        for begin, end in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)
    ]
    return [
        {"chosen_ids": ids[index], "rejected_ids": ids[index + 1], "margin": float(cache.margins[index])}
        for index in range(0, len(ids), 2)
    ]


def _by_trl(
    model: Any, cache: TokenCache, coefficient: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Return trl's loss of all pairs of a corpus, and what it logs."""
    metrics: Any = defaultdict(lambda: defaultdict(list))
    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer: Any = SimpleNamespace(
        model=model, accelerator=accelerator, args=SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics=metrics, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    padding = getattr(getattr(model, "config", None), "pad_token_id", 0)
    inputs = trl.DataCollatorForPreference(pad_token_id=padding)(_examples(cache))
    loss = trl.RewardTrainer.compute_loss(trainer, model, inputs)
    [logged] = metrics.values()
    return loss, {name: values[0] for name, values in logged.items()}


class _AsTransformers:
    """A stand-in for a classifier of transformers, which scores the last token that is not padding."""

    def __init__(self, model: Decoder):
        self.model, self.training = model, True

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        ends = attention_mask.sum(-1) - 1
        scores = self.model(input_ids)[torch.arange(len(ends)), ends]
        return SimpleNamespace(logits=scores)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return open_data(_config(tmp_path_factory.mktemp("reward") / "run"), progress=False).caches["training"]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("coefficient", [0.0, 0.03])
def test_the_loss_is_that_of_trl(cache: TokenCache, packing: bool, coefficient: float) -> None:
    torch.manual_seed(0)
    args = replace(small(vocab_size=cache.n_words), classifier=Classifier(("score",)), tie_embeddings=False)
    model = Decoder(args).double()
    rows = conversation_rows(cache, 64, packing=packing)
    assert isinstance(rows, ScoredRows) and len(rows) < (20 if packing else 61)
    samples = [rows.sample(k) for k in range(len(rows))]
    batch: Any = {name: torch.from_numpy(np.stack([it[name] for it in samples])) for name in samples[0]}
    options = {"objective": "reward", "reward": {"center_rewards_coefficient": coefficient}}
    objective = preference_objective(Finetune.model_validate(options), None)
    assert model.output is not None
    model.output.reduction = objective.reduction
    torch.nn.init.normal_(model.output.weight)
    batch = objective.prepare(batch)
    tokens, *others = (batch[name] for name in ("tokens", "positions", "documents", "labels"))
    output = model(tokens, **dict(zip(("positions", "documents", "labels"), others, strict=True)))
    loss, sums = objective(output, batch)
    count = objective.count([batch])
    expected, logged = _by_trl(_AsTransformers(model), cache, coefficient or None)
    assert count == 60
    assert (loss / count).item() == pytest.approx(expected.item(), rel=1e-9)
    reported = dict(zip(objective.names, (sums[1:] / count).tolist(), strict=True))
    assert reported["rewards/accuracies"] == pytest.approx(logged["accuracy"])
    assert reported["rewards/margins"] == pytest.approx(logged["margin"], rel=1e-9)
    parameters = list(model.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(loss / count, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def _run(folder: str) -> list[dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = small_trainer(_config(Path(folder)))
        trainer.train()
    return trainer.history


def test_an_exported_model_has_the_validation_of_the_run(tmp_path: Path) -> None:
    history = run_world(_run, 1, str(tmp_path / "run"))[0]
    held = open_data(_config(tmp_path / "run"), progress=False).caches["validation"]
    folder = tmp_path / "run/hf/step-8"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        loss, logged = _by_trl(model, held)
    last = [record for record in history if "validation_loss" in record][-1]
    assert last["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert last["validation_rewards/accuracies"] == pytest.approx(logged["accuracy"])
    assert last["validation_rewards/margins"] == pytest.approx(logged["margin"], rel=1e-4, abs=1e-5)
    assert "validation_f1" not in last
    losses = [record["loss"] for record in history if "loss" in record]
    assert len(set(losses)) == 8


@pytest.mark.parametrize("margin", [True, "0.5", 1e10, [1]])
def test_a_margin_is_a_number(margin: Any) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    with pytest.raises(DataError, match=r"^here: column 'margin' contains .*\n  fix:  write a number"):
        Shape("preference", data="margins").conversations(row, "here")
    assert len(Shape("preference").conversations(row, "here")) == 2


def test_a_margin_may_be_missing() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    shape = Shape("preference", data="margins")
    for given, margin in (({}, 0), ({"margin": None}, 0), ({"margin": -1.5}, -1.5)):
        assert [one.margin for one in shape.conversations(row | given, "here")] == [margin] * 2
