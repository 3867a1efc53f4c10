"""Parts of the benchmark that teaches a task: what is asked, how answers are counted, what is published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import finetune_task as task
from tests.models.small_llama import build
from toolkit.config import load_config
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.finetune.parameters import count_trained
from toolkit.generation.load import LoadedModel
from toolkit.models.from_config import model_args
from toolkit.models.registry import resolve

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests/assets/tokenizer"


def _words(item: task.Item) -> frozenset[str]:
    """The words that a question shows."""
    known = {word for words in task.TOPICS.values() for word in words.split()}
    return frozenset(re.findall(r"\w+", item.question)) & known


def test_no_words_are_held_out_and_learnt_together() -> None:
    learnt, held_out = task.split()
    assert (len(learnt), len(held_out)) == (task.TRAINED_ON, task.HELD_OUT)
    assert len({item.question for item in [*learnt, *held_out]}) == len(learnt) + len(held_out)
    assert not {_words(item) for item in learnt} & {_words(item) for item in held_out}
    assert task.split() == (learnt, held_out)


def test_each_answer_is_the_one_topic_of_the_words() -> None:
    topics = {topic: set(words.split()) for topic, words in task.TOPICS.items()}
    assert len(set().union(*topics.values())) == sum(map(len, topics.values()))
    _, held_out = task.split()
    assert {item.answer for item in held_out} == {f"The {topic}." for topic in topics}
    for item in held_out:
        [topic] = [topic for topic, words in topics.items() if words & _words(item)]
        assert len(_words(item)) == task.SHOWN and item.answer == f"The {topic}."


def test_an_answer_is_right_to_the_letter() -> None:
    rows = task.split()[1][:4]
    said = [item.answer for item in rows]
    assert task.accuracy(said, rows) == 1
    assert task.accuracy([said[0], f"{said[1]} ", said[2].lower(), said[3] + said[3]], rows) == 0.25


class Told(torch.nn.Module):
    """A head that sees to it that one token after the other of an answer is the likeliest."""

    def __init__(self, ids: list[int], vocabulary: int):
        super().__init__()
        self.ids, self.vocabulary, self.calls = ids, vocabulary, 0

    def forward(self, h_BSD: torch.Tensor, *arguments: Any) -> torch.Tensor:
        logits = torch.zeros(*h_BSD.shape[:2], self.vocabulary)
        logits[..., self.ids[self.calls % len(self.ids)]] = 1
        self.calls += 1
        return logits


def test_answers_are_what_the_model_writes_up_to_the_end_of_its_turn() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    args = resolve("llama3", "debugmodel", tokenizer_vocab=tokenizer.n_words, n_layers=1)
    model = build(args, torch.float64).requires_grad_(False)
    rows = task.split()[1][:3]
    ids = [*tokenizer.encode(rows[0].answer), tokenizer.special_tokens["<|eot_id|>"]]
    model.output = Told(ids, args.vocab_size)
    found = task.answers(LoadedModel(model, args, tokenizer, None), rows, batch_size=2)
    assert found == [rows[0].answer] * 3


@pytest.mark.parametrize("method", task.METHODS)
def test_flags_are_of_the_method_and_few_parameters_are_trained(tmp_path: Path, method: str) -> None:
    config = load_config([f"--job.config_file={task.CONFIG}", *task.flags_of(method, tmp_path)])
    vocabulary = load_tokenizer(TOKENIZER).n_words
    trained, total = count_trained(model_args(config, tokenizer_vocab=vocabulary), config.finetune)
    assert trained == total if method == "all weights" else 0 < trained < 0.02 * total
    assert config.validation.base_corpus.dataset == "embedded_validation"


def test_what_is_written_is_the_instruction_data_that_the_toolkit_reads(tmp_path: Path) -> None:
    item = task.split()[1][0]
    task.write(tmp_path / "a.jsonl", [item])
    [line] = (tmp_path / "a.jsonl").read_text().splitlines()
    roles = [message["role"] for message in json.loads(line)["messages"]]
    assert roles == ["user", "assistant"]


def test_the_page_has_the_table_that_was_measured() -> None:
    measured = (ROOT / "benchmarks/results/finetune_task.md").read_text()
    table = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(table) == 3 + len(task.METHODS)
    assert "\n".join(table) in (ROOT / "docs/fine_tuning.md").read_text()
