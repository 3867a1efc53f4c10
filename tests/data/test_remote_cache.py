"""Token caches in object storage: the samples of a local cache, nothing kept, nothing that is not whole."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.chat_data import ASSETS, write_rows
from tests.helpers import run_world
from tests.s3_server import Server, running_here
from tests.training import small_config, small_trainer
from toolkit.config.local_paths import expand_user
from toolkit.config.training import Data, DataLoader, Training
from toolkit.data import build_cache
from toolkit.data.batch_size import BatchShape
from toolkit.data.build_loader import build_loader
from toolkit.data.chat.sft import ChatOptions
from toolkit.data.chat.shapes import Shape
from toolkit.data.corpus import Corpus
from toolkit.data.dataloader import Loader
from toolkit.data.labeled_texts import LabeledTexts
from toolkit.data.run_data import RunData, from_text
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache, open_cache
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.storage import remote_path
from toolkit.storage.remote_calls import StorageError
from toolkit.storage.remote_path import RemotePath

SEQ_LEN = 16
KINDS = ("text", "messages", "weighted", "labels")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_here() as server:
        yield server


@pytest.fixture
def url(
    server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """A place of its own for each test, whose local cache is a new one, too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    server.requests()
    return f"s3://bucket/{request.node.name.translate(str.maketrans('[]- ', '____'))}"


def _corpus(folder: Path, kind: str = "text") -> Corpus:
    """Some documents, conversations or texts with a class."""
    generator = random.Random(4)
    texts = ["word " * generator.randint(1, 12) for _ in range(40)]
    if kind == "text":
        file = write_rows(folder / "text.jsonl", [{"text": text} for text in texts])
        return Corpus("corpus", (file,), "text")
    if kind == "labels":
        rows = [{"text": text, "label": index % 3} for index, text in enumerate(texts)]
        shape: Any = LabeledTexts("text", "label", ("a", "b", "c"))
        return Corpus("corpus", (write_rows(folder / "labels.jsonl", rows),), "text", shape=shape)
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    weights: dict[str, Any] = {"weight": 0.5} if kind == "weighted" else {}
    file = write_rows(folder / f"{kind}.jsonl", [{"messages": turn, **weights} for turn in turns])
    return Corpus("corpus", (file,), "text", shape=Shape("messages"))


def _tokenized(source: Corpus, place: str | Path, **options: Any) -> TokenCache:
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    return tokenize_corpus(
        source, tokenizer, cache_folder=place, progress=False, chat=ChatOptions(), **options
    )


def _batches(cache: TokenCache, *, workers: int = 0, packing: bool = True) -> list[dict[str, torch.Tensor]]:
    """The first batches of a run."""
    loader = _loader(cache, workers=workers, packing=packing)
    taken = iter(loader)
    return [{name: value for name, value in batch.items() if value is not None}
            for batch, _ in zip(taken, range(4), strict=False)]  # fmt: skip


def _loader(cache: TokenCache, *, workers: int = 0, packing: bool = True) -> Loader:
    training = Training(seq_len=SEQ_LEN, dataloader=DataLoader(num_workers=workers))
    shape = BatchShape(total=4, local=4, accumulation=1)
    return build_loader(cache, training, Data(packing=packing), shape, pad_id=None, dp_rank=0, dp_size=1)


def _same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_a_local_cache(url: str, kind: str, tmp_path: Path) -> None:
    source = _corpus(tmp_path, kind)
    local, remote = _tokenized(source, tmp_path / "cache"), _tokenized(source, url)
    assert remote.fingerprint == local.fingerprint
    names = {path.name for path in local.folder.iterdir()}
    assert names == {path.name for path in RemotePath(str(remote.folder)).iterdir()}
    for name in names - {"meta.json"}:
        assert (remote.folder / name).read_bytes() == (local.folder / name).read_bytes()
    for packing in (True, False):
        expected = _batches(local, packing=packing)
        _same(_batches(remote, packing=packing), expected)
        _same(_batches(remote, packing=packing, workers=2), expected)
    assert list(_loader(remote).conversations()) == list(_loader(local).conversations())


