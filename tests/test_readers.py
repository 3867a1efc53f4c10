"""Whatever a file holds that users hand in, a program ends with 0, 2 or 3 and one message, soon.

Each format is tried with changes to a sound file, by the programs that read it. A failure names the seed.
"""

# ruff: noqa: E501
from __future__ import annotations

import io
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoint.tampering import seal
from tests.mutations import Mutation, change_bytes, change_either
from toolkit.checkpoint.manifest import MANIFEST, build_manifest
from toolkit.config import load_config
from toolkit.data import content_hash
from toolkit.data.build import open_data
from toolkit.data.chat import render
from toolkit.data.chat.formats import chat_format
from toolkit.data.tokenizers.tokenizer import load_tokenizer
from toolkit.errors import ToolkitError, report
from toolkit.preflight import __main__ as preflight
from tools import checkpoint, convert_weights, make_random_model, prepare_data

SECONDS = 10.0
"""Within which the preflight answers on any input of 10 MB; what is changed here is far smaller,
and machines of tests are busy."""
CODES: list[int] = []
"""With which programs have ended."""
TOKENIZER = Path(__file__).parent / "assets" / "tokenizer"
SHAPE = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 16, "vocab_size": 4352}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise in what takes longer, also while it waits in a system call."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ended(program: Callable[[list[str]], int], *words: object) -> str:
    """Run a program and see that it ends as it should; what it printed."""
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


def _config(folder: Path, *flags: object) -> list[object]:
    return [
        f"--job.dump_folder={folder}/out", f"--data.cache_folder={folder}/cache",
        "--training.dataset=embedded_validation", "--training.seq_len=64", "--training.global_batch_size=8", *flags,
    ]  # fmt: skip


def use_hf(folder: Path) -> None:
    assets = [f"--model.hf_assets_path={folder}/hf"]
    ended(preflight.main, *_config(folder, *assets, "--checkpoint.enable", "--checkpoint.initial_load_in_hf"))
    ended(convert_weights.main, "hf-to-dcp", folder / "hf", folder / "made", "--dry-run")


def use_meta(folder: Path) -> None:
    ended(convert_weights.main, "meta-to-hf", folder / "meta", folder / "made", "--dry-run")


def use_tokenizer(folder: Path) -> None:
    place = folder / "tokenizer"
    ended(preflight.main, *_config(folder, f"--model.hf_assets_path={place}"))

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

    with mock.patch.object(render, "SECONDS", 2.0):
        ended(guarded(talk))


def use_checkpoint(folder: Path) -> None:
    run = folder / "run"
    flags = [f"--model.hf_assets_path={folder}/hf", "--checkpoint.enable", f"--job.dump_folder={run}"]
    flags += [f"--model.{key}={value}" for key, value in SHAPE.items()]
    ended(preflight.main, *_config(folder, *flags))
    listed = ended(checkpoint.main, "list", run)
    assert "        1  2026" in listed, "the sound checkpoint is there"
    for words in (["verify"], ["prune", "--keep-latest", "1", "--dry-run"]):
        ended(checkpoint.main, words[0], run, *words[1:])
    ended(checkpoint.main, "inspect", run / "checkpoint/step-2", "--tensors")
    two = run / "checkpoint/step-2", run / "checkpoint/step-1"
    ended(lambda words: {1: 0}.get(code := checkpoint.main(words), code), "diff", *two)  # 1: they differ
    ended(convert_weights.main, "dcp-to-hf", run / "checkpoint/step-2", folder / "made", "--dry-run")


def use_corpus(name: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        flags = [f"--training.dataset_path={folder}/{name}", f"--model.hf_assets_path={TOKENIZER}"]
        ended(preflight.main, *_config(folder, *flags))
        ended(prepare_data.main, *_config(folder, *flags), "--processes", "1")

    return use


def use_cache(folder: Path) -> None:
    flags = _config(
        folder, f"--training.dataset_path={folder}/rows.jsonl", f"--model.hf_assets_path={TOKENIZER}"
    )
    ended(guarded(lambda: open_data(load_config([str(flag) for flag in flags]), progress=True)))


def use_toml(folder: Path) -> None:
    ended(preflight.main, folder / "run.toml")


# ---- sound files


def small_tokenizer_json() -> bytes:
    """A tokenizer.json with each kind of part, and as few tokens as that takes."""
    letters = {chr(code): number for number, code in enumerate(range(33, 127))}
    words = {**letters, "Ġ": 94, "Ċ": 95, "th": 96}
    special = [
        {
            "id": 97 + number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for number, name in enumerate(("<s>", "</s>"))
    ]  # fmt: skip
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"Regex": "x{2,9}"}, "content": "x"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|\\w+"}, "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [97], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": words, "merges": [["t", "h"]],
        },
    }  # fmt: skip
    return json.dumps(parts).encode()


TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "added_tokens_decoder": {
        "97": {"content": "<s>", "special": True},
        "98": {"content": "</s>", "special": True},
    },
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "chat_template": "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "model_max_length": 10**30,
}
TEMPLATE = """{%- if not date is defined %}{% set date = strftime_now("%d %b %Y") %}{% endif %}
{{- bos_token }}{% for message in messages %}{% if message.role not in ['user', 'assistant', 'system'] %}
{{ raise_exception("no such role") }}{% endif %}{{ '[' ~ message.role | upper ~ ']' }} {{ message['content'] | trim }}
{%- endfor %}{% if add_generation_prompt %}{{ '[ASSISTANT]' * 1 }}{% endif %}
{% macro f(n) %}{{ n }}{% endmacro %}{{ f(range(3) | list | tojson) }}
"""
RUN_TOML = """# a run
extends = "base.toml"

[model]
name = "llama3"
flavor = "debugmodel"
n_layers = 2
dim = 64

[training]
seq_len = 64
global_batch_size = 8
local_batch_size = 4
steps = 10

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[optimizer]
lr = 1e-3

[data.mixture.books]
dataset = "embedded"
weight = 2.5
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sound file of each format."""
    folder = tmp_path_factory.mktemp("sound")
    shape = [word for key, value in SHAPE.items() for word in ("--set", f"{key}={value}")]
    hf = folder / "hf"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        random_model = [
            str(hf),
            "--name",
            "llama3",
            "--flavor",
            "debugmodel",
            "--tokenizer",
            str(TOKENIZER),
            *shape,
        ]
        assert make_random_model.main(random_model) == 0
        assert convert_weights.main(["hf-to-meta", str(hf), str(folder / "meta")]) == 0
        for step in (1, 2):
            made = folder / "run/checkpoint" / f"step-{step}"
            assert convert_weights.main(["hf-to-dcp", str(hf), str(made)]) == 0
            as_saved_by_a_run(made)
    (hf / "model.safetensors").rename(hf / "a.safetensors")
    header = (hf / "a.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names.keys() - {"__metadata__"}, "a.safetensors"),
    }
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_bytes(small_tokenizer_json())
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    shutil.copytree(folder / "tokenizer", folder / "templated")
    (folder / "templated/chat_template.jinja").write_text(TEMPLATE)
    rows = [{"text": f"Row {number} has words.", "title": "é" * number, "n": number} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(rows)
    arrow.parquet.write_table(table, folder / "rows.parquet")
    with (
        arrow.OSFile(str(folder / "rows.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (folder / "run.toml").write_text(RUN_TOML)
    (folder / "base.toml").write_text("[metrics]\nlog_freq = 2\n")
    with mock.patch.object(content_hash, "SETTLED_SECONDS", -1.0):  # what is so young is remembered, too
        use_cache(folder)
        yield folder


def as_saved_by_a_run(step: Path) -> None:
    """Have a checkpoint tell of a run that goes on, as those of the trainer do."""
    manifest = json.loads((step / MANIFEST).read_text())
    flags = _config(Path("somewhere"), *(f"--model.{key}={value}" for key, value in SHAPE.items()))
    run = manifest["run"] | {
        "model_only": False,
        "config": load_config([str(flag) for flag in flags]).to_toml(),
        "data_parallel_degree": 1,
        "global_batch_size": 8,
        "id": "0",
        "tokens": 512,
        "schedule_start": 0,
        "best_validation": None,
        "loader": {"samples": 8, "corpus": "0", "seq_len": 64, "packing": True, "shuffle": True, "seed": 0},
    }
    (step / MANIFEST).write_text(json.dumps(manifest | {"run": run}))
    seal(step)


# ---- formats


def change_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header, of the right length as often as not."""
    length = int.from_bytes(content[:8], "little")
    header = change_either(content[8 : 8 + length], chance)
    told = len(header) if chance.random() < 0.8 else chance.choice((0, 7, length, 10**9, 2**63))
    return told.to_bytes(8, "little") + header + content[8 + length :]


def change_pth(content: bytes, chance: random.Random) -> bytes:
    """A file of torch.save with other tensors under other names, or altered bytes."""
    if chance.random() < 0.4:
        return change_bytes(content, chance)
    held = torch.load(io.BytesIO(content), weights_only=True)
    name = chance.choice(list(held))
    tensor = held[name]
    other: list[Callable[[], Any]] = [
        lambda: tensor.flatten(),
        lambda: tensor.to(chance.choice((torch.int8, torch.float64, torch.complex64))),
        lambda: tensor.to_sparse(),
        lambda: tensor.t() if tensor.dim() == 2 else tensor[None],
        lambda: tensor[..., ::2],
        lambda: tensor[:0],
        lambda: tensor.sum(),
        lambda: chance.choice((None, 1, "a", [tensor], {"a": tensor}, torch.Size([1]))),
        lambda: torch.nn.Parameter(tensor),
    ]
    match chance.randrange(5):
        case 0:
            held[chance.choice((1, None, "", 1.5, "a" * 5000, name.upper(), "layers.²."))] = held.pop(name)
        case 1:
            del held[name]
        case _:
            held[name] = chance.choice(other)()
    written = io.BytesIO()
    torch.save(held, written)
    return written.getvalue()


def change_manifest(content: bytes, chance: random.Random) -> bytes:
    """A manifest whose digest fits what it says, as often as not."""
    changed = change_either(content, chance)
    try:
        found = json.loads(changed)
        made = build_manifest(
            step=found["step"], files=found["files"], tensor_count=0, tensor_bytes=0, run=found["run"]
        )
        made |= {"tensors": found["tensors"]}
        return json.dumps(made).encode() if chance.random() < 0.7 else changed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return changed


def change_text(content: bytes, chance: random.Random) -> bytes:
    """A TOML file or a template with other values, lines and expressions."""
    text = content.decode()
    for _ in range(chance.choice((1, 1, 2))):
        lines = text.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        match chance.randrange(5):
            case 0:
                lines.insert(at, chance.choice(lines))
            case 1:
                lines[at] = lines[at].partition("=")[0] + "= " + chance.choice(_TOML) + "\n"
            case 2:
                lines[at] = "{{ " + chance.choice(_EXPRESSIONS) + " }}\n"
            case 3:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
            case _:
                lines[at : at + 1] = [change_bytes(lines[at].encode(), chance).decode("latin-1")]
        text = "".join(lines)
    return text.encode("utf-8", "replace")


_TOML = [
    "9" * 5000, "1000000", "1000000000", "-1", "0", "inf", "nan", '"x"', "true", "[]", "[1, 2]", "[[1], [2]]", "{}",
    "{a = 1}", '"' + "a" * 5000 + '"', '"\\u0000"', '"None"', "1979-05-27", "[" * 3000 + "]" * 3000, "1e400", '"""' + "x\n" * 400 + '"""',
]  # fmt: skip
_EXPRESSIONS = [
    "range(10**10) | list", "'a' * 10**10", "lipsum(10**9)", "[1] * 10**9", "10 ** 10 ** 10", "'%10000000000d' % 1",
    "'a'.center(10**10)", "messages.append(1)", "raise_exception(1)", "1 // 0", "undefined.a.b", "f(f)", "caller()",
    "self", "''.__class__.__mro__", "[[1]] | slice(10**9) | list", "messages | batch(10**10) | list", "x.y.z()",
    "'a' | indent(10**10)", "bos_token | tojson", "cycler() | list", "{} | tojson(indent=10**9)", "namespace(a=1).b.c",
]  # fmt: skip


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


def try_format(name: str, sound: Path, folder: Path, seeds: range) -> None:
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
    try_format(name, sound, tmp_path, range(30))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_file_holds_at_length(name: str, sound: Path, tmp_path: Path) -> None:
    try_format(name, sound, tmp_path, range(30, 1000))
