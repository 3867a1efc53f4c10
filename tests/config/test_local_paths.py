"""A URL in the place of a path is refused by name, in a config and by the tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.commands import COMMANDS
from toolkit.config import load_config
from toolkit.config.schema import NAME, Field, fields
from toolkit.config.types import LocalPath
from toolkit.errors import ConfigError
from toolkit.storage.urls import url_problem

PATHS = {field: mark.storage for field in fields() for mark in field.marks if isinstance(mark, LocalPath)}
LOCAL = [field for field, storage in PATHS.items() if not storage]


def test_keys_that_take_object_storage() -> None:
    keys = {field.key for field in PATHS.keys() - set(LOCAL)}
    checkpoint = {"checkpoint.folder", "checkpoint.initial_load_path"}
    assert keys == checkpoint | {"training.dataset_path", "data.cache_folder"}
    for key in keys:
        for text in ("s3://bucket/run", "gs://bucket", "abfss://container/a/b"):
            assert load_config([f"--{key}={text}"]).value(key) == text
        stored = ("https://host/run", "s3://b/../c", "s3://b/c,s3://b/d")  # where it is written, too
        for text in ("file:///run", "s3://", *(stored if key != "training.dataset_path" else ())):
            with pytest.raises(ConfigError, match=f"--{key}: {key} = '{text}'\n  rule: "):
                load_config([f"--{key}={text}"])


@pytest.mark.parametrize("field", LOCAL, ids=lambda field: field.key)
def test_every_key_that_is_a_path_of_this_machine(field: Field) -> None:
    key = field.key.replace(NAME, "part")
    with pytest.raises(ConfigError) as caught:
        load_config([f"--{key}=s3://bucket/run"])
    assert str(caught.value).startswith(
        f"--{key}: {key} = 's3://bucket/run'\n  rule: s3:// is a URL, but only"
    )
    assert len(caught.value.problems) == 1


def test_keys_that_sound_like_paths_are_marked() -> None:
    named = {field.key for field in fields() if field.name.endswith(("_path", "folder", "_file", "csv"))}
    assert named - {field.key for field in PATHS} == {"job.config_file"}


def test_files_of_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job.config_file = 'gs://b/c.toml'\n  rule: gs:// is a URL"):
        load_config(["--job.config_file", "gs://b/c.toml"])
    (tmp_path / "run.toml").write_text('extends = "https://example.com/base.toml"\n')
    with pytest.raises(ConfigError, match="run.toml:1: extends = 'https://.*\n  rule: https:// is a URL"):
        load_config(["--job.config_file", str(tmp_path / "run.toml")])


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("./a://b", "write a path without ://"),
        ("az://container/a", "copy it to a local disk or mount it"),
        ("a.txt, S3://bucket/b.txt", "copy it to a local disk or mount it"),
        ("file:///data/run", "write only the path: /data/run"),
        ("file://localhost/data/run", "write only the path: /data/run"),
        (
            "hf://meta-llama/Llama-3.2-1B",
            "run hf download meta-llama/Llama-3.2-1B --local-dir ./Llama-3.2-1B",
        ),
        (
            "https://huggingface.co/datasets/allenai/c4",
            "run hf download --repo-type dataset allenai/c4 --local",
        ),
    ],
)
def test_what_to_do_instead(text: str, fix: str) -> None:
    found = url_problem(text)
    assert found is not None and found[1].startswith(fix)


@pytest.mark.parametrize("text", ["outputs", "/a/b", "~/x", "a:b/c", "owner/name", "a,b/*.txt", "", "x//y"])
def test_a_path_is_no_url(text: str) -> None:
    assert url_problem(text) is None


_NO_STORE = "hf:// is not a writable object storage"
_HERE_ALONE = ":// is a URL, but only local files and folders"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate s3://b/m", _HERE_ALONE),
        ("evaluate m --text s3://b/a.txt", _HERE_ALONE),
        ("generate m --tokenizer s3://b/t", _HERE_ALONE),
        ("chat s3://b/m", _HERE_ALONE),
        ("train-tokenizer --corpus a.txt --output s3://b/t", _HERE_ALONE),
        ("plot s3://b/run", _HERE_ALONE),
        ("checkpoint list hf://b/c", _NO_STORE),
        ("convert hf-to-dcp hf://o/n out", _NO_STORE),
    ],
)
def test_arguments_of_commands(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    tool, *arguments = words.split()
    with pytest.raises(SystemExit) as caught:
        COMMANDS[tool].main(tool)(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
