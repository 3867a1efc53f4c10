"""The loader gives the same samples in the same order on any mesh, with any workers, after any resume."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.byte_tokenizer import ByteTokenizer
from toolkit.config.training import Data, DataLoader, Training, Validation
from toolkit.data.batch_size import BatchShape
from toolkit.data.build_loader import build_loader
from toolkit.data.corpus import Corpus
from toolkit.data.dataloader import FIELDS, Loader, lost_worker
from toolkit.data.mixture import BLOCK, MixtureOrder
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import MixturePart, TokenCache
from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL

ROOT = Path(__file__).parents[2]
SEQ_LEN = 4
N_SAMPLES = 23


def _corpus(n_samples: int = N_SAMPLES, first: int = 0, fingerprint: str = "fingerprint") -> TokenCache:
    """Tokens that are their own place, so that a row's first token tells which sample it is."""
    n = n_samples * SEQ_LEN + 1
    offsets = np.append(np.arange(0, n, 7), n)
    tokens = np.arange(first * SEQ_LEN, first * SEQ_LEN + n, dtype=np.uint32)
    return TokenCache(Path("unused"), fingerprint, len(offsets) - 1, n, 1 << 32, tokens, offsets)


def _parts(web: float = 3) -> list[MixturePart]:
    """A mixture, not in the order of the names; the samples of "web" count on from those of "code"."""
    web_part = MixturePart("web", web, _corpus(50, first=N_SAMPLES, fingerprint="of web"))
    return [web_part, MixturePart("code", 1, _corpus(fingerprint="of code"))]


