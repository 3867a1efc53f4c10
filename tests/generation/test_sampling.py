"""Logits are left as transformers' processors leave them; draws follow the probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.models.small_llama import VOCAB, small
from tests.models.test_transformers import config
from toolkit.errors import ConfigError
from toolkit.generation.sampling import RandomNumbers, Sampling, process_logits, sample

ROWS, HAD = 8, 30
SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8),
    Sampling(temperature=1),
    Sampling(temperature=0.2),
    Sampling(temperature=1.7),
    Sampling(temperature=1, top_k=1),
    Sampling(temperature=1, top_k=40),
    Sampling(temperature=1, top_k=2 * VOCAB),
    Sampling(temperature=1, top_p=0.05),
    Sampling(temperature=1, top_p=0.5),
    Sampling(temperature=1, top_p=0.95),
    Sampling(temperature=1, min_p=0.02),
    Sampling(temperature=1, min_p=0.5),
    Sampling(temperature=1, min_p=1),
    *(
        Sampling(temperature=temperature, top_k=50, top_p=top_p, min_p=0.01, repetition_penalty=penalty)
        for temperature, top_p, penalty in product((0.6, 1.2), (0.6, 0.9), (1, 1.2))
    ),
]


def _logits() -> torch.Tensor:
    """Flat rows and steep ones."""
    generator = torch.Generator().manual_seed(0)
    steepness = torch.linspace(0.2, 8, ROWS)[:, None]
    return torch.randn(ROWS, VOCAB, generator=generator) * steepness


@pytest.mark.parametrize("penalty", [1e-40, 1e300])
def test_no_penalty_leaves_the_range_of_fp32(penalty: float) -> None:
    """It would look like a model whose logits are not finite."""
    seen_BV = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    assert process_logits(_logits(), Sampling(repetition_penalty=penalty), seen_BV).isfinite().all()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_processed_as_transformers_does(sampling: Sampling) -> None:
    """The list of processors, and their order, are those that its generate makes of the settings."""
    logits_BV = _logits()
    had = torch.randint(VOCAB, (ROWS, HAD), generator=torch.Generator().manual_seed(1))
    seen_BV = torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter_(1, had, True)
    options = {"do_sample": False} if sampling.greedy else {
        "do_sample": True,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config(small()))
    processors = model._get_logits_processor(
        GenerationConfig(**options, repetition_penalty=float(sampling.repetition_penalty)),
        input_ids_seq_length=HAD,
    )
    expected = processors(had, logits_BV.clone())
    found = process_logits(logits_BV, sampling, seen_BV)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_settings_cover_what_they_name() -> None:
    """Each setting but those that keep everything changes the logits, and no two do the same."""
    logits_BV = _logits()
    seen_BV = torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) < 0.1
    results = [process_logits(logits_BV, sampling, seen_BV) for sampling in SETTINGS]
    same = sum(torch.equal(result, logits_BV) for result in results)
    assert same == 3 and len(SETTINGS) >= 20  # greedy, temperature 1, more top_k than there are


def test_a_low_temperature_takes_the_likeliest() -> None:
    logits_BV = _logits() - 1000
    for temperature in (1e-9, 1e-37, 1e-300):
        tokens = sample(
            process_logits(logits_BV, Sampling(temperature=temperature)), torch.full((ROWS,), 0.999)
        )
        assert torch.equal(tokens, logits_BV.argmax(-1))


def test_draws_have_the_probabilities() -> None:
    logits_1V = torch.tensor([[2.0, -torch.inf, 0.0, 1.0, -torch.inf]])
    count = 20_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = sample(logits_1V.expand(count, -1), numbers)
    shares = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(shares, logits_1V[0].softmax(0), rtol=0, atol=1 / count + 1e-6)


def test_no_draw_takes_what_was_left_out() -> None:
    """Nor the ends of the range, between which rounding could fall."""
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 300:600] = 0
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, ends).tolist() == [300, 599]


def test_numbers_are_those_of_the_prompt() -> None:
    """Whatever it is in a batch with, and different for another prompt, step or seed."""
    together, alone = RandomNumbers(5, [0, 1, 2]), RandomNumbers(5, [1])
    rows = torch.stack([together.next() for _ in range(50)])
    assert torch.equal(rows[:, 1], torch.cat([alone.next() for _ in range(50)]))
    other = RandomNumbers(6, [1]).next()
    assert len({*rows.flatten().tolist(), *other.tolist()}) == 151
    assert (rows >= 0).all() and (rows < 1).all() and abs(rows.mean() - 0.5) < 0.1


def test_values_out_of_range_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1, top_k=-5, top_p=0, min_p=2, repetition_penalty=0)
    told = str(caught.value)
    for name in ("temperature = -1", "top_k = -5", "top_p = 0", "min_p = 2", "repetition_penalty = 0"):
        assert name in told
