"""Whatever a file holds that users hand in, a program ends with 0, 2 or 3 and one message, soon.

Each format is tried with changes to a sound file, by the programs that read it. A failure names the seed.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.checkpoint.tampering import seal
from tests.mutations import (
    Mutation,
    change_bytes,
    change_either,
    change_header,
    change_manifest,
    change_pth,
    change_text,
)
from tests.sound_files import SHAPE, TOKENIZER, build_cache, make_all, run_flags
from toolkit.cli import run_command
from toolkit.data.chat import render
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import ToolkitError, report
from toolkit.preflight import __main__ as preflight

SECONDS = 5.0
"""Time of a processor within which the preflight answers on any input of 10 MB."""
PATIENCE = 100.0
"""Seconds of the clock for the same, which ends what waits for ever: machines of tests do other things."""
CODES: list[int] = []
"""With which programs have ended."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise in what takes more of a processor, its ended children's time included, or waits for ever."""

    def late(number: int, _: object) -> None:
        raise TimeoutError(f"not done after {seconds} s of a processor or {PATIENCE} s ({number})")

    def used() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    timers = [
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, PATIENCE),
    ]
    before, begin = [signal.signal(number, late) for _, number, _ in timers], used()
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
    assert used() - begin <= seconds


def ended(program: str | Callable[[list[str]], int], *words: object) -> str:
    """Run a command or a function and see that it ends as it should; what it printed."""
    if isinstance(program, str):
        program = partial(run_command, program)
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), at_most(SECONDS):
        try:
            code = program([str(word) for word in words])
        except SystemExit as end:  # argparse
            code = end.code
    assert code in (0, 2, 3), (code, output.getvalue())
    CODES.append(code)
    assert "Traceback" not in output.getvalue()
    return output.getvalue()


def guarded(use: Callable[[], object]) -> Callable[[list[str]], int]:
    """Do what a program does around its work."""

    def program(_: list[str]) -> int:
        try:
            use()
        except ToolkitError as error:
            return report(error, show=True)
        return 0

    return program


# ---- what reads each format


def use_hf(folder: Path) -> None:
    assets = [f"--model.hf_assets_path={folder}/hf"]
    ended(
        preflight.main, *run_flags(folder, *assets, "--checkpoint.enable", "--checkpoint.initial_load_in_hf")
    )
    ended("convert", "hf-to-dcp", folder / "hf", folder / "made", "--dry-run")


def use_meta(folder: Path) -> None:
    ended("convert", "meta-to-hf", folder / "meta", folder / "made", "--dry-run")


def use_tokenizer(folder: Path) -> None:
    place = folder / "tokenizer"
    ended(preflight.main, *run_flags(folder, f"--model.hf_assets_path={place}"))

    def encode() -> None:
        tokenizer = load_tokenizer(place)
        ids = tokenizer.encode(
            "Some words, 12 of them: they're\n\n  here <|eot_id|> \ud800", bos=tokenizer.adds_bos
        )
        tokenizer.decode(ids)

    ended(guarded(encode))


def use_template(folder: Path) -> None:
    def talk() -> None:
        messages = [{"role": "user", "content": "Hi <s>"}]
        for name in ("tokenizer", "templated"):
            chat_format(load_tokenizer(folder / name)).encode(messages)

    with mock.patch.object(render, "SECONDS", 1), mock.patch.object(render, "SECONDS_TO_COMPILE", 1):
        ended(guarded(talk))


def use_checkpoint(folder: Path) -> None:
    run = folder / "run"
    flags = [f"--model.hf_assets_path={folder}/hf", "--checkpoint.enable", f"--job.dump_folder={run}"]
    flags += [f"--model.{key}={value}" for key, value in SHAPE.items()]
    ended(preflight.main, *run_flags(folder, *flags))
    listed = ended("checkpoint", "list", run)
    assert "        1  2026" in listed, "the sound checkpoint is there"
    for words in (["verify"], ["prune", "--keep-latest", "1", "--dry-run"]):
        ended("checkpoint", words[0], run, *words[1:])
    ended("checkpoint", "inspect", run / "checkpoint/step-2", "--tensors")
    two = run / "checkpoint/step-2", run / "checkpoint/step-1"

    def compare(words: list[str]) -> int:
        code = run_command("checkpoint", words)
        return 0 if code == 1 else code  # 1: they differ

    ended(compare, "diff", *two)
    ended("convert", "dcp-to-hf", run / "checkpoint/step-2", folder / "made", "--dry-run")


