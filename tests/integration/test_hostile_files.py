"""Files that somebody made to stop a program, or that are no files: a message in their place, soon."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.checkpoint.tampering import seal
from tests.integration.test_readers import FORMATS, ended, sound, use_checkpoint, use_hf, use_meta
from tests.sound_files import TOKENIZER, run_flags
from toolkit.checkpoint.manifest import MANIFEST
from toolkit.data.chat import render
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.sources import open_corpus
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.preflight import __main__ as preflight

__all__ = ["sound"]  # a fixture


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Path:  # noqa: F811
    shutil.copytree(sound, tmp_path / "here")
    return tmp_path / "here"


def last_checked(folder: Path, *flags: str) -> str:
    return ended(preflight.main, *run_flags(folder, *flags))


@pytest.mark.parametrize("name", FORMATS)
def test_a_fifo_in_the_place_of_a_file(name: str, place: Path) -> None:
    for file in place.glob(FORMATS[name].file):
        file.unlink()
        os.mkfifo(file)
    FORMATS[name].use(place)


def nested(depth: int) -> bytes:
    """Operations that make a tuple of two tuples of two tuples …, of which 2^depth are hashed as a key."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(depth))


INDEXES: dict[str, Callable[[], bytes]] = {
    "a key that takes for ever": lambda: b"\x80\x02}(" + nested(60) + b"K\x01u.",
    "a list of itself": lambda: b"\x80\x02]q\x00h\x00a.",
    "room for billions": lambda: b"\x80\x02}r\xff\xff\xff\x7f.",
    "a value that takes for ever": lambda: b"\x80\x02}(X\x01\x00\x00\x00a" + nested(60) + b"u.",
    "nested too deep": lambda: b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "code": lambda: pickle.dumps(os.getcwd),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_is_made_to_stop_its_reader(case: str, place: Path) -> None:
    step = place / "run/checkpoint/step-2"
    (step / ".metadata").write_bytes(INDEXES[case]())
    seal(step)
    use_checkpoint(place)
    assert f"{step / '.metadata'}" in ended("checkpoint", "verify", step)


def test_a_pth_that_is_made_to_stop_its_reader(place: Path) -> None:
    part = place / "meta/consolidated.00.pth"
    with zipfile.ZipFile(part, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}(" + nested(60) + b"K\x01u.")
    use_meta(place)
    for name in ("consolidated.².pth", "consolidated.999999999999.pth"):
        torch.save({}, part.with_name(name))
        use_meta(place)


def test_a_manifest_that_nests_too_deep_blocks_no_other_step(place: Path) -> None:
    for name in ("step-99999", "step-²", "step-007", "step-" + "9" * 200):
        step = place / "run/checkpoint" / name
        step.mkdir()
        (step / "manifest.json").write_text("[" * 100_000)
    use_checkpoint(place)
    assert "99999  no checkpoint" in ended("checkpoint", "list", place / "run")


EXPRESSIONS = {
    "a loop in a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "text of any length": "{{ lipsum(n=10**9) }}",
    "text while it compiles": "{{ 'a' * 10**10 }}",
    "a list": "{{ [1] * 10**10 }}",
    "slices": "{{ [1] | slice(10**10) | list }}",
    "a width": "{{ 'a' | center(10**10) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "an error": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_a_template_that_does_not_end(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text(EXPRESSIONS[case])
    with mock.patch.object(render, "SECONDS", 1), pytest.raises(DataError, match="a.jinja"):
        form = chat_format(load_tokenizer(TOKENIZER), str(tmp_path / "a.jinja"))
        form.encode([{"role": "user", "content": "Hi"}])


def test_a_renderer_that_was_ended_begins_anew() -> None:
    template = render.LimitedTemplate("{{ a * n }}")
    assert template.render(a="x", n=3) == "xxx"
    with pytest.raises(render.RenderError, match="MiB"):
        template.render(a="x", n=10**10)
    assert template.render(a="x", n=2) == "xx"
    assert pickle.loads(pickle.dumps(template)).render(a="y", n=1) == "y"  # noqa: S301 (our own)


@pytest.mark.parametrize(
    "expression", ["(a{1000,}){1000,}", "(" * 10_000 + ")" * 10_000, "a{100000}" * 3, "[", "(?<n>a)\\k<m>"]
)
def test_an_expression_beyond_the_limits_of_its_library(expression: str, place: Path) -> None:
    file = place / "tokenizer/tokenizer.json"
    parts = json.loads(file.read_text())
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression
    file.write_text(json.dumps(parts))
    FORMATS["tokenizer.json"].use(place)


def test_links_that_go_in_circles_count_no_file_twice(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/text.txt").write_text("words")
    (tmp_path / "a/b/up").symlink_to(tmp_path)
    (tmp_path / "a/same.txt").symlink_to(tmp_path / "a/b/text.txt")
    for path in (tmp_path, tmp_path / "**", tmp_path / "**/*.txt", tmp_path / "a/**/b/**/*.txt"):
        [file] = open_corpus("x", str(path)).files
        assert os.path.realpath(file) == str(tmp_path / "a/b/text.txt")


def test_columns_of_the_same_name(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array(["a"])
    parquet.write_table(arrow.Table.from_arrays([column, column], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet: there are several columns 'text'"):
        open_corpus("x", str(tmp_path / "a.parquet"))


TABLES: dict[str, tuple[str, str]] = {
    "a string of many lines": ('[job]\ndescription = """' + "x\n" * 20_000 + '"""\n', ""),
    "an unknown key of many lines": ('[job]\nx = """' + "x\n" * 20_000 + '"""\n', "has no key x"),
    "10 MB": ("# " + "x" * 10_000_000, "it has more than"),
    "brackets": ("[job]\nx = " + "[" * 100_000, "not valid TOML"),
    "digits": ("[model]\nn_layers = " + "9" * 5000, "not valid TOML"),
    "hexadecimal digits": ("[model]\nn_layers = 0x" + "f" * 50_000, "from 1 to 1000 "),
    "layers": ("[model]\nn_layers = 1_000_000", "from 1 to 1000 "),
    "degrees": ("[parallelism]\ntensor_parallel_degree = 1_000_000_000", "from 1 to 1000000"),
    "a degree of 5,000 digits": (f'[parallelism]\nelastic_meshes = ["tp={"9" * 5000}"]', "is not a mesh"),
    "a million ranks": ("[parallelism]\ncontext_parallel_degree = 999_983", "does not divide the world size"),
    "a batch": ("[training]\nglobal_batch_size = 1_000_000_000", "from 1 to 100000000"),
    "a large batch": ("[training]\nglobal_batch_size = 99_999_989", ""),
    "a name": ('[job]\ndump_folder = "' + "a" * 300 + '"', "no file can have this name"),
    "a NUL": ('[training]\ndataset_path = "a\\u0000"', "no file can have this name"),
    "a key of many parts": ("a" + ".a" * 450_000 + " = 1", "a key of more than 20 parts"),
    "a key deeper than Python's stack": ("a" + ".a" * 2000 + " = 1", "a key of more than 20 parts"),
    "strings without an end": ("x = [\n" + '\\"""\n' * 180_000, "not valid TOML"),
    "new tokens": (
        "[model]\nadditional_special_tokens = [" + "".join(f'"t{n}", ' for n in range(9000)) + '"t8999"]',
        "t8999 is listed twice",
    ),
    "classes": ("[finetune.classification]\nnum_labels = 1_000_000_000", "from 0 to 100000"),
    "heads": ("[model]\ndim = 4294967292\nn_heads = 2147483646\nn_kv_heads = 4", "from 1 to"),
    "heads and their keys": (
        "[model]\ndim = 2147483646\nn_heads = 1073741823\nn_kv_heads = 2",
        "must be a multiple",
    ),
    "a micro-batch": ("[training]\nglobal_batch_size = 99_999_998\nlocal_batch_size = 49_999_998", ""),
    "a path of many": (f"[training]\ndataset_path = '{'no-such-file,' * 60_000}'", "no such file"),
    "a user who is not there": (
        "[data]\nformat = 'messages'\nchat_template = '~no-such-user/a'",
        "no such format",
    ),
    "parts": ("".join(f"[data.mixture.p{number}]\n" for number in range(2000)), ""),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_config_that_is_made_to_take_long(case: str, tmp_path: Path) -> None:
    text, message = TABLES[case]
    (tmp_path / "a.toml").write_text(text)
    assert message in ended(preflight.main, tmp_path / "a.toml", f"--model.hf_assets_path={TOKENIZER}")


@pytest.mark.parametrize("size", ["9" * 5000, str(10**18), "0", "²"])
def test_a_world_that_nobody_has(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "must be a whole number from 1 to 1000000" in ended(preflight.main, "--world-size", size)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert "WORLD_SIZE is a whole number from 1 to 1000000" in ended(preflight.main)


def test_a_tensor_that_is_there_twice_among_many(place: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [f'"t{number}":{entry}' for number in range(150_000)]
    header = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    (place / "hf/a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    flags = [f"--model.hf_assets_path={place}/hf", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    assert "t149999 occurs twice" in last_checked(place, *flags)


CONVERSATIONS: dict[str, tuple[str, dict[str, object], str]] = {
    "a list that speaks": ("sharegpt", {"conversations": [{"from": ["human"], "value": "x"}]}, "from ["),
    "nobody who speaks": ("messages", {"messages": [{"role": None, "content": "x"}]}, "role null"),
    "nobody who prefers": (
        "preference",
        {"prompt": [{"role": None, "content": "x"}], "chosen": [], "rejected": []},
        "line 1, message 1: role null",
    ),
    "an object that speaks": ("sharegpt", {"conversations": [{"from": {}, "value": "x"}]}, "from {}"),
    "a long role": ("messages", {"messages": [{"role": "x" * 500_000, "content": "x"}]}, "role 'xxx"),
    "a role of no type": ("messages", {"messages": [{"role": {"a": 1}, "content": "x"}]}, "role {"),
    "many keys": ("messages", {"messages": [{f"k{n}": 1 for n in range(50_000)}]}, "has no key 'role'"),
    "many columns": ("alpaca", {f"k{n}": 1 for n in range(50_000)}, "has no column 'instruction'"),
    "a weight of no type": (
        "messages",
        {"messages": [{"role": "user", "content": "x", "weight": []}]},
        "weight",
    ),
    "a part of no type": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": [1]}]}]},
        "a part of",
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_conversation_that_is_none(case: str, tmp_path: Path) -> None:
    form, row, message = CONVERSATIONS[case]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    flags = [f"--training.dataset_path={tmp_path}/a.jsonl", f"--data.format={form}"]
    said = last_checked(tmp_path, *flags, f"--model.hf_assets_path={TOKENIZER}")
    assert message in said
    assert len(said) < 3000


@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/passwd", "state.json", "a\0.arrow", "", 5, None])
def test_a_saved_dataset_that_names_other_files(name: object, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "secret.txt").write_text("words")
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(
        DataError,
        match=r"is not a complete dataset of save_to_disk|\.arrow, written by save_to_disk, is missing",
    ):
        open_corpus("x", str(tmp_path / "saved"))


def test_a_template_that_takes_long_to_compile(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{" + "a+" * 480_000 + "a}}")
    flags = ["--data.format=messages", f"--data.chat_template={tmp_path}/a.jinja"]
    assert "a.jinja, it takes more than" in last_checked(tmp_path, *flags)


@pytest.mark.parametrize("base", [[1], "x", {}, {"place": 1, "fingerprint": "x"}])
def test_a_base_that_an_adapter_cannot_have(base: object, place: Path) -> None:
    step = place / "run/checkpoint/step-2"
    manifest = json.loads((step / MANIFEST).read_text())
    manifest["run"]["base"] = base
    (step / MANIFEST).write_text(json.dumps(manifest))
    seal(step)
    use_checkpoint(place)
    assert "base of its run is" in ended("convert", "merge", place / "hf", step, place / "made")


def test_what_10_mb_of_input_take(place: Path) -> None:
    config = json.loads((place / "hf/config.json").read_text())
    text = "a" * 10_000_000
    for value in (text, [text], list(range(1_300_000)), {str(number): 1 for number in range(500_000)}):
        (place / "hf/config.json").write_text(json.dumps(config | {"layer_types": value}))
        use_hf(place)
    (place / "hf/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1_000_000}))
    assert "must be at most 1,000" in last_checked(place, f"--model.hf_assets_path={place}/hf")
    (place / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert "OK" in last_checked(
        place, f"--training.dataset_path={place}/rows.jsonl", f"--model.hf_assets_path={TOKENIZER}"
    )
    parts = json.loads((place / "tokenizer/tokenizer.json").read_text())
    parts["model"]["vocab"] |= {f"word{number}": 97 + number for number in range(400_000)}
    (place / "tokenizer/tokenizer.json").write_text(json.dumps(parts))
    assert "OK" in last_checked(place, f"--model.hf_assets_path={place}/tokenizer")
