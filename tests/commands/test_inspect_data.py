"""``inspect-data``: what is shown are the rows of the run, and what is marked is what has a loss."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.data.chat_data import ASSETS, conversation, write_rows
from toolkit.cli import run_command
from toolkit.commands import sample_view
from toolkit.config import load_config
from toolkit.data.batch_size import BatchShape
from toolkit.data.build import open_data, run_tokenizer
from toolkit.data.build_loader import training_loader
from toolkit.errors import EXIT_CONFIG, EXIT_FINISHED
from toolkit.loss import IGNORED_LABEL

ESCAPE = re.compile("\x1b\\[(\\d+)m")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rng = random.Random(3)
    rows = [{"messages": conversation(rng)} for _ in range(40)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    return [
        f"--training.dataset_path={file}", "--data.format=messages", f"--data.cache_folder={tmp_path}",
        f"--model.hf_assets_path={ASSETS / 'tokenizer'}", "--training.seq_len=256",
    ]  # fmt: skip


def _learnt(words: list[str], n: int) -> list[list[int]]:
    """The labels of the run's first samples."""
    config = load_config(words)
    loader = training_loader(
        config, open_data(config, progress=False), BatchShape(n, n, 1), dp_rank=0, dp_size=1, seed=0
    )
    return [
        [label for label in row if label != IGNORED_LABEL] for row in next(iter(loader))["labels"].tolist()
    ]


def test_what_has_a_loss_is_marked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("inspect-data", [*words, "--samples", "2", "--color", "never"]) == EXIT_FINISHED
    plain = capsys.readouterr().out
    assert run_command("inspect-data", [*words, "--samples", "2", "--color", "always"]) == EXIT_FINISHED
    coloured = capsys.readouterr().out
    tokenizer = run_tokenizer(load_config(words))
    for shown, painted, labels in zip(
        plain.strip().split("\n\n"), coloured.strip().split("\n\n"), _learnt(words, 2), strict=True
    ):
        assert f"{len(labels):,} with loss" in shown.splitlines()[0]
        marked = "".join(re.findall("⟦(.*?)⟧", shown)).replace("⁎", "")
        decoded = tokenizer.decode(labels).replace("\n", "\\n").replace("\t", "\\t")
        assert marked.replace("\t", "\\t") == decoded
        assert shown.count("⁎") == shown.count("── document") > 1  # the last token of each is no input
        ids = [int(token) for token in re.findall("\x1b\\[32m(\\d+)\x1b\\[0m(?= |$)", painted, re.MULTILINE)]
        assert ids == labels
        assert ESCAPE.search(painted) and not ESCAPE.search(shown)


@pytest.mark.parametrize("mask", ["true", "false"])
def test_a_class_stands_behind_its_text(tmp_path: Path, words: list[str], mask: str) -> None:
    rows = [{"text": f"a film of {minutes} minutes", "label": minutes % 2} for minutes in range(80, 86)]
    write_rows(tmp_path / "a.jsonl", rows)
    classes = ["--finetune.classification.num_labels=2", "--finetune.classification.label_names=even,odd"]
    flags = [words[0], *words[2:], *classes, f"--data.document_mask={mask}"]
    config = load_config(flags)
    (sample,) = sample_view.samples(config, run_tokenizer(config), 1, validation=False)
    shown = "".join(token.text for token in sample.tokens)
    found = re.findall(r"a film of (\d+) minutes → (\w+?)(?=a film|<|$)", shown)
    assert sorted(found) == [(str(minutes), ("even", "odd")[minutes % 2]) for minutes in range(80, 86)]
    assert [[token.id for token in sample.tokens if token.learnt]] == _learnt(flags, 1)
    assert not any(token.learnt and token.is_input for token in sample.tokens)


def _shown(words: list[str], n: int) -> list[sample_view.Sample]:
    config = load_config(words)
    return list(sample_view.samples(config, run_tokenizer(config), n, validation=False))