def _loader(corpus: TokenCache | list[MixturePart] | None = None, **changes: Any) -> Loader:
    """``changes`` of the mesh, the batch and the keys of the configuration's tables."""

    def taken(**defaults: Any) -> dict[str, Any]:
        return {name: changes.pop(name, default) for name, default in defaults.items()}

    ranks = taken(pad_id=None, dp_rank=0, dp_size=1, seed=3)
    total, local = taken(global_batch_size=4, local_batch_size=2).values()
    data = Data(**taken(packing=True, document_mask=True, shuffle=True))
    table = taken(seq_len=SEQ_LEN) | ({"samples": changes.pop("samples")} if "samples" in changes else {})
    kind = Validation if "samples" in table else Training
    batch = BatchShape(total, local, total // (local * ranks["dp_size"]))
    return build_loader(
        corpus or _corpus(), kind(**table, dataloader=DataLoader(**changes)), data, batch, **ranks
    )


def _samples(batch: dict[str, torch.Tensor]) -> list[int]:
    return (batch["tokens"][:, 0] // SEQ_LEN).tolist()


def _global_batches(count: int, dp_size: int, state: dict | None = None, **changes: Any) -> list[list[int]]:
    """The samples of each global batch, in the order of its rows, as all ranks together take them."""
    batch_size, local = changes.get("global_batch_size", 4), changes.get("local_batch_size", 2)
    ranks = [_loader(dp_rank=rank, dp_size=dp_size, **changes) for rank in range(dp_size)]
    for rank in ranks:
        if state:
            rank.load_state_dict(state)
    iterators = [iter(rank) for rank in ranks]
    batches = [
        [
            sample
            for it in iterators
            for _ in range(batch_size // dp_size // local)
            for sample in _samples(next(it))
        ]
        for _ in range(count)
    ]
    assert len({str(rank.state_dict()) for rank in ranks}) == 1
    return batches


@settings(max_examples=50, deadline=None)
@given(
    dp_size=st.sampled_from([1, 2, 3, 4, 6, 12]), local=st.sampled_from([1, 2, 3, 4, 12]),
    resume_at=st.integers(0, 30), seed=st.integers(0, 3), shuffle=st.booleans(), mixed=st.booleans(),
)  # fmt: skip
def test_one_order_on_any_mesh_and_after_any_resume(
    dp_size: int, local: int, resume_at: int, seed: int, shuffle: bool, mixed: bool
) -> None:
    changes: dict[str, Any] = {"global_batch_size": 12, "seed": seed, "shuffle": shuffle}
    if mixed:
        changes["corpus"] = _parts()
    if 12 % (dp_size * local):
        with pytest.raises(ValueError, match="not a multiple"):
            _loader(dp_size=dp_size, local_batch_size=local, **changes)
        return
    whole = _global_batches(resume_at + 3, 1, local_batch_size=12, **changes)
    flat = [sample for batch in whole for sample in batch]
    code = [sample for sample in flat if sample < N_SAMPLES]  # without a mixture all are
    for epoch in range(len(code) // N_SAMPLES):
        assert sorted(code[epoch * N_SAMPLES : (epoch + 1) * N_SAMPLES]) == list(range(N_SAMPLES))
    state = _loader(local_batch_size=12, **changes).state_dict() | {"samples": 12 * resume_at}
    resumed = _global_batches(3, dp_size, state, local_batch_size=local, **changes)
    assert resumed == whole[resume_at:]


@pytest.mark.parametrize("seed", range(5))
def test_an_epoch_interrupted_ten_times_at_changing_world_sizes_is_one_epoch(seed: int) -> None:
    chance, batches = random.Random(seed), 30
    fixed: dict[str, Any] = {"corpus": _corpus(8 * batches), "global_batch_size": 8}
    state: dict[str, Any] | None = None
    consumed: list[list[int]] = []
    for first, last in pairwise([0, *sorted(chance.sample(range(1, batches), 10)), batches]):
        world = chance.choice([1, 2, 4, 8])
        local = chance.choice([1, 8 // world])
        consumed += _global_batches(last - first, world, state, local_batch_size=local, **fixed)
        state = _loader(**fixed).state_dict() | {"samples": 8 * last}
    assert consumed == _global_batches(batches, 1, local_batch_size=8, **fixed)
    assert sorted(sample for batch in consumed for sample in batch) == list(range(8 * batches))


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 1, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 0, "persistent_workers": True, "prefetch_factor": 2},
    ],
)
@pytest.mark.parametrize("parts", [None, _parts()], ids=["one", "mixture"])
def test_workers_and_prefetch_change_nothing(
    workers: dict[str, Any], parts: list[MixturePart] | None
) -> None:
    plain, other = _loader(parts), _loader(parts, **workers)
    reference = iter(plain)
    # Again from a new iterator: what was prefetched but not consumed comes again.
    for count in (5, 3):
        iterator = iter(other)
        for _ in range(count // 2 * 2):
            expected, actual = next(reference), next(iterator)
            for name, values in expected.items():
                assert torch.equal(values, actual[name])
        assert other.state_dict() == plain.state_dict()


def _fails_of(error: type[Exception]) -> Iterator[Any]:
    raise error
    yield


_KILLS_A_WORKER = """
import multiprocessing, os, signal
from tests.data.test_dataloader import _loader
from toolkit.data.dataloader import lost_worker
from toolkit.errors import DataError
try:
    batches = iter(_loader(num_workers=1))
    next(batches)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    for _ in batches:  # those that were ready come first
        pass
except (RuntimeError, DataError) as error:
    print(error if isinstance(error, DataError) else lost_worker(error), flush=True)
os._exit(0)
"""


def test_a_worker_that_is_killed_is_told_in_one_message() -> None:
    """In a process of its own: torch raises wherever that is."""
    command = [sys.executable, "-c", _KILLS_A_WORKER]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert "DataLoader worker" in told and "training.dataloader.num_workers" in told
    assert lost_worker(RuntimeError("of something else")) is None


_SIGNALS_A_WORKER = """
import multiprocessing, os, subprocess
from tests.data.test_dataloader import _loader
batches = iter(_loader(num_workers=1))
next(batches)
[worker] = multiprocessing.active_children()
for name in ("TERM", "INT", "USR1", "HUP"):
    subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
for _ in range(8):  # more than were ready
    next(batches)
worker.terminate()
worker.join(5)
print(worker.exitcode, flush=True)
os._exit(0)
"""


def test_a_signal_of_the_scheduler_to_all_processes_leaves_the_workers_to_the_run() -> None:
    command = [sys.executable, "-c", _SIGNALS_A_WORKER]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout == "0\n"


@pytest.mark.parametrize("error", [ConnectionResetError, ConnectionRefusedError, EOFError])
def test_a_worker_that_ends_while_its_batch_is_handed_over_is_told_in_one_message(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = _loader()
    monkeypatch.setattr(loader, "_data", _fails_of(error))
    with pytest.raises(DataError, match="training.dataloader.num_workers"):
        next(iter(loader))


def test_the_state_counts_whole_global_batches_that_were_consumed() -> None:
    loader = _loader(global_batch_size=8, local_batch_size=2, dp_size=2)
    iterator = iter(loader)
    counts = []
    for _ in range(5):
        next(iterator)
        counts.append(loader.state_dict()["samples"])
    assert counts == [0, 8, 8, 16, 16]
    # A new iterator begins with the batch that was not complete.
    reference = _global_batches(3, 1, global_batch_size=8, local_batch_size=8)
    assert _samples(next(iter(loader))) == reference[2][:2]


def test_a_resume_at_another_global_batch_size_goes_on_from_the_same_sample() -> None:
    whole = sum(_global_batches(10, 1), [])
    loader = _loader()
    state = loader.state_dict() | {"samples": 12}
    resumed = sum(_global_batches(3, 2, state, global_batch_size=6, local_batch_size=3), [])
    assert resumed == whole[12:30]


def test_the_state_is_plain_and_another_corpus_or_seed_is_refused() -> None:
    state = _loader().state_dict()
    assert json.loads(json.dumps(state)) == state
    _loader(document_mask=False, num_workers=2, global_batch_size=12, dp_size=3).load_state_dict(state)
    for change in ({"seed": 4}, {"seq_len": 3}, {"shuffle": False}, {"packing": False}):
        with pytest.raises(DataError, match=f"{next(iter(change))} was .* and is "):
            _loader(**change).load_state_dict(state)
    with pytest.raises(DataError, match="corpus was 'other' and is 'fingerprint'"):
        _loader().load_state_dict(state | {"corpus": "other"})


@pytest.mark.slow
def test_a_million_samples_of_a_mixture_on_ranks_that_come_and_go() -> None:
    batch, n_code, n_web = 500, 40_000, 310_000
    parts = [MixturePart("code", 1, _corpus(n_code)), MixturePart("web", 3, _corpus(n_web))]
    order = MixtureOrder({"code": 1, "web": 3}, [n_code, n_web], seed=3, shuffle=True)
    expected = order(np.arange(1_000_000))
    samples, found = 0, []
    for dp_size, until in [(1, 123_500), (4, 124_000), (2, 600_000), (4, 1_000_000)]:
        changes: dict[str, Any] = {"global_batch_size": batch, "dp_size": dp_size, "local_batch_size": 25}
        ranks = [_loader(parts, dp_rank=rank, **changes) for rank in range(dp_size)]
        rows = []
        for rank in ranks:
            rank.load_state_dict(rank.state_dict() | {"samples": samples})
            rank._sampler.start = rank.samples  # as iterating does, without a million tensors
            micro_batches = islice(iter(rank._sampler), (until - samples) // dp_size // 25)
            rows.append(np.array(list(micro_batches)).reshape(-1, batch // dp_size))
        found.append(np.concatenate(rows, axis=1).ravel())
        samples = until
    assert np.array_equal(np.concatenate(found), expected)
    code = (expected < n_code).reshape(-1, BLOCK).sum(axis=1)
    assert (code == 2500).all()


def test_a_mixture_has_the_rows_of_its_parts() -> None:
    loader = _loader(_parts(), global_batch_size=100, local_batch_size=100, shuffle=False)
    assert loader.epoch_samples == N_SAMPLES + 50 and loader.mixture is not None
    batch = next(iter(loader))
    order = loader.mixture(np.arange(100))
    assert _samples(batch) == order.tolist() and 10 < (order < N_SAMPLES).sum() < 40
    alone = next(iter(_loader(shuffle=False)))
    row = _samples(batch).index(1)
    for name in FIELDS:
        assert torch.equal(batch[name][row], alone[name][1])  # type: ignore[index]


def test_weights_of_a_part_that_has_none_are_1() -> None:
    chat = replace(
        _corpus(1), tokens=np.arange(5, dtype=np.uint32), offsets=np.array([0, 5]), n_documents=1,
        mask=np.array([0, 0, 1, 1, 1], np.uint8), conversations=np.array([[0, 1, 2, 3]]), files=("a",),
        weights=np.array([1, 1, 0.5, 3, 3], np.float32),
    )  # fmt: skip
    parts = [MixturePart("chat", 1, chat), _parts(web=1)[0]]
    batch = next(iter(_loader(parts, global_batch_size=100, local_batch_size=100)))
    weights, labels = batch["weights"], batch["labels"]
    assert weights is not None and labels is not None and weights.dtype == torch.float32
    rows = {False: [1, 1, 1, 1], True: [1, 0.5, 3, 3]}
    ours = (labels == torch.tensor([IGNORED_LABEL, 2, 3, 4])).all(dim=1).tolist()
    assert 40 < sum(ours) < 60 and weights.tolist() == [rows[of_chat] for of_chat in ours]
    filled = next(iter(_loader(chat, samples=-1, global_batch_size=2, local_batch_size=2)))
    assert filled["weights"].tolist() == [rows[True], rows[False]]  # type: ignore[union-attr]


def test_a_mixture_in_the_state_is_told_by_what_changed() -> None:
    state = _loader(_parts()).state_dict()
    assert json.loads(json.dumps(state)) == state
    _loader(_parts()[::-1], global_batch_size=12, dp_size=3).load_state_dict(state)
    _loader(_parts(web=3.00001)).load_state_dict(state)  # the same quotas
    for other, said in [
        (_parts(web=1), "code.share was '25%' and is '50%'; web.share was '75%' and is '50%'"),
        (_parts()[:1], "corpus was 'mixture of code, web' and is 'mixture of web'"),
        (None, "corpus was 'mixture of code, web' and is 'fingerprint'"),
        (
            [_parts()[0], MixturePart("code", 1, _corpus())],
            "code.corpus was 'of code' and is 'fingerprint'\n",
        ),
    ]:
        with pytest.raises(DataError, match=f"does not match this run: .*{said}"):
            _loader(other).load_state_dict(state)
    with pytest.raises(DataError, match="corpus was 'fingerprint' and is 'mixture of code, web'"):
        _loader(_parts()).load_state_dict(_loader().state_dict())


def test_what_a_mixture_cannot_be() -> None:
    with pytest.raises(DataError, match=r"^data\.mixture\.web: the corpus has .* tokens"):
        _loader([*_parts()[1:], MixturePart("web", 1, _corpus(0))])
    with pytest.raises(ValueError, match="a mixture is infinite"):
        _loader(_parts(), samples=-1)


@pytest.mark.parametrize("samples", [-1, 13, 99])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_finite_loader_gives_each_sample_once_to_ranks_of_equal_length(dp_size: int, samples: int) -> None:
    seen, lengths = [], set()
    for rank in range(dp_size):
        loader = _loader(
            global_batch_size=8,
            dp_rank=rank,
            dp_size=dp_size,
            samples=samples,
            document_mask=False,
        )
        for _ in range(2):  # every iteration starts anew
            batches = list(loader)
        lengths.add(len(batches))
        labels = torch.cat([batch["labels"] for batch in batches]).ravel()
        seen += labels[labels != IGNORED_LABEL].tolist()
    samples = 13 if samples == 13 else N_SAMPLES
    global_batches = -(-samples // 8)  # of eight: three of all 23 samples
    assert lengths == {global_batches * 8 // dp_size // 2}
    assert sorted(seen) == list(range(1, samples * SEQ_LEN + 1))


def test_batches_have_the_promised_types_and_no_document_fields_without_a_mask() -> None:
    batch = next(iter(_loader()))
    assert {name: values.dtype for name, values in batch.items()} == {
        "tokens": torch.int64, "labels": torch.int64, "positions": torch.int64, "documents": torch.int32,
    }  # fmt: skip
    assert all(values.shape == (2, SEQ_LEN) for values in batch.values())
    batch = next(iter(_loader(document_mask=False)))
    assert batch["positions"] is None and batch["documents"] is None


def test_padding_uses_the_pad_id() -> None:
    batch = next(iter(_loader(packing=False, seq_len=9, pad_id=5, shuffle=False)))
    assert batch["tokens"][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 5]
    batch = next(iter(_loader(packing=False, seq_len=9, pad_id=None, shuffle=False)))
    assert batch["tokens"][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0]


def test_a_worker_that_is_not_forked_gets_a_name_and_not_the_tokens(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a" * 50_000)
    corpus = tokenize_corpus(
        Corpus("text", (file,), "text"), ByteTokenizer(), cache_folder=tmp_path / "cache", progress=False
    )
    for data in (corpus, [MixturePart("a", 1, corpus), MixturePart("b", 1, corpus)]):
        dataset = _loader(data)._data.dataset
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 2000
        copy = pickle.loads(pickled)  # noqa: S301 (our own bytes)
        assert torch.equal(copy[[3]]["tokens"], dataset[[3]]["tokens"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_id_that_no_tokenizer_gave_is_refused_before_the_model_sees_it(num_workers: int) -> None:
    sound = _corpus()
    batches = iter(_loader(replace(sound, n_words=int(sound.tokens.max()) + 1), num_workers=num_workers))
    assert len([next(batches) for _ in range(12)]) == 12  # an epoch
    damaged = replace(sound, n_words=int(sound.tokens.max()))
    with pytest.raises(DataError, match=r"contains the id 92, .* 92 tokens\n  fix:  .*prepare-data --verify"):
        for _ in islice(_loader(damaged, num_workers=num_workers, shuffle=False), 12):
            pass
