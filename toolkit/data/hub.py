"""Hugging Face datasets: folders of ``save_to_disk``, and datasets of the Hub. Needs the extra ``hf``.

Both kinds of dataset are lists of Arrow files. A folder of ``save_to_disk`` is read without the package
``datasets``. That package downloads a dataset of the Hub once, in one process, to its cache:

    <cache folder>/hub/<request>.json    the downloaded files, and the fingerprint of the revision

This record then represents the dataset. Later starts need neither the network nor the package, and no files
once the tokens are built. To query the Hub again, remove the record. Code of a dataset is never executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from toolkit.config.local_paths import expand_user
from toolkit.data.content_hash import remember, say, too_large
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import SUFFIXES, RowShape, SourceError, kind, require
from toolkit.data.folder_files import no_split
from toolkit.errors import DataError, Problem, install_command, quote
from toolkit.io.json_fields import read_object
from toolkit.io.locks import waiting_lock

KNOWN = {"c4": ("allenai/c4", "en")}
_ID = re.compile(r"[\w.-]+/[\w.-]+")


def saved_files(folder: Path, split: str | None) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the Arrow files of a folder written by ``save_to_disk``, and its splits if it has several."""
    splits: list[str] = []
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = read_object(folder / "dataset_dict.json")["splits"]
            if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
                raise ValueError("its splits are not names")
            if split is None or split not in splits:
                raise no_split(str(folder), split, splits)
            folder = folder / split
        state = read_object(folder / "state.json")
        names = [entry["filename"] for entry in state["_data_files"]]
        if strange := [name for name in names if name != Path(name).name or not name.endswith(".arrow")]:
            raise ValueError(f"{quote(strange[0])} is not an Arrow file next to its state.json")
        files = [folder / name for name in names]
    except SourceError:
        raise
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        rule = f"{folder} is not a complete dataset of save_to_disk: {error}"
        raise SourceError(Problem(rule, "save it again", "dataset_path", str(folder))) from error
    for file in files:
        if not os.path.isfile(file):
            rule = f"{quote(str(file), str)}, written by save_to_disk, is missing"
            raise SourceError(Problem(rule, "copy the folder again", "dataset_path", str(folder)))
    return tuple(files), tuple(splits)


def hub_dataset(
    name: str, text_column: str, subset: str | None, split: str, shape: RowShape | None = None
) -> HubSource:
    """Return a dataset of the Hub, or one of :data:`KNOWN`, without network access.

    Raises:
        SourceError: The name is invalid or names a local file, or the package is missing.
    """
    if expand_user(name).exists():
        rule = "this is a local file or folder, but dataset is the name of a corpus"
        raise SourceError(Problem(rule, f"set dataset_path = {name!r}", "dataset", name))
    require("datasets", "a dataset of the Hugging Face Hub", "dataset", name)
    owner_and_name, known_subset = KNOWN.get(name, (name, None))
    if not _ID.fullmatch(owner_and_name):
        rule = "a dataset of the Hugging Face Hub has a name of the form owner/name"
        raise SourceError(Problem(rule, "correct it; use dataset_path for local files", "dataset", name))
    return HubSource(owner_and_name, (), text_column, shape=shape, subset=subset or known_subset, split=split)