def test_documents_that_see_one_another_are_told_apart(tmp_path: Path, words: list[str]) -> None:
    rng = random.Random(3)
    last = {"role": "user", "content": "and then?"}  # of which nothing is learnt
    write_rows(tmp_path / "a.jsonl", [{"messages": [*conversation(rng), last]} for _ in range(40)])
    unmasked = [*words, "--data.document_mask=false"]
    for sample, masked in zip(_shown(unmasked, 3), _shown(words, 3), strict=True):
        assert sample.title() == masked.title() and sample.padding == masked.padding
        assert [token[:3] + token[4:] for token in sample.tokens] == [
            token[:3] + token[4:] for token in masked.tokens
        ]
        inputs = [token.position for token in sample.tokens if token.is_input]
        assert inputs == list(range(len(inputs)))
    write_rows(tmp_path / "a.jsonl", [{"text": f"{number} and so on"} for number in range(200)])
    text = [unmasked[0], *unmasked[2:]]
    (sample,) = _shown(text, 1)
    assert len({token.document for token in sample.tokens}) > 1
    assert [[token.id for token in sample.tokens if token.learnt]] == _learnt(text, 1)


def test_text_that_streams_has_the_order_of_the_run(tmp_path: Path, words: list[str]) -> None:
    for number in range(5):
        write_rows(tmp_path / f"{number}.txt.jsonl", [{"text": f"file {number} " * 200}] * 3)
    flags = ["--data.streaming", f"--training.dataset_path={tmp_path}/*.txt.jsonl", *words[2:]]
    flags += ["--training.global_batch_size=-1", "--training.local_batch_size=4"]
    config = load_config(flags)
    data, batch = open_data(config, progress=False), BatchShape(4, 4, 1)
    rows = next(iter(training_loader(config, data, batch, dp_rank=0, dp_size=1, seed=0)))["tokens"]
    assert rows is not None
    shown = [[token.id for token in sample.tokens if token.is_input] for sample in _shown(flags, 4)]
    assert shown == rows.tolist()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.learnt: list[int] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.refers += [name for name in ("src", "href", "srcset") if name in found]
        self.refers += [tag] * (tag in ("script", "link", "iframe"))
        if tag == "span" and "l" in (found.get("class") or "").split() and found.get("title"):
            self.learnt.append(int((found["title"] or "").split(",")[0].removeprefix("id ")))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_weights_stand_behind_what_they_weigh(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", "weight": 0.5}]
    messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}]
    write_rows(tmp_path / "a.jsonl", [{"messages": messages, "weight": 3}])
    assert run_command("inspect-data", [*words, "--samples=1", "--color=never"]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert "⟦yes<|eot_id|>×1.5⟧" in shown and "⟦no×3⟧⟦<|eot_id|>×3⁎⟧" in shown
    page = tmp_path / "page.html"
    assert run_command("inspect-data", [*words, "--html", str(page)]) == EXIT_FINISHED
    assert page.read_text(encoding="utf-8").count("document 0, weight 1.5") >= 2


def test_the_page_refers_to_nothing_and_escapes_text(words: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    attack = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<script src=x>&amp;"}]
    write_rows(tmp_path / "a.jsonl", [{"messages": attack}])
    assert run_command("inspect-data", [*words, "--html", str(page)]) == EXIT_FINISHED
    parser = _Page()
    content = page.read_text(encoding="utf-8")
    parser.feed(content)
    assert not parser.refers and "url(" not in content and "@import" not in content
    assert parser.learnt[: len(parser.learnt) // 3] == _learnt(words, 1)[0]  # an epoch is one sample
    assert "<script src=x>&amp;" in re.sub(r"\d", "", parser.text)  # ids stand between its tokens


def test_text_and_validation_are_shown_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--training.dataset=embedded", *words[2:]]
    assert run_command("inspect-data", [*text, "--samples=1"]) == EXIT_FINISHED
    assert "256 tokens" in capsys.readouterr().out
    validation = [
        "--validation.enable",
        "--validation.dataset=embedded_validation",
        "--validation.format=text",
    ]
    assert run_command("inspect-data", [*words, *validation, "--validation", "--samples=1"]) == EXIT_FINISHED
    assert "2,048 tokens" in capsys.readouterr().out
    assert run_command("inspect-data", [*words, "--validation"]) == EXIT_CONFIG
    assert "no validation to show" in capsys.readouterr().err
    assert run_command("inspect-data", [*words, "--data.columns", "messages=dialog"]) != EXIT_FINISHED
    assert "no column 'dialog'" in capsys.readouterr().err
    assert run_command("inspect-data", [*words, "--html", "/nowhere/a.html"]) == EXIT_CONFIG