def test_another_start_reads_ranges_and_keeps_what_is_small(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _corpus(tmp_path)
    built = _tokenized(source, url)
    assert sum("tokens.bin" in line for line in server.requests() if line.startswith("PUT")) == 1
    monkeypatch.setenv("HOME", str(tmp_path / "another machine"))
    cache = pickle.loads(pickle.dumps(_tokenized(source, url)))  # noqa: S301
    _same(_batches(cache), _batches(built))
    assert not [line for line in server.requests() if line.startswith("PUT")]
    kept = [path for path in (tmp_path / "another machine").rglob("*") if path.is_file()]
    assert sorted(path.name for path in kept if path.parent.name == built.folder.name) == ["offsets.bin"]
    assert not any(path.name == "tokens.bin" for path in kept)
    again = from_text(RunData(260, None, {"training": cache}).text()).caches["training"]
    assert again.fingerprint == built.fingerprint


def test_a_build_that_fails_leaves_no_cache(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _corpus(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(remote_path, "TRIES", 1)
        server.fail("PUT", "meta.json", status=503)
        with pytest.raises(StorageError, match=r"meta.json cannot be used: it did not answer"):
            _tokenized(source, url)
    assert [path.name for path in expand_user(url).glob("tokens/*/*")] == ["offsets.bin", "tokens.bin"]
    source.files[0].write_text("\n")
    with pytest.raises(DataError, match="contains no text"):
        _tokenized(source, url)
    [folder] = expand_user(url).glob("tokens/*")  # that of before
    assert not (folder / "meta.json").exists()


def test_what_a_killed_build_left_is_built_over(url: str, tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    built = _tokenized(source, url)
    content = (built.folder / "tokens.bin").read_bytes()
    (built.folder / "meta.json").unlink()
    with RemotePath(str(built.folder / "tokens.bin")).open("wb") as file:
        file.write(content[:-2])
    with pytest.raises(FileNotFoundError):
        open_cache(built.folder)
    assert (_tokenized(source, url).folder / "tokens.bin").read_bytes() == content


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_damage_is_found_and_built_again(
    url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _corpus(tmp_path)
    built = _tokenized(source, url)
    content = bytearray((built.folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    with RemotePath(str(built.folder / name)).open("wb") as file:
        file.write(content)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        open_cache(built.folder)
    assert (_tokenized(source, url).folder / name).read_bytes() != content
    copy = Path.home() / ".cache/llama-toolkit/remote" / built.folder.name / "offsets.bin"
    copy.write_bytes(bytes(len(copy.read_bytes())))
    assert open_cache(built.folder).offsets[-1] == built.n_tokens


def test_a_store_that_fails_meanwhile_is_asked_again_and_one_that_is_gone_named(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _corpus(tmp_path)
    remote, local = _tokenized(source, url), _tokenized(source, tmp_path / "cache")
    server.fail("GET", "tokens.bin", status=503, times=3)
    server.fail("GET", "tokens.bin", hang_up=True, times=2)
    _same(_batches(remote), _batches(local))
    with RemotePath(str(remote.folder / "tokens.bin")).open("wb") as file:
        file.write((local.folder / "tokens.bin").read_bytes()[:-200])
    for _ in range(2):
        with pytest.raises(DataError, match=r"tokens.bin (was removed or replaced while|.* InvalidRange)"):
            list(islice(_loader(remote), 20))
        RemotePath(str(remote.folder / "tokens.bin")).unlink()


def test_a_url_without_the_store_is_told_in_one_message(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked once, and no text is tokenized for it."""
    source = _corpus(tmp_path)
    monkeypatch.setattr(build_cache, "build_cache", None)
    with pytest.raises(StorageError, match=r"the bucket does not exist\n  fix:  create it"):
        _tokenized(source, "s3://other-bucket/tokens")


def _train(folder: str, place: str, environment: dict[str, str]) -> list[float]:
    os.environ.update(environment)  # ranks begin with that of the process that forks them
    config = small_config(
        folder,
        data={"cache_folder": place},
        training={"steps": 4},
        validation={"enable": True, "freq": 4, "samples": 4},
    )
    trainer = small_trainer(config)
    trainer.train()
    return [record.get("loss") or record["validation_loss"] for record in trainer.history]


def test_a_run_has_the_losses_of_a_local_cache(server: Server, url: str, tmp_path: Path) -> None:
    """By the trainer, with the tokens of the training and of a validation in object storage."""
    [local] = run_world(_train, 1, str(tmp_path / "local"), str(tmp_path / "cache"), {})
    environment = server.environment | {"HOME": str(Path.home())}
    losses, _ = run_world(_train, 2, str(tmp_path / "remote"), url, environment)
    np.testing.assert_allclose(losses, local, rtol=1e-6)  # two ranks round sums of fp32 otherwise
    assert len(local) == 5
    [_] = expand_user(url).glob("tokens/*/meta.json")  # both are of one text here
