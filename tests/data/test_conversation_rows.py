"""Conversations from files to rows: what shares a row, what is learnt, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat_data import ASSETS, as_row, conversation, text, write_rows
from tests.models.small_llama import build, small
from toolkit.config import load_config
from toolkit.config.training import Data, Training
from toolkit.data import build_cache, text_files
from toolkit.data.batch_size import BatchShape
from toolkit.data.build import open_data
from toolkit.data.build_loader import build_loader
from toolkit.data.chat.sft import ChatOptions
from toolkit.data.chat.shapes import FORMATS, Shape
from toolkit.data.conversation_rows import ConversationRows, best_fit, statistics
from toolkit.data.corpus import Corpus
from toolkit.data.packing import PADDING
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import MixturePart, TokenCache, open_cache
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL

GSM8K = Path(os.environ.get("TOOLKIT_ASSETS", "")) / "chat" / "train.jsonl"


def _tokenized(file: Path, shape: Shape, **options: Any) -> TokenCache:
    corpus = Corpus(file.name, (file,), "text", shape=shape)
    chat = options.pop("chat", ChatOptions())
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    return tokenize_corpus(
        corpus, tokenizer, cache_folder=file.parent / "cache", progress=False, chat=chat, **options
    )


def _conversations(folder: Path, n: int, shape: str = "messages") -> Path:
    rng = random.Random(n)
    rows = [as_row(shape, conversation(rng, turns=1 if shape == "alpaca" else 4)) for _ in range(n)]
    return write_rows(folder / f"{shape}.jsonl", rows)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return _tokenized(_conversations(tmp_path_factory.mktemp("rows"), 120), Shape("messages"))


# --- best fit --------------------------------------------------------------------------------------


def _one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing as the books have it: items of each row, rows in the order of their first items."""
    rows: list[tuple[int, list[int]]] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [(room, at) for at, (room, _) in enumerate(rows) if room >= lengths[item]]
        if fitting:
            room, at = min(fitting)
            rows[at] = (room - lengths[item], [*rows[at][1], item])
        else:
            rows.append((capacity - lengths[item], [item]))
    return sorted(sorted(items) for _, items in rows)


@given(data=st.data(), capacity=st.integers(1, 40))
@settings(max_examples=300)
def test_best_fit_fills_as_the_algorithm_does_one_by_one(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    rows = best_fit(np.array(lengths, np.int64), capacity)
    found = [np.flatnonzero(rows == row).tolist() for row in range(rows.max(initial=-1) + 1)]
    expected = _one_by_one(lengths, capacity)
    assert all(sum(lengths[item] for item in row) <= capacity for row in found)
    assert [row[0] for row in found] == sorted(row[0] for row in found)
    # Of equal rooms either row may be taken: as many rows, with as much left in each.
    assert sorted(sum(lengths[i] for i in row) for row in found) == sorted(
        sum(lengths[i] for i in row) for row in expected
    )


def test_a_million_conversations_are_packed_in_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 1_000_000).astype(np.int64).clip(1, 4096)
    rows = best_fit(lengths, 4096)
    assert np.bincount(rows, lengths).max() <= 4096
    assert lengths.sum() / (4096 * (rows.max() + 1)) > 0.999


# --- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seq_len", [256, 40])
def test_rows_hold_each_conversation_once_with_its_labels(
    cache: TokenCache, packing: bool, seq_len: int
) -> None:
    assert cache.mask is not None and cache.conversations is not None
    rows = ConversationRows(cache, seq_len, packing=packing, pad_id=7)
    seen = []
    for k in range(len(rows)):
        row = rows.sample(k)
        documents = row["documents"]
        assert {name: values.dtype for name, values in row.items()} == {
            name: values.dtype for name, values in rows.blank().items()
        }
        used = documents != PADDING
        assert (row["tokens"][~used] == 7).all() and (row["labels"][~used] == IGNORED_LABEL).all()
        assert used.sum() == used.nonzero()[0].max() + 1  # padding is at the end
        held = rows.conversations[rows.starts[k] : rows.starts[k + 1]]
        assert documents.max() + 1 == len(held) and (packing or len(held) == 1)
        for number, index in enumerate(held):
            here = documents == number
            begin, n = cache.offsets[index], here.sum()
            assert n == min(seq_len, cache.offsets[index + 1] - begin - 1)
            assert (row["tokens"][here] == cache.tokens[begin : begin + n]).all()
            learnt = cache.mask[begin + 1 : begin + 1 + n] == 1
            assert (row["labels"][here][learnt] == cache.tokens[begin + 1 : begin + 1 + n][learnt]).all()
            assert (row["labels"][here][~learnt] == IGNORED_LABEL).all()
            assert (row["positions"][here] == np.arange(n)).all()
            seen.append(int(index))
    first = cache.conversations[:, 2]
    assert sorted(seen) == np.flatnonzero((first >= 0) & (first <= seq_len)).tolist()
    assert [rows.conversations[start] for start in rows.starts[:-1]] == sorted(
        rows.conversations[start] for start in rows.starts[:-1]
    )


