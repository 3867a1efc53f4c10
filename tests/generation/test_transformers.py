"""Greedy texts are those of transformers' generate, token by token, with its cache and without."""

from __future__ import annotations

import pytest
import torch

from tests.models.small_llama import VOCAB, build, small
from tests.models.test_transformers import theirs
from toolkit.generation.generator import Generator
from toolkit.models.llama.model import Llama

NEW = 200
LENGTHS = (1, 7, 40, 41)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _model(name: str, kv_heads: int) -> Llama:
    """Blocks that add more than a new model's do, so that texts vary."""
    model = build(small(name, n_kv_heads=kv_heads), torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("wo.weight", "w2.weight")):
                parameter.mul_(8)
    return model


def _expected(reference: torch.nn.Module, prompt: list[int], *, use_cache: bool) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "kv_heads"), [("llama2", 8), ("llama3.1", 2), ("llama3.2", 1)])
def test_greedy(name: str, kv_heads: int) -> None:
    model = _model(name, kv_heads)
    reference = theirs(model)
    reference.generation_config.eos_token_id = None  # no end before NEW tokens
    prompts = _prompts()
    expected = [_expected(reference, prompt, use_cache=True) for prompt in prompts]
    assert expected[-1] == _expected(reference, prompts[-1], use_cache=False)
    generator = Generator(model)
    assert [generator.generate([prompt], max_new_tokens=NEW)[0] for prompt in prompts] == expected
    assert generator.generate(prompts, max_new_tokens=NEW) == expected
    assert len(set(expected[-1])) > 15, "a text that repeats one token shows no mistake"
