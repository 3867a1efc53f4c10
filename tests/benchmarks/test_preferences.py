"""Parts of the benchmark of preferences: the pairs, and how models are judged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import preferences as task
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.generation.load import LoadedModel
from toolkit.models.registry import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def split() -> tuple[list[task.Pair], list[task.Pair]]:
    return task.pairs()


def test_the_rule_decides_and_no_pair_is_held_out_and_trained_on(split: tuple) -> None:
    trained_on, held_out = split
    assert (len(trained_on), len(held_out)) == (task.TRAINED_ON, task.HELD_OUT)
    for pair in [*trained_on, *held_out]:
        assert pair.chosen < pair.rejected
        assert set(re.findall(r"\w+", pair.prompt)[3::2]) == {pair.chosen, pair.rejected}
    both = [{(pair.chosen, pair.rejected) for pair in part} for part in split]
    assert not both[0] & both[1] and len(both[0] | both[1]) == task.TRAINED_ON + task.HELD_OUT
    first = sum(f"first, {pair.chosen}" in pair.prompt for pair in held_out)
    assert 0.4 < first / task.HELD_OUT < 0.6  # the order in the question says nothing


class _Prefers(torch.nn.Module):
    """A model that expects one answer to all questions."""

    def __init__(self, ids: list[int], vocabulary: int):
        super().__init__()
        self.register_buffer("scores", torch.zeros(vocabulary))
        self.scores[ids] = 5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(*tokens.shape, -1)


def test_the_share_is_that_of_the_more_probable_answers(split: tuple) -> None:
    tokenizer = load_tokenizer(ROOT / "tests/assets/tokenizer")
    pairs = [task.Pair("q", "one", "two"), task.Pair("q", "two", "one"), task.Pair("q", "one", "two")]
    model = _Prefers(tokenizer.encode("one"), tokenizer.n_words)
    args = resolve("llama3", "debugmodel", tokenizer_vocab=tokenizer.n_words)
    loaded = LoadedModel(model, args, tokenizer, None)  # type: ignore[arg-type]
    assert task.share(loaded, pairs, batch_size=4) == pytest.approx(2 / 3)