def test_statistics_count_what_the_rows_hold(cache: TokenCache) -> None:
    for seq_len, packing in ((256, True), (256, False), (40, True)):
        rows = ConversationRows(cache, seq_len, packing=packing)
        counted = statistics(cache, rows)
        samples = [rows.sample(k) for k in range(len(rows))]
        filled = sum(int((sample["documents"] != PADDING).sum()) for sample in samples)
        learnt = sum(int((sample["labels"] != IGNORED_LABEL).sum()) for sample in samples)
        lost = sum(max(0, int(n) - 1 - seq_len) for n in np.diff(cache.offsets)[rows.conversations])
        assert (counted.rows, counted.places) == (len(rows), len(rows) * seq_len)
        assert (counted.filled, counted.learnt, counted.tokens_cut) == (filled, learnt, lost)
        assert counted.dropped == 120 - len(rows.conversations)
    assert ", 0 dropped" not in str(counted) and "truncated" in str(counted)


def _real_shaped(folder: Path) -> TokenCache:
    """200 problems of GSM8K where it is there, else texts of such lengths."""
    if "TOOLKIT_ASSETS" in os.environ:
        lines = GSM8K.read_text().splitlines()[:200]
        return _tokenized(
            write_rows(folder / "real.jsonl", [json.loads(line) for line in lines]),
            Shape("alpaca", (("instruction", "question"), ("output", "answer"))),
        )
    rng = random.Random(5)
    rows = [
        as_row("alpaca", [{"role": role, "content": " ".join(text(rng) for _ in range(rng.randint(2, 12)))}
                          for role in ("user", "assistant")])
        for _ in range(200)
    ]  # fmt: skip
    return _tokenized(write_rows(folder / "real.jsonl", rows), Shape("alpaca"))


@pytest.mark.slow
def test_packing_does_not_contaminate_trl_805(tmp_path: Path) -> None:
    """Summed loss and gradients; and a conversation's logits are its own, whatever its neighbours are."""
    corpus = _real_shaped(tmp_path)
    seq_len = int(np.diff(corpus.offsets).max())
    shape = dict(n_layers=2, dim=32, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48)
    args = small(vocab_size=4096, max_seq_len=seq_len, **shape)

    def tensors(packing: bool, k: int) -> dict[str, torch.Tensor]:
        sample = ConversationRows(corpus, seq_len, packing=packing).sample(k)
        return {name: torch.from_numpy(values)[None] for name, values in sample.items()}

    found = {}
    for packing in (True, False):
        model = build(args, torch.float32)
        rows = ConversationRows(corpus, seq_len, packing=packing)
        total = 0.0
        for k in range(0, len(rows), 8):
            batch = [rows.sample(at) for at in range(k, min(k + 8, len(rows)))]
            stacked = {name: torch.from_numpy(np.stack([s[name] for s in batch])) for name in batch[0]}
            loss = model(
                stacked["tokens"],
                positions=stacked["positions"],
                documents=stacked["documents"],
                labels=stacked["labels"],
            )
            (loss / 20_000).backward()  # about the mean a token, as a step has it
            total += loss.item()
        found[packing] = total, {name: p.grad for name, p in model.named_parameters()}
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    for name, gradient in found[True][1].items():
        difference = (gradient - found[False][1][name]).norm() / gradient.norm()
        assert difference < 1e-6, (name, difference)

    with torch.no_grad():
        packed = tensors(True, 0)
        before = model(packed["tokens"], positions=packed["positions"], documents=packed["documents"])
        second = packed["documents"][0] == 1
        assert second.any()
        packed["tokens"][0, ~second] = 11
        after = model(packed["tokens"], positions=packed["positions"], documents=packed["documents"])
        assert torch.equal(before[0, second], after[0, second])
        assert not torch.equal(before[0, ~second], after[0, ~second])


