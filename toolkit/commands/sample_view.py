"""Samples of a run as ``llama-toolkit inspect-data`` shows them: rows of tokens, as text or as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import torch

from toolkit.config import Config
from toolkit.data.batch_size import BatchShape
from toolkit.data.build import open_data
from toolkit.data.build_loader import training_loader, validation_loader
from toolkit.data.dataloader import Loader
from toolkit.data.packing import PADDING
from toolkit.data.run_data import RunData
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import ConfigError, Problem, one_line
from toolkit.generation.text import TextStream
from toolkit.loss import IGNORED_LABEL

WIDTH = 72  # characters of text in a line of the terminal
_GREEN, _UNDERLINED, _FAINT, _PLAIN = "\x1b[32m", "\x1b[4m", "\x1b[2m", "\x1b[0m"


class Token(NamedTuple):
    """A token of a row: id, text, position, whether it has a loss, whether it is an input, and its loss
    weight."""

    id: int
    text: str
    document: int
    position: int
    learnt: bool
    is_input: bool = True
    weight: float = 1.0


class Sample(NamedTuple):
    """A row: its tokens, and the number of padding tokens."""

    number: int
    tokens: list[Token]
    padding: int

    def title(self) -> str:
        """Summarize the sample in one line."""
        documents = len({token.document for token in self.tokens})
        learnt = sum(token.learnt for token in self.tokens)
        inputs = sum(token.is_input for token in self.tokens)
        return (
            f"sample {self.number}: {inputs:,} tokens of {documents:,} "
            f"document{'s' * (documents != 1)}, {learnt:,} with loss, {self.padding:,} of padding"
        )


def samples(config: Config, tokenizer: Tokenizer, n: int, *, validation: bool) -> Iterator[Sample]:
    """Yield the first ``n`` samples of training or validation.

    Raises:
        DataError: a corpus is unusable.
        ConfigError: there is no validation.
    """
    data = open_data(config, progress=True)
    rows = _rows(_loader(config, data, validation))
    if not config.data.document_mask:  # otherwise rows do not contain document boundaries
        masked = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": True})})
        pairs = zip(rows, _rows(_loader(masked, data, validation)), strict=True)
        rows = ({**row, "documents": own["documents"], "own_labels": own["labels"]} for row, own in pairs)
    classes = config.finetune.classes
    shown = (row for row in rows if (row["labels"] != IGNORED_LABEL).any())  # the rest pads the batch
    for number, row in enumerate(islice(shown, n)):
        yield _sample(number, row, tokenizer, classes)


def _loader(config: Config, data: RunData, validation: bool) -> Loader:
    if validation:
        loader = validation_loader(config, data, dp_rank=0, dp_size=1)
        if loader is None:
            fix = "set it, with validation.dataset or dataset_path, or leave --validation out"
            raise ConfigError(Problem("the run has no validation to show", fix, "validation.enable", False))
        return loader
    # Streamed text is distributed by the global batch.
    total = config.training.global_batch_size
    total = config.training.local_batch_size if total == -1 else total
    one = BatchShape(total, 1, total)
    return training_loader(config, data, one, dp_rank=0, dp_size=1, seed=config.debug.seed or 0)


def _rows(loader: Loader) -> Iterator[dict[str, torch.Tensor]]:
    for batch in loader:
        tokens = batch["tokens"]
        assert tokens is not None
        for index in range(len(tokens)):
            yield {name: values[index] for name, values in batch.items() if values is not None}


def _sample(
    number: int, row: dict[str, torch.Tensor], tokenizer: Tokenizer, classes: Sequence[str]
) -> Sample:
    tokens, labels, documents = (row[name].tolist() for name in ("tokens", "labels", "documents"))
    n = len(tokens)
    positions = row["positions"].tolist() if "positions" in row else list(range(n))
    # Without a document mask, a document's first token may be the label of the previous one's last.
    of_next = (row["labels"] != row.get("own_labels", row["labels"])).tolist()
    weights = row["weights"].tolist() if "weights" in row else [1.0] * n
    filled = max((at for at in range(n) if documents[at] != PADDING), default=-1) + 1
    found: list[Token] = []
    stream = TextStream(lambda ids: tokenizer.decode(ids))
    for at in range(filled):
        goes_on = at > 0 and documents[at] == documents[at - 1]
        if not goes_on:
            stream = TextStream(lambda ids: tokenizer.decode(ids))
        predicted = goes_on or (at > 0 and of_next[at - 1])
        learnt = predicted and not classes and labels[at - 1] != IGNORED_LABEL
        weight = weights[at - 1] if learnt else 1.0
        token = Token(tokens[at], stream.add(tokens[at]), documents[at], positions[at], learnt, True, weight)
        found.append(token)
        last = at + 1 == filled
        ends = bool(classes) or last or (documents[at + 1] != documents[at] and not of_next[at])
        if ends and labels[at] != IGNORED_LABEL:
            text = f" → {classes[labels[at]]}" if classes else stream.add(labels[at])
            place = documents[at], positions[at] + 1
            found.append(Token(labels[at], text, *place, True, is_input=False, weight=weights[at]))
    return Sample(number, found, n - filled)


def in_terminal(sample: Sample, *, color: bool) -> Iterator[str]:
    """Format a sample for the terminal."""
    yield sample.title()
    for document, of_document in groupby(sample.tokens, key=lambda token: token.document):
        yield _painted(f"  ── document {document} " + "─" * 40, _FAINT, color)
        for line in _lines(list(of_document)):
            text = "".join(_shown(part, color) for part in _runs(line))
            used = sum(len(one_line(token.text)) for token in line)
            ids = " ".join(
                _painted(str(token.id), _GREEN if token.learnt else _FAINT, color) for token in line
            )
            yield f"  {line[0].position:>6}  {text}{' ' * max(1, WIDTH - used)}{ids}"


def _lines(tokens: list[Token]) -> Iterator[list[Token]]:
    line: list[Token] = []
    used = 0
    for token in tokens:
        width = len(one_line(token.text))
        if line and (used + width > WIDTH or len(line) == 16):
            yield line
            line, used = [], 0
        line.append(token)
        used += width
        if token.text.endswith("\n"):
            yield line
            line, used = [], 0
    if line:
        yield line


def _runs(line: list[Token]) -> Iterator[list[Token]]:
    for _, run in groupby(line, key=lambda token: (token.learnt, token.is_input, token.weight)):
        yield list(run)


def _shown(run: list[Token], color: bool) -> str:
    text = "".join(one_line(token.text) for token in run)
    if run[0].weight != 1:
        text += f"×{run[0].weight:g}"
    if not color:
        text = f"{text}⁎" if not run[0].is_input else text
        return f"⟦{text}⟧" if run[0].learnt else text
    code = _GREEN * run[0].learnt + _UNDERLINED * (not run[0].is_input)
    return _painted(text, code, color) if code else text


def _painted(text: str, code: str, color: bool) -> str:
    return f"{code}{text}{_PLAIN}" if color else text


_STYLE = """
:root { color-scheme: light dark; --loss: #1a7f37; --faint: #888; }
body { font: 14px/1.9 ui-monospace, monospace; margin: 2em; max-width: 110em; }
h2 { font-size: 1em; margin-top: 2em; }
div { border-left: 4px solid; padding-left: 1em; margin: .6em 0; white-space: pre-wrap; }
div.d0 { border-color: #4878cf; } div.d1 { border-color: #d1633c; } div.d2 { border-color: #7f5fb5; }
div.d3 { border-color: #b59a2b; } div.d4 { border-color: #3a9d9d; } div.d5 { border-color: #b5507f; }
span { display: inline-block; vertical-align: top; line-height: 1.3; margin: 0 1px .4em 0; color: inherit; }
span.l { color: var(--loss); background: color-mix(in srgb, var(--loss) 14%, transparent); }
span.p { text-decoration: underline; }
small { display: block; font-size: 9px; color: var(--faint); text-decoration: none; }
"""


def as_html(found: Sequence[Sample], title: str) -> str:
    """Format all samples as one self-contained page."""
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>", f"<style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        '<p><span class="l">green</span> has a loss; <span class="p">underlined</span> is predicted and no '
        "input; a bar is a document (conversation); below each token is its id.</p>",
    ]  # fmt: skip
    for sample in found:
        parts.append(f"<h2>{html.escape(sample.title())}</h2>")
        for document, of_document in groupby(sample.tokens, key=lambda token: token.document):
            spans = "".join(map(_span, of_document))
            parts.append(f'<div class="d{document % 6}">{spans}</div>')
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _span(token: Token) -> str:
    names = " ".join(["l"] * token.learnt + ["p"] * (not token.is_input))
    about = f"id {token.id}, position {token.position}, document {token.document}"
    about += f", weight {token.weight:g}" * (token.weight != 1)
    text = html.escape(one_line(token.text)) or "&nbsp;"
    line = "<br>" * token.text.endswith("\n")
    return f'<span class="{names}" title="{about}">{text}<small>{token.id}</small></span>{line}'
