"""Greedy texts are those of transformers' generate, token by token: batched, cached, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.models.small_llama import build, small
from tests.models.test_transformers import theirs
from toolkit.distributed.dtensor import local
from toolkit.generation import gathered
from toolkit.generation.generator import Generator
from toolkit.generation.load import load_model
from toolkit.generation.sampling import Sampling
from toolkit.models.common.decoder import Decoder

NEW, FEW = 100, 15
VOCAB = 308  # divides by tp
LENGTHS = (1, 7, 40, 41)
DRAWN = Sampling(temperature=1, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=3)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _model(name: str, kv_heads: int) -> Decoder:
    """Blocks that add more than a new model's do, so that texts vary."""
    model = build(small(name, n_kv_heads=kv_heads, vocab_size=VOCAB), torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("wo.weight", "w2.weight")):
                parameter.mul_(8)
    return model


def _reference(model: Decoder) -> Any:
    reference = theirs(model)
    reference.generation_config.eos_token_id = None  # no end before NEW tokens
    reference.generation_config.pad_token_id = 0
    return reference


def _expected(reference: Any, prompt: list[int], *, use_cache: bool = True) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = reference.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=use_cache
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "kv_heads"), [("llama2", 8), ("llama3.1", 2), ("llama3.2", 1)])
def test_greedy(name: str, kv_heads: int) -> None:
    model = _model(name, kv_heads)
    reference = _reference(model)
    prompts = _prompts()
    expected = [_expected(reference, prompt) for prompt in prompts]
    assert expected[-1] == _expected(reference, prompts[-1], use_cache=False)
    generator = Generator(model)
    assert [generator.generate([prompt], max_new_tokens=NEW)[0] for prompt in prompts] == expected
    assert generator.generate(prompts, max_new_tokens=NEW) == expected
    assert len({token for text in expected for token in text}) > 40, "a text of few tokens shows no mistake"


def _texts(folder: Path, layouts: list[tuple[int, bool]]) -> list[list[list[int]]]:
    """Greedy and drawn texts with each ``tp``, and with room for gathered weights or not."""
    texts = []
    for tp, room in layouts:
        gathered._MAX_FRACTION = 0.5 if room else 0
        loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, tp=tp)
        generator = loaded.generator()
        assert loaded.mesh is not None and (loaded.mesh.tp is not None) == (tp > 1)
        held = sum(_held(parameter) for parameter in loaded.model.parameters())
        whole = sum(parameter.numel() for parameter in loaded.model.parameters())
        # Norms stay whole among tp ranks.
        assert held < 1.02 * whole / dist.get_world_size()
        texts.append(generator.generate(_prompts(), max_new_tokens=NEW))
        texts.append(generator.generate(_prompts(), max_new_tokens=FEW, sampling=DRAWN, batch_size=3))
        by_fsdp = tp < dist.get_world_size()
        blocks = sum(parameter.numel() for parameter in loaded.model.layers.parameters())
        held = sum(_held(parameter) for parameter in loaded.model.layers.parameters())
        assert (held > 0.98 * blocks / tp) == (room or not by_fsdp)
        assert ("--tp N" in loaded.note) == (by_fsdp and not room)
    return texts


def _held(parameter: Any) -> int:
    return local(parameter).numel()


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, [(1, True), (1, False), (2, True)], id="2 ranks"),
        pytest.param(4, [(2, True)], id="4 ranks", marks=pytest.mark.exhaustive),
        pytest.param(
            4, [(1, True), (2, False), (4, True)], id="4 ranks by one", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_sharded(ranks: int, layouts: list[tuple[int, bool]], tmp_path: Path) -> None:
    """By FSDP, tp, and both; drawn ones as one process draws them, one prompt after the other."""
    model = _model("llama3.1", 4)
    reference = _reference(model)
    reference.save_pretrained(tmp_path)
    prompts = _prompts()
    greedy = [_expected(reference, prompt) for prompt in prompts]
    drawn = Generator(model).generate(prompts, max_new_tokens=FEW, sampling=DRAWN, batch_size=1)
    for found in run_world(_texts, ranks, tmp_path, layouts, timeout=400):
        assert found == [greedy, drawn] * len(layouts)