# --- files and the cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", FORMATS)
def test_parquet_and_processes_give_the_same_cache(tmp_path: Path, shape: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(1)
    dialogs = [conversation(rng, turns=1 if shape == "alpaca" else 3) for _ in range(60)]
    if shape == "prompt_completion":  # a column has one type
        dialogs = [dialog for dialog in dialogs if len(dialog) > 2]
    rows = [as_row(shape, dialog) for dialog in dialogs]
    plain = _tokenized(write_rows(tmp_path / "a.jsonl", rows), Shape(shape))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    with mock.patch.object(text_files, "CHUNK_BYTES", 500):
        columns = _tokenized(tmp_path / "a.parquet", Shape(shape))
        several = _tokenized(write_rows(tmp_path / "b.jsonl", [*rows, rows[0]]), Shape(shape), processes=2)
    for other, n in ((columns, len(rows)), (several, len(rows) + 1)):
        assert other.n_documents == n
        for name in ("tokens", "mask"):
            assert np.array_equal(getattr(plain, name), getattr(other, name)[: plain.n_tokens])
        assert np.array_equal(plain.conversations[:, 2:], other.conversations[: len(rows), 2:])
    assert several.conversations[:, 1].tolist() == list(range(1, len(rows) + 2))  # lines
    assert columns.conversations[:, 1].tolist() == list(range(len(rows)))  # rows
    assert np.array_equal(pickle.loads(pickle.dumps(plain)).mask, plain.mask)  # noqa: S301 (our own bytes)


def _weighted(n: int, *, since: int) -> list[dict[str, Any]]:
    """Conversations with weights from number ``since`` on; keys are the same, as a table has them."""
    rng = random.Random(n)
    weights = [None] * since + [rng.choice([None, 1, 0.5, 3]) for _ in range(since, n - 1)] + [0.25]
    return [{"messages": conversation(rng), "weight": weight} for weight in weights[-n:]]


@pytest.mark.parametrize("since", [0, 40])
def test_weights_are_kept_where_there_are_some(tmp_path: Path, since: int) -> None:
    """The same bytes of any file, however it is cut into chunks, and with weights in a last chunk alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _weighted(50, since=since)
    shape = Shape("messages")
    plain = _tokenized(write_rows(tmp_path / "a.jsonl", rows), shape)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    with mock.patch.object(text_files, "CHUNK_BYTES", 500), mock.patch.object(build_cache, "ONES", 100):
        columns = _tokenized(tmp_path / "a.parquet", shape)
        several = _tokenized(write_rows(tmp_path / "b.jsonl", [*rows, rows[0]]), shape, processes=2)
    assert plain.weights is not None and plain.mask is not None
    expected = np.repeat([np.float32(row["weight"] or 1) for row in rows], np.diff(plain.offsets))
    assert np.array_equal(plain.weights, np.where(plain.mask, expected, 1))
    assert plain.weights.dtype == np.float32
    assert (plain.folder / "weights.bin").read_bytes() == (columns.folder / "weights.bin").read_bytes()
    assert np.array_equal(several.weights[: plain.n_tokens], plain.weights)  # type: ignore[index]
    assert np.array_equal(pickle.loads(pickle.dumps(plain)).weights, plain.weights)  # noqa: S301 (our own)


def test_weights_of_0_and_1_are_kept_as_a_mask(tmp_path: Path) -> None:
    rows = [{"messages": conversation(random.Random(n)), "weight": n % 2} for n in range(10)]
    cache = _tokenized(write_rows(tmp_path / "a.jsonl", rows), Shape("messages"))
    learnt = np.add.reduceat(cache.mask, cache.offsets[:-1]) > 0  # type: ignore[arg-type]
    assert learnt.tolist() == [bool(n % 2) for n in range(10)]
    assert cache.weights is None and not (cache.folder / "weights.bin").exists()
    assert "weights" not in ConversationRows(cache, 64, packing=True).sample(0)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seq_len", [256, 40])
def test_rows_have_the_weights_of_their_labels(tmp_path: Path, packing: bool, seq_len: int) -> None:
    rows = _weighted(30, since=0)
    cache = _tokenized(write_rows(tmp_path / "a.jsonl", rows), Shape("messages"))
    held = ConversationRows(cache, seq_len, packing=packing)
    seen = 0
    for k in range(len(held)):
        row = held.sample(k)
        assert row["weights"].dtype == np.float32 and row["weights"].shape == (seq_len,)
        for number, index in enumerate(held.conversations[held.starts[k] : held.starts[k + 1]]):
            learnt = (row["documents"] == number) & (row["labels"] != IGNORED_LABEL)
            assert (row["weights"][learnt] == np.float32(rows[index]["weight"] or 1)).all()
            seen += int(learnt.sum())
        assert (row["weights"][row["documents"] == PADDING] == 1).all()
    counted = statistics(cache, held)
    assert counted.learnt == seen and "trained on, with weights" in str(counted)


def test_what_changes_masks_makes_another_cache(tmp_path: Path) -> None:
    file = _conversations(tmp_path, 5)
    made = [
        _tokenized(file, Shape("messages"), chat=options).fingerprint
        for options in (
            ChatOptions(),
            ChatOptions(train_on="all"),
            ChatOptions(template="{{ messages[0].content }}{% generation %}x{% endgeneration %}"),
            ChatOptions(template="{{ messages[0].content }}{{ a }}{% generation %}x{% endgeneration %}",
                        variables={"a": "b"}),
        )
    ]  # fmt: skip
    assert len(set(made)) == 4
    assert _tokenized(file, Shape("messages")).fingerprint == made[0]


def test_a_damaged_mask_is_seen(tmp_path: Path) -> None:
    cache = _tokenized(_conversations(tmp_path, 5), Shape("messages"))
    assert cache.mask is not None
    sound = cache.mask.copy()
    damaged = sound.copy()
    damaged[1] ^= 1
    (cache.folder / "mask.bin").write_bytes(damaged.tobytes())
    with pytest.raises(DataError, match=r"mask.bin is damaged"):
        open_cache(cache.folder)
    (cache.folder / "conversations.bin").unlink()
    again = _tokenized(tmp_path / "messages.jsonl", Shape("messages"))
    assert np.array_equal(again.mask, sound)


def test_a_malformed_line_is_told_with_its_number(tmp_path: Path) -> None:
    file = _conversations(tmp_path, 5)
    with open(file, "a") as lines:
        lines.write('\n{"messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "a"}]}\n')
    with pytest.raises(DataError, match=rf"^{re.escape(str(file))}, line 7, message 2: role 'bot'\n  fix:  "):
        _tokenized(file, Shape("messages"))


# --- conversations without a token to learn --------------------------------------------------------


def _config(file: Path, *flags: str) -> Any:
    return load_config(
        [
            f"--training.dataset_path={file}", "--data.format=messages", f"--data.cache_folder={file.parent}",
            f"--model.hf_assets_path={ASSETS / 'tokenizer'}", "--training.seq_len=64", *flags,
        ]
    )  # fmt: skip


def test_masks_that_come_out_empty_are_counted_named_and_refused_or_dropped_trl_6668(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "hi"}]
    long = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "yes"}]
    good = [*asked, {"role": "assistant", "content": "hello"}]
    file = write_rows(tmp_path / "a.jsonl", [{"messages": m} for m in (good, asked, long, good, asked)])
    with pytest.raises(DataError) as error:
        open_data(_config(file), progress=False)
    said = str(error.value)
    assert "[training] 3 of 5 conversations have no token in the loss" in said
    assert "2 have no assistant message in the loss and 1 are truncated to 64 tokens" in said
    assert f"{file}, line 2; {file}, line 3; {file}, line 5" in said
    assert 'fix:  set data.empty_mask = "drop"' in said and "raise training.seq_len" in said
    data = open_data(_config(file, "--data.empty_mask=drop"), progress=False)
    short = data.caches["training"]
    rows = ConversationRows(short, 64, packing=True)
    assert rows.conversations.tolist() == [0, 3]
    assert "5 conversations, 3 dropped without a token in the loss" in str(
        statistics(data.caches["training"], rows)
    )
    # A longer row takes the long one in again, from the same cache.
    longer = open_data(_config(file, "--data.empty_mask=drop", "--training.seq_len=256"), progress=False)
    assert longer.caches["training"].fingerprint == short.fingerprint
    assert ConversationRows(longer.caches["training"], 256, packing=True).conversations.tolist() == [0, 2, 3]
    nothing = write_rows(tmp_path / "b.jsonl", [{"messages": asked}])
    with pytest.raises(DataError, match=r"1 of 1 conversations .*\n  fix:  correct them"):
        open_data(_config(nothing, "--data.empty_mask=drop"), progress=False)


# --- the loader ------------------------------------------------------------------------------------


def _batches(data: TokenCache | list[MixturePart], n: int, state: dict | None = None, ranks: int = 1) -> list:
    loaders = [
        build_loader(data, Training(seq_len=128), Data(), BatchShape(4, 2, 4 // 2 // ranks), pad_id=0,
                     dp_rank=rank, dp_size=ranks, seed=1)
        for rank in range(ranks)
    ]  # fmt: skip
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    iterators = [iter(loader) for loader in loaders]
    found = []
    for _ in range(n):
        parts = [next(it) for it in iterators for _ in range(2 // ranks)]
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return [found, loaders[0].state_dict()]


def test_order_and_resume_are_those_of_text_on_any_ranks(cache: TokenCache, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 500)
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    plain = tokenize_corpus(
        Corpus("text", (tmp_path / "text.txt",), "text"), tokenizer, cache_folder=tmp_path, progress=False
    )
    for data in (cache, [MixturePart("chat", 1, cache), MixturePart("text", 1, plain)]):
        whole, _ = _batches(data, 12)
        first, state = _batches(data, 5, ranks=2)
        rest, _ = _batches(data, 7, state)
        for one, other in zip(whole, [*first, *rest], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    loader = build_loader(
        [MixturePart("chat", 1, cache)], Training(seq_len=128), Data(), BatchShape(4, 2, 2), pad_id=0,
        dp_rank=0, dp_size=1,
    )  # fmt: skip
    (told,) = loader.conversations()
    assert told.startswith("chat: 120 conversations")
    assert len(list(islice(loader, 3))) == 3