@dataclass(frozen=True)
class HubSource(Corpus):
    """A dataset of the Hub. The dataset has no files until it is fetched."""

    subset: str | None = None
    split: str = "train"

    @property
    def choices(self) -> set[str]:
        return {"subset", "split"}

    def fetch(self, cache_folder: Path, *, progress: bool, max_bytes: float, again: bool) -> Corpus:
        """Return the corpus with its Arrow files, downloaded if no record of them exists, or ``again``.

        Raises:
            DataError: The dataset, its subset or its split does not exist, the network or package is missing,
                or the dataset is larger than ``max_bytes``, if the Hub knows its size.
        """
        request = json.dumps([self.name, self.subset, self.split])
        record = cache_folder / "hub" / f"{hashlib.sha256(request.encode()).hexdigest()[:32]}.json"
        entry = _read(record)
        if entry is None or again:
            record.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(
                record.with_suffix(".lock"), f"downloading {self.name}", lambda text: say(progress, text)
            ):
                entry = _read(record)
                if entry is None or not all(map(os.path.exists, entry["files"])):
                    entry = _download(self, record.with_suffix(""), progress, max_bytes)
                    remember(record, entry)
        files = tuple(map(Path, entry["files"]))
        identity = f"{request} {entry['fingerprint']}"
        return Corpus(self.name, files, self.text_column, identity=identity, shape=self.shape)

    def remote(self) -> Corpus:
        """Return the corpus as files on the Hub, without downloading them.

        Raises:
            DataError: As in :meth:`fetch`, or the dataset is neither JSON lines nor Parquet.
        """
        try:
            import datasets

            builder = datasets.load_dataset_builder(self.name, self.subset)
            urls = [str(url) for url in (builder.config.data_files or {}).get(self.split) or []]
        except Exception as error:  # any error of the package or its HTTP client
            raise _cannot_fetch(self, error) from error
        if not urls or not all(url.endswith(SUFFIXES) and kind(Path(url)) != "text" for url in urls):
            rule = f"{_title(self)} has no JSON or Parquet files on the Hub to stream"
            raise DataError(f"{rule}\n  fix:  correct dataset_split, or set data.streaming = false")
        from toolkit.data.remote_text import RemoteText

        files = cast(tuple[Path, ...], tuple(map(RemoteText, urls)))  # each URL contains the revision
        return Corpus(self.name, files, self.text_column, shape=self.shape)


def _read(record: Path) -> dict[str, Any] | None:
    with contextlib.suppress(DataError):
        entry = read_object(record)
        files, fingerprint = entry.get("files"), entry.get("fingerprint")
        if (
            isinstance(fingerprint, str)
            and isinstance(files, list)
            and all(isinstance(f, str) for f in files)
        ):
            return entry
    return None


def _download(source: HubSource, folder: Path, progress: bool, max_bytes: float) -> dict[str, Any]:
    """Download a dataset and return its record. Files are in the cache of ``datasets``, slices in
    ``folder``."""
    try:
        import datasets
    except ImportError as error:
        rule = f"fetching {_title(source)} needs the package datasets, which is not installed"
        raise DataError(f"{rule}\n  fix:  {install_command('hf')}") from error

    # Versions before 4 would run a dataset's script if the environment allowed it.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    if not progress:
        datasets.disable_progress_bars()
    say(progress, f"fetching {_title(source)} from the Hugging Face Hub")
    try:
        builder = datasets.load_dataset_builder(source.name, source.subset)
        announced = (builder.info.splits or {}).get(source.split)
        _check_size(source, announced.num_bytes if announced else 0, max_bytes)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=source.split)
    except DataError:
        raise
    except Exception as error:  # any error of the package, its HTTP client or the file system
        raise _cannot_fetch(source, error) from error
    files = [entry["filename"] for entry in dataset.cache_files]
    if not files or source.split not in builder.info.splits:  # a slice such as train[:1%] is not whole files
        dataset.save_to_disk(folder)
        files = [str(path) for path in saved_files(folder, source.split)[0]]
    return {"dataset": _title(source), "fingerprint": dataset._fingerprint, "files": files}


def _check_size(source: HubSource, n_bytes: int, max_bytes: float) -> None:
    if problem := too_large(n_bytes, max_bytes):
        raise DataError(f"{_title(source)}: {problem}")


def _title(source: HubSource) -> str:
    return " ".join(part for part in (source.name, source.subset, f"({source.split})") if part)


def _cannot_fetch(source: HubSource, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError) or "connect" in reason.lower():
        fix = (
            "run `llama-toolkit prepare-data` on a machine with network access and the same "
            "data.cache_folder, or "
            "set dataset_path to a local copy"
        )
    elif isinstance(error, FileNotFoundError):
        fix = "correct dataset (owner/name); for a private one, first log in with `hf auth login`"
    elif isinstance(error, ValueError):
        fix = "correct dataset_subset or dataset_split"
    else:
        fix = "set dataset_path to a local copy: .jsonl or .parquet files, or a folder of save_to_disk"
    return DataError(f"{_title(source)} cannot be fetched from the Hugging Face Hub: {reason}\n  fix:  {fix}")
