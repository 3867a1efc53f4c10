"""Train a byte-level BPE or SentencePiece tokenizer on text files.

    llama-toolkit train-tokenizer --output toolkit/data/embedded/tokenizer
    llama-toolkit train-tokenizer --format json --output tests/assets/tokenizer_json
    llama-toolkit train-tokenizer --format sentencepiece --output tests/assets/tokenizer_sentencepiece
    llama-toolkit train-tokenizer --corpus 'books/*.txt' --vocab-size 8192 --output my_tokenizer

``tiktoken`` writes ``tokenizer.model`` as Llama 3's: byte-level BPE ranks for Llama 3's word pattern.
The 256 special tokens follow the ranks and are not in the file. ``json`` writes the same tokenizer as
``tokenizer.json``, which adds BOS like Llama 3.1's. ``sentencepiece`` writes ``tokenizer.model`` with
Llama 2's settings (BPE, byte fallback, split digits, no normalization). The vocabulary size includes
special tokens. The same text gives the same files.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from toolkit.commands.arguments import command_parser, flags_named, local_path, local_path_text, writes
from toolkit.data.find_files import open_text
from toolkit.data.sources import open_corpus
from toolkit.data.tokenizers.to_json import byte_characters, merges, visible
from toolkit.errors import ConfigError, Problem, one_line
from toolkit.models.registry import tiktoken_forms

FILE_NAMES = {"tiktoken": "tokenizer.model", "sentencepiece": "tokenizer.model", "json": "tokenizer.json"}
_LONGEST = 1 << 20
"""Bytes of the longest line that SentencePiece reads; it skips longer ones."""

[FORM] = [form for form in tiktoken_forms() if form.trained]


def texts(corpus: str | None, column: str) -> Iterator[str]:
    """Yield the texts of files, selected as in ``training.dataset_path``; None selects the shipped corpus.
    Reports skipped files to stderr."""
    source = open_corpus("embedded", None) if corpus is None else open_text(corpus, column)
    for note in source.notes:
        print(f"note   {one_line(note)}", file=sys.stderr)
    for chunk in source.chunks():
        yield from chunk.texts(column)


def train_ranks(corpus: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Train byte-level BPE with Llama 3's word pattern: token bytes → rank, the 256 bytes first.

    Raises:
        ConfigError: fewer ranks than bytes, or too little text.
    """
    if n_ranks < 256:
        raise _bad_size(n_ranks + FORM.n_special, "256 bytes and 256 special tokens need 512 entries")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _words()
    # The alphabet first, then one entry per merge: ids are in the order of the learned merges.
    trainer = trainers.BpeTrainer(
        vocab_size=n_ranks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    byte_of = {character: byte for byte, character in byte_characters().items()}
    learnt = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in learnt}
    if len(ranks) != n_ranks:
        raise _bad_size(n_ranks + FORM.n_special, f"the text yields {len(ranks)} ranks, not {n_ranks}")
    return ranks


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    """Format ``tokenizer.model``: one line "base64 rank" per entry of ``ranks``."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def json_file(ranks: dict[bytes, int]) -> bytes:
    """Format a ``tokenizer.json`` that encodes as tiktoken does with ``ranks``; a word that is a token is not
    split."""
    pairs = [(visible(left), visible(right)) for left, right in merges(ranks)]
    vocabulary = {visible(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = _words()
    tokenizer.decoder = decoders.ByteLevel()
    special = FORM.special_tokens(None)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A",
        pair=f"{special[0]} $A {special[0]} $B",
        special_tokens=[(special[0], len(ranks))],
    )
    return (json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n").encode()


def sentencepiece_file(corpus: Iterable[str], n_pieces: int) -> bytes:
    """Train a SentencePiece model of ``n_pieces`` with Llama 2's settings.

    Raises:
        ConfigError: the text is too small for so many pieces, or needs more.
    """
    import sentencepiece

    model = io.BytesIO()
    lines = (piece for text in corpus for line in text.split("\n") for piece in _split_line(line))
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "character_coverage": 0.99995,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": _LONGEST,
        "num_threads": 1,
        "minloglevel": 2,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=n_pieces, **settings
        )
    except RuntimeError as error:
        raise _bad_size(n_pieces, f"SentencePiece: {error}") from error
    return model.getvalue()


def _split_line(line: str) -> Iterator[str]:
    """Split a line that is too long for SentencePiece, between words."""
    begin, most = 0, len(line) if len(line.encode()) <= _LONGEST else _LONGEST // 4  # of 4 bytes at most
    while len(line) - begin > most:
        space = line.rfind(" ", begin + 1, begin + most)
        yield line[begin : space if space > 0 else begin + most]
        begin = space + 1 if space > 0 else begin + most  # each piece gets a space before its first word
    if begin < len(line):
        yield line[begin:]


def _words() -> pre_tokenizers.PreTokenizer:
    """Split a text into words with Llama 3's pattern, in byte characters."""
    split = pre_tokenizers.Split(Regex(FORM.pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bad_size(size: int, rule: str) -> ConfigError:
    return ConfigError(
        Problem(rule=rule, fix="ask for another size, or give other text", key="--vocab-size", value=size)
    )


def run(corpus: Iterable[str], form: str, size: int) -> bytes:
    """Return the content of a tokenizer file of ``size`` entries, in one of the formats."""
    if form == "sentencepiece":
        return sentencepiece_file(corpus, size)
    if form == "tiktoken" and not FORM.matches(size - FORM.n_special):
        raise _bad_size(size, "a tiktoken file of so many ranks would be read as another model's")
    ranks = train_ranks(corpus, size - FORM.n_special)
    return tiktoken_file(ranks) if form == "tiktoken" else json_file(ranks)


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = command_parser("train-tokenizer", __doc__)
    parser.add_argument(
        "--corpus",
        type=local_path_text,
        help="file, folder, glob or comma list (default: the shipped corpus)",
    )
    parser.add_argument("--text-column", help="column of JSON lines (default: text)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries in all (default: 4096)")
    parser.add_argument("--format", choices=sorted(FILE_NAMES), default="tiktoken")
    parser.add_argument("--output", type=local_path, required=True, help="folder for the tokenizer file")
    arguments = parser.parse_args(argv)
    if arguments.text_column is not None and not arguments.corpus:
        parser.error("--text-column has no effect without --corpus")
    path = arguments.output / FILE_NAMES[arguments.format]
    if any(folder.exists() and not folder.is_dir() for folder in path.parents):
        parser.error(f"--output {arguments.output}: no folder can be made there")

    with flags_named({"training.dataset_path": "--corpus", "data.text_column": "--text-column"}):
        corpus = texts(arguments.corpus, arguments.text_column or "text")
        content = run(corpus, arguments.format, arguments.vocab_size)
    with writes("--output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"{path}: {arguments.vocab_size} entries, {len(content):,} bytes")
    return 0
