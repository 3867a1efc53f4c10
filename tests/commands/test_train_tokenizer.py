from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from toolkit.cli import run_command
from toolkit.commands import train_tokenizer
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, ConfigError
from tools import make_embedded_corpus

ROOT = Path(__file__).parents[2]


def test_the_default_tokenizer_is_what_the_program_makes_of_the_shipped_corpus() -> None:
    ranks = train_tokenizer.train_ranks(train_tokenizer.texts(None, "text"), n_ranks=3840)
    assets = ROOT / "tests/assets"
    assert train_tokenizer.tiktoken_file(ranks) == (assets / "tokenizer/tokenizer.model").read_bytes()
    assert train_tokenizer.json_file(ranks) == (assets / "tokenizer_json/tokenizer.json").read_bytes()


def test_ranks_are_the_bytes_then_joins_of_earlier_ranks() -> None:
    ranks = train_tokenizer.train_ranks([d["text"] for d in shipped("validation")], n_ranks=600)
    tokens = sorted(ranks, key=ranks.__getitem__)
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)]
    for rank, token in enumerate(tokens[256:], start=256):
        cuts = [(ranks.get(token[:cut], rank), ranks.get(token[cut:], rank)) for cut in range(1, len(token))]
        assert any(left < rank and right < rank for left, right in cuts), token


@pytest.mark.parametrize("form", ["tiktoken", "json", "sentencepiece"])
def test_the_program_writes_a_tokenizer_of_the_size_asked_for(tmp_path: Path, form: str) -> None:
    corpus, output = ROOT / "toolkit/data/embedded/validation.jsonl.gz", tmp_path / "out"
    arguments = ["--corpus", str(corpus), "--vocab-size", "700", "--format", form, "--output", str(output)]
    assert run_command("train-tokenizer", arguments) == 0
    tokenizer = load_tokenizer(output)
    assert tokenizer.n_words == 700
    prose, foreign = "It was the best of times, it was the worst of times.", "naïve 漢字\u200d🌈\n"
    assert len(tokenizer.encode(prose)) < 0.6 * len(prose)
    assert tokenizer.decode(tokenizer.encode(foreign)) == foreign


def test_a_long_line_gives_the_tokenizer_of_its_words() -> None:
    words = [document["text"] for document in shipped("validation")[:1]][0].split()
    words *= 1 + train_tokenizer._LONGEST // len(" ".join(words))
    one, many = (
        train_tokenizer.sentencepiece_file([text], 400) for text in (" ".join(words), "\n".join(words))
    )
    assert one == many
    line = "é" * train_tokenizer._LONGEST
    assert "".join(train_tokenizer._split_line(line)) == line


def test_white_space_that_the_program_has_joined_is_no_other_word_pattern(tmp_path: Path) -> None:
    content = train_tokenizer.run([f"it\n{' ' * (count % 3)}\n\t\n" for count in range(60)], "tiktoken", 518)
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = load_tokenizer(tmp_path)
    assert "\n " in [tokenizer.decode([token]) for token in range(256, 262)]


@pytest.mark.parametrize(
    ("form", "size", "rule"),
    [
        ("tiktoken", 511, "need 512 entries"),
        ("tiktoken", 200_256, "another model's"),
        ("json", 2000, "not 1744"),
        ("sentencepiece", 2000, "SentencePiece: .*Vocabulary size too high"),
    ],
)
def test_a_size_that_the_text_cannot_give_is_said(form: str, size: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)--vocab-size = {size}.*{rule}"):
        train_tokenizer.run(["It was the best of times, it was the worst of times."] * 9, form, size)


def test_a_mistake_names_the_programs_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command("train-tokenizer", ["--corpus", "none.txt", "--output", str(tmp_path)]) == EXIT_DATA
    assert "error: --corpus = 'none.txt'" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus, taken = tmp_path / "corpus.txt", tmp_path / "taken"
    corpus.write_text("It was the best of times")
    taken.write_text("no folder")
    arguments = ["--corpus", str(corpus), "--vocab-size", "512", "--output", str(taken)]
    with pytest.raises(SystemExit):
        run_command("train-tokenizer", arguments)
    assert f"--output {taken}: no folder can be made there" in capsys.readouterr().err


def shipped(split: str) -> list[dict[str, str]]:
    with gzip.open(ROOT / f"toolkit/data/embedded/{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_the_shipped_corpus_is_large_varied_and_split() -> None:
    train, validation = shipped("train"), shipped("validation")
    books = {document["source"] for document in train}
    assert len(books) == 18 and books == {document["source"] for document in validation}
    prose = [
        d["text"]
        for d in train
        if d["source"] == "bible-kjv" or not make_embedded_corpus.BOOKS[d["source"]].verse
    ]
    assert sum(map(len, prose)) > 5_000_000
    assert not {document["text"] for document in train} & {document["text"] for document in validation}
    lengths = [len(document["text"]) for document in train + validation]
    assert min(lengths) >= 2_000 and max(lengths) <= 40_000
    assert "gutenberg" not in "".join(document["text"] for document in train + validation).lower()


def test_wrapped_prose_is_joined_and_verse_is_not() -> None:
    assert make_embedded_corpus.prose("It was a well-\nbred dog--\nvery\nold.  Old\n\nTwo") == (
        "It was a well-bred dog--very old. Old\n\nTwo"
    )
    poem = "  Tiger, tiger, burning\n  In the night"
    assert (
        make_embedded_corpus.prose(f"He\nsaid:\n\n{poem}")
        == "He said:\n\nTiger, tiger, burning\nIn the night"
    )
    assert (
        make_embedded_corpus.verse("Of Man's first\nSing, Muse\n\n\n\nThat")
        == "Of Man's first\nSing, Muse\n\nThat"
    )


def test_documents_are_cut_and_merged_to_size_without_loss() -> None:
    paragraphs = [f"{index} " + "word " * 200 for index in range(100)]
    parts = make_embedded_corpus.cut("\n\n".join(paragraphs))
    assert all(4_000 <= len(part) <= 24_000 for part in parts)
    assert "\n\n".join(parts) == "\n\n".join(paragraphs)
    merged = make_embedded_corpus.merge(["a" * 100, "b" * 5_000, "c" * 100])
    assert [len(text) for text in merged] == [5_204]


def test_a_column_of_no_files_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("train-tokenizer", ["--text-column", "body", "--output", str(tmp_path)])
    assert ended.value.code == EXIT_CONFIG and "has no effect without --corpus" in capsys.readouterr().err
