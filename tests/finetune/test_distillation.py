"""Distillation: the divergences beside torch's, a step beside transformers, and what the teacher costs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import run_world
from tests.mesh_runs import write_teacher
from tests.training import small_config, small_trainer
from toolkit.config.training import Distillation
from toolkit.finetune.distillation import DistillationObjective, distillation_losses
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.registry import resolve

VOCAB = 40


def _targets(labels_T: Tensor, teacher_TV: Tensor, k: int) -> Tensor:
    args = resolve("llama3", "debugmodel", vocab_size=VOCAB, dim=VOCAB, n_heads=4, n_kv_heads=2)
    head = OutputHead(args, loss_chunk_tokens=4)
    top_1TX = head.top_log_probs(teacher_TV[None], torch.eye(VOCAB, dtype=teacher_TV.dtype), k)
    return torch.cat([labels_T[:, None], top_1TX[0]], -1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("k", [VOCAB, 7])
def test_losses_are_those_of_torch(divergence: Any, temperature: float, k: int) -> None:
    torch.manual_seed(0)
    logits_TV = torch.randn(11, VOCAB, dtype=torch.float64, requires_grad=True)
    teacher_TV = 2 * torch.randn(11, VOCAB, dtype=torch.float64)
    labels_T = torch.randint(VOCAB, (11,))
    labels_T[3] = -100
    options = Distillation(enable=True, divergence=divergence, temperature=temperature)
    found_T2 = distillation_losses(logits_TV, _targets(labels_T, teacher_TV, k), options)
    [gradient] = torch.autograd.grad(found_T2.sum(), logits_TV)

    top_TK = teacher_TV.topk(k).indices
    model_TV = (logits_TV / temperature).log_softmax(-1)
    teacher_TK = (teacher_TV.gather(1, top_TK) / temperature).log_softmax(-1)
    if divergence == "forward_kl":
        first, second = model_TV.gather(1, top_TK), teacher_TK
    else:
        first, second = teacher_TK, (logits_TV.gather(1, top_TK) / temperature).log_softmax(-1)
    divergences_T = F.kl_div(first, second, log_target=True, reduction="none").sum(-1) * temperature**2
    entropies_T = F.cross_entropy(logits_TV, labels_T, reduction="none")
    torch.testing.assert_close(
        found_T2, torch.stack([entropies_T, divergences_T], -1), rtol=1e-12, atol=1e-13
    )
    [expected] = torch.autograd.grad(entropies_T.sum() + divergences_T.sum(), logits_TV)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def _step(folder: str, teacher: str, weight: float) -> dict[str, Any]:
    """The first step of a distilled model, and the same from the logits of both models."""
    config = small_config(
        folder,
        model={"vocab_size": 4352},
        training={"steps": 1, "local_batch_size": 2, "global_batch_size": 4},
        distillation={"enable": True, "teacher_path": teacher, "weight": weight, "top_k": 4352},
        metrics={"enable_tensorboard": False, "log_freq": 1},
    )
    trainer = small_trainer(config)
    objective, [model] = trainer.model_parts.objective, trainer.model_parts.models
    assert isinstance(objective, DistillationObjective)
    batches: list[dict[str, Any]] = []
    prepare = trainer.model_parts.prepare

    def watched(*args: Any) -> Any:
        batches.append(prepare(*args))
        return batches[-1]

    trainer.model_parts.prepare = watched  # type: ignore[method-assign]
    logits = []
    before = {name: it.detach().clone() for name, it in model.named_parameters()}
    frozen = [it.detach().clone() for it in objective.models[0].parameters()]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(frozen, objective.models[0].parameters(), strict=True))
    with torch.no_grad():
        for name, it in model.named_parameters():
            it.copy_(before[name])
        for batch in batches:
            logits.append(model(batch["tokens"], positions=batch["positions"], documents=batch["documents"]))
    [logged] = [it for it in trainer.history if "loss" in it]
    return {
        "logged": {name: it for name, it in logged.items() if name == "loss" or "distillation/" in name},
        "logits": logits,
        "batches": [{name: it for name, it in batch.items() if it is not None} for batch in batches],
    }


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_step_has_the_loss_of_transformers_logits(tmp_path: Path, weight: float) -> None:
    transformers = pytest.importorskip("transformers")
    teacher = write_teacher(tmp_path / "teacher", vocab=4352)
    [found] = run_world(_step, 1, str(tmp_path / "run"), str(teacher), weight, timeout=200)
    judge = transformers.AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager").eval()
    entropies, divergences, count = 0.0, 0.0, 0
    for batch, logits_BSV in zip(found["batches"], found["logits"], strict=True):
        documents = batch["documents"][:, None, :]
        mask = (documents == documents.mT) & torch.ones(
            documents.shape[-1], documents.shape[-1]
        ).tril().bool()
        bias = torch.where(mask, 0.0, -torch.inf)[:, None]
        with torch.no_grad():
            theirs = judge(batch["tokens"], attention_mask=bias, position_ids=batch["positions"]).logits
        counted = batch["labels"] != -100
        pairs = logits_BSV[counted].double().log_softmax(-1), theirs[counted].double().log_softmax(-1)
        divergences += F.kl_div(*pairs, log_target=True, reduction="sum").item()
        entropies += F.nll_loss(pairs[0], batch["labels"][counted], reduction="sum").item()
        count += int(counted.sum())
    entropy, divergence = entropies / count, divergences / count
    assert found["logged"] == pytest.approx(
        {
            "loss": (1 - weight) * entropy + weight * divergence,
            "distillation/cross_entropy": entropy,
            "distillation/divergence": divergence,
        },
        rel=1e-5,
    )
    assert divergence > 0.1


def _validation_loss(folder: str, distillation: dict[str, Any]) -> float:
    config = small_config(
        folder,
        model={"vocab_size": 4352},
        training={"steps": 1, "local_batch_size": 2, "global_batch_size": 4},
        optimizer={"lr": 0.0},
        distillation=distillation,
        validation={"enable": True, "dataset": "embedded_validation", "freq": 1, "samples": 4},
        metrics={"enable_tensorboard": False, "log_freq": 1},
    )
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    [value] = [it["validation_loss"] for it in trainer.history if "validation_loss" in it]
    return value


def test_validation_reports_the_cross_entropy(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher", vocab=4352)
    distilled = {"enable": True, "teacher_path": str(teacher), "weight": 1.0}
    losses = [
        run_world(_validation_loss, 1, str(tmp_path / str(number)), options, timeout=200)[0]
        for number, options in enumerate(({}, distilled))
    ]
    assert losses[0] == losses[1] > 1