def use_corpus(name: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        flags = [f"--training.dataset_path={folder}/{name}", f"--model.hf_assets_path={TOKENIZER}"]
        ended(preflight.main, *run_flags(folder, *flags))
        ended("prepare-data", *run_flags(folder, *flags), "--processes", "1")

    return use


def use_cache(folder: Path) -> None:
    ended(guarded(lambda: build_cache(folder)))


def use_adapter(folder: Path) -> None:
    place = folder / "adapter"
    flags = [f"--model.hf_assets_path={folder}/hf", "--checkpoint.enable", f"--finetune.adapter_path={place}"]
    flags += ["--finetune.adapter=lora", "--finetune.lora.rank=2", "--finetune.lora.alpha=4"]
    ended(preflight.main, *run_flags(folder, *flags, "--checkpoint.initial_load_in_hf"))
    ended("convert", "merge", folder / "hf", place, folder / "made", "--dry-run")


def use_toml(folder: Path) -> None:
    ended(preflight.main, folder / "run.toml")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound file of each format."""
    folder = tmp_path_factory.mktemp("sound")
    make_all(folder)
    return folder


# ---- formats


@dataclass(frozen=True)
class Format:
    """A format: the file that is changed, how, and what reads it."""

    file: str
    change: Mutation
    use: Callable[[Path], None]
    seal: bool = False
    prepare: Callable[[Path], None] = lambda folder: None


FORMATS = {
    "config.json": Format("hf/config.json", change_either, use_hf),
    "safetensors index": Format("hf/model.safetensors.index.json", change_either, use_hf),
    "safetensors header": Format("hf/a.safetensors", change_header, use_hf),
    "adapter_config.json": Format("adapter/adapter_config.json", change_either, use_adapter),
    "adapter_model.safetensors": Format("adapter/adapter_model.safetensors", change_header, use_adapter),
    "params.json": Format("meta/params.json", change_either, use_meta),
    "pth": Format("meta/consolidated.00.pth", change_pth, use_meta),
    "tokenizer.model": Format("hf/tokenizer.model", change_bytes, use_hf),
    "tokenizer.json": Format("tokenizer/tokenizer.json", change_either, use_tokenizer),
    "tokenizer_config.json": Format("tokenizer/tokenizer_config.json", change_either, use_tokenizer),
    "template in tokenizer_config.json": Format(
        "tokenizer/tokenizer_config.json", change_either, use_template
    ),
    "chat_template.jinja": Format("templated/chat_template.jinja", change_text, use_template),
    "manifest": Format("run/checkpoint/step-2/manifest.json", change_manifest, use_checkpoint),
    "metadata": Format("run/checkpoint/step-2/.metadata", change_bytes, use_checkpoint, seal=True),
    "tensors": Format("run/checkpoint/step-2/__0_0.distcp", change_bytes, use_checkpoint, seal=True),
    "token cache": Format("cache/tokens/*/meta.json", change_either, use_cache),
    "hash records": Format("cache/hashes/*.json", change_either, use_cache, prepare=use_cache),
    "JSON lines": Format("rows.jsonl", change_either, use_corpus("rows.jsonl")),
    "Parquet": Format("rows.parquet", change_bytes, use_corpus("rows.parquet")),
    "TOML": Format("run.toml", change_text, use_toml),
}


FOUND = {"safetensors index": [54], "adapter_model.safetensors": [268, 754]}
"""Seeds that have once ended in a traceback."""


def try_format(name: str, sound: Path, folder: Path, seeds: Iterable[int]) -> None:
    form = FORMATS[name]
    for seed in seeds:
        chance = random.Random(f"{name} {seed}")
        place = folder / "here"
        shutil.copytree(sound, place)
        form.prepare(place)
        file = max(place.glob(form.file), key=lambda path: path.stat().st_mtime_ns)
        content = file.read_bytes()
        if name == "JSON lines":
            lines = content.splitlines(keepends=True)
            at = chance.randrange(len(lines))
            lines[at] = form.change(lines[at], chance) + b"\n"
            changed = b"".join(lines)
        else:
            changed = form.change(content, chance)
        file.write_bytes(changed)
        if form.seal:
            seal(file.parent)
        try:
            form.use(place)
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: {changed[:2000]!r}")
            raise
        shutil.rmtree(place)


@pytest.mark.parametrize("name", FORMATS)
def test_sound_files_are_read(name: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "here")
    CODES.clear()
    FORMATS[name].use(tmp_path / "here")
    assert set(CODES) == {0}


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_file_holds(name: str, sound: Path, tmp_path: Path) -> None:
    try_format(name, sound, tmp_path, [*range(30), *FOUND.get(name, ())])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_file_holds_at_length(name: str, sound: Path, tmp_path: Path) -> None:
    try_format(name, sound, tmp_path, range(30, 1000))
