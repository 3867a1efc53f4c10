"""Tokenizing reports on itself while it runs."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from toolkit.data import tokenize
from toolkit.data.tokenize import TokenizeBar


@pytest.fixture
def clock() -> mock.Mock:
    with mock.patch.object(tokenize.time, "monotonic") as monotonic:
        monotonic.return_value = 0.0
        yield monotonic


def test_lines_with_an_estimate_where_there_is_no_terminal(
    clock: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    with TokenizeBar("corpus", 100_000_000, 2, shown=True) as bar:
        for second in range(1, 41):
            clock.return_value = float(second)
            bar.advance(2_000_000, second * 500_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "tokenizing corpus (100.0 MB) with 2 processes",
        "tokenizing: 4 of 100 MB, 1,000,000 tokens, about 48 s left",
        "tokenizing: 34 of 100 MB, 8,500,000 tokens, about 33 s left",
        "tokenizing: 64 of 100 MB, 16,000,000 tokens, about 18 s left",
        "tokenized 20,000,000 tokens in 40.0 s (500,000 tokens/s)",
    ]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        mock.patch.object(sys.stderr, "isatty", return_value=True),
        TokenizeBar("c", 1000, 1, shown=True) as bar,
    ):
        bar.advance(1000, 7)
    output = capsys.readouterr().err
    assert "0.00/1.00k" in output and "tokenized 7 tokens" in output


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with TokenizeBar("corpus", 1000, 1, shown=False) as bar:
        bar.advance(1000, 7)
    assert capsys.readouterr().err == ""
