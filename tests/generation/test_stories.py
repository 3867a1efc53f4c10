"""Real trained models: llama2.c's own text, word for word, from every form, and the program around it."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import run_world
from toolkit.cli import run_command
from toolkit.errors import ConfigError
from toolkit.generation.load import load_model, require_tokenizer
from toolkit.generation.text import TextStream

ASSETS = Path(os.environ.get("TOOLKIT_ASSETS", ""))
pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
STORIES = ASSETS / "stories260K"
CPU = torch.device("cpu")


def _expected() -> str:
    return json.loads((STORIES / "reference_fp32.json").read_text())["greedy_text"]


def _story(place: Path, tp: int = 1) -> str:
    """Piece by piece, as it is shown."""
    loaded = load_model(place, device=CPU, dtype=torch.float32, tp=tp)
    tokenizer = require_tokenizer(loaded)
    prompt = tokenizer.encode("", bos=True)
    stream = TextStream(lambda ids: tokenizer.decode(ids, skip_special=True), prompt)
    steps = loaded.generator().stream([prompt], max_new_tokens=200)
    return "".join(stream.add(token) for (token,) in steps if token is not None) + stream.rest()


@pytest.mark.parametrize("form", ["hf", "meta"])
def test_text_of_llama2_c(form: str) -> None:
    expected = _expected()
    assert len(expected) > 400 and _story(STORIES / form) == expected


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.exhaustive)])
def test_text_of_llama2_c_sharded(ranks: int, tp: int) -> None:
    assert run_world(_story, ranks, STORIES / "meta", tp) == [_expected()] * ranks


def test_ids_of_stories15m() -> None:
    loaded = load_model(ASSETS / "stories15M/hf", device=CPU, dtype=torch.float32)
    ids = np.load(ASSETS / "stories15M/reference_fp32.npz")["greedy"].tolist()
    generated = loaded.generator().generate([ids[:1]], max_new_tokens=len(ids) - 1)
    assert generated == [ids[1:]]


def _main(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = run_command("generate", [str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_program_streams_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt's BOS is one, and a text ends at the tokenizer's stop token or at those named."""
    flags = ("--prompt", "Once", "--temperature", 0, "--dtype", "float32")
    code, out, _ = _main(capsys, STORIES / "hf", *flags, "--max-new-tokens", 30)
    assert code == 0 and len(out) > 60 and _expected().startswith(out.rstrip("\n"))
    stop = ("--stop-token", 432)  # a comma
    code, out, _ = _main(capsys, STORIES / "hf", *flags, *stop)
    assert (code, out) == (0, "Once upon a time,\n")


def test_program_ends_a_text_where_generation_config_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers does, whose files name more tokens than the tokenizer's."""
    folder = shutil.copytree(STORIES / "hf", tmp_path / "hf")
    flags = ("--prompt", "Once", "--temperature", 0, "--dtype", "float32")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 432]}')
    assert _main(capsys, folder, *flags)[:2] == (0, "Once upon a time,\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    code, _, err = _main(capsys, folder, *flags)
    assert code == 3 and "eos_token_id must be an id or a list of ids, not 'x'" in err


def test_program_begins_a_prompt_as_its_flag_or_the_tokenizers_files_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers reads them: SmolLM2's say that no BOS is added."""
    folder = shutil.copytree(STORIES / "hf", tmp_path / "hf")
    flags = ("--prompt", "dog", "--temperature", 0, "--dtype", "float32", "--max-new-tokens", 8, "--json")

    def tokens(*more: str) -> list[int]:
        return json.loads(_main(capsys, folder, *flags, *more)[1])["tokens"]

    with_bos, without = tokens(), tokens("--no-add-bos-token")
    assert with_bos != without
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert (tokens(), tokens("--add-bos-token")) == (without, with_bos)


def test_program_takes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn texts are the same in other batches."""
    (tmp_path / "prompts.txt").write_text("Once upon\n\nThe dog\nA\n")
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "Once upon"}\n{"prompt": "The dog"}\n{"prompt": "A"}\n'
    )
    flags = ("--json", "--max-new-tokens", 12, "--top-p", 0.9, "--dtype", "float32")
    results = []
    for file, batch in (("prompts.txt", 3), ("prompts.jsonl", 1)):
        place = tmp_path / file
        code, out, _ = _main(capsys, STORIES / "meta", "--prompt-file", place, "--batch-size", batch, *flags)
        results.append([json.loads(line) for line in out.splitlines()])
        assert code == 0
    assert results[0] == results[1]
    assert [row["prompt"] for row in results[0]] == ["Once upon", "The dog", "A"]
    assert all(len(row["tokens"]) == 12 and row["text"] for row in results[0])


def test_program_cuts_prompts_at_ends_of_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at other characters that Python takes for some, and without a byte order mark."""
    prompts = ["One\u2028two\x0bthree", "The\x85dog"]
    file, flags = tmp_path / "prompts.jsonl", ("--json", "--max-new-tokens", 1)
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\r\n" for prompt in prompts]
    file.write_text("".join(lines), encoding="utf-8-sig", newline="")
    content = io.BytesIO("\r\n".join(prompts).encode("utf-8-sig"))
    piped = io.TextIOWrapper(content, encoding="ascii", newline="\n")  # as Python opens it
    monkeypatch.setattr("sys.stdin", piped)
    for source in ("--prompt-file", file), ("--prompt-file", "-"):
        code, out, _ = _main(capsys, STORIES / "hf", *source, *flags)
        assert code == 0 and [json.loads(line)["prompt"] for line in out.split("\n")[:-1]] == prompts


@pytest.mark.parametrize("line", ['{"prompt": null}', '{"prompt": 1}', '{"text": "x"}', '["prompt"]', "x"])
def test_program_refuses_a_line_without_a_prompt(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "x"}}\n\n{line}\n')
    code, out, err = _main(capsys, STORIES / "hf", "--prompt-file", tmp_path / "prompts.jsonl")
    assert (code, out) == (3, "") and "prompts.jsonl, line 3 is no" in err
    assert '\n  fix:  write {"prompt": "a text"}' in err


def test_program_takes_prompts_from_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _main(capsys, STORIES / "hf", "--prompt", "x", "--prompt-file", "prompts.txt")
    assert ended.value.code == 2 and "not allowed with argument --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--prompt", "x", "--top-p", "3"], 2, "--top-p = 3.0\n  rule: --top-p must be"),
        (["--prompt", "x", "--stop-token", "<none>"], 2, "--stop-token = '<none>'"),
        (["--prompt", "x", "--stop-token", "512"], 2, "give an id below 512"),
        (["--prompt", "x", "--tokenizer", str(ASSETS / "tokenizers/llama2")], 3, "32,000 entries"),
        (["--prompt-file", "/nowhere.txt"], 3, "/nowhere.txt"),
        (["--prompt-file", "/dev/null"], 3, "no prompt"),
        (["--prompt", "x", "--prompt", "x " * 600, "--batch-size", "1"], 3, "prompt 2 has 1,"),
    ],
)
def test_program_refuses(flags: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = _main(capsys, STORIES / "hf", *flags)
    assert (found, out) == (code, "") and told in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--stop-token", "<none>"], "--stop-token = '<none>'"),
        (["--tokenizer", str(ASSETS / "tokenizers/llama2")], "32,000 entries"),
    ],
)
def test_program_refuses_before_the_weights_are_read(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.generation.load.meta_decoder", None)
    code, _, err = _main(capsys, STORIES / "hf", "--prompt", "x", *flags)
    assert code in (2, 3) and told in err


def test_program_reads_its_prompts_before_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _main(capsys, "/no/model", "--prompt-file", "/nowhere.txt")
    assert code == 3 and "/nowhere.txt" in err


def test_program_refuses_a_tokenizer_smaller_than_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "x", "--tokenizer", STORIES / "tok512.model")
    code, out, err = _main(capsys, ASSETS / "stories15M/hf", *flags)
    assert (code, out) == (3, "") and "has 512 entries, but the model's, in" in err and "32,000" in err


@pytest.mark.parametrize("flag", ["--batch-size", "--max-new-tokens"])
def test_program_counts_from_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _main(capsys, STORIES / "hf", "--prompt", "x", flag, "0")
    assert ended.value.code == 2 and f"{flag}: must be a whole number" in capsys.readouterr().err


def test_weights_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(STORIES / "hf", tmp_path / "deep/hf", ignore=lambda *_: ["tokenizer.model"])
    code, _, err = _main(capsys, folder, "--prompt", "x")
    assert code == 3 and "--tokenizer" in err
    given = ("--tokenizer", STORIES / "tok512.model", "--max-new-tokens", 1)
    assert _main(capsys, folder, "--prompt", "x", *given)[0] == 0


def test_a_config_that_is_not_the_weights_is_to_be_changed_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program has no key of a run's configuration for it."""
    folder = shutil.copytree(STORIES / "hf", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_bytes())
    for field, value in (("tie_word_embeddings", False), ("vocab_size", 600)):
        (folder / "config.json").write_text(json.dumps(config | {field: value}))
        code, _, err = _main(capsys, folder, "--prompt", "x")
        assert code == 3 and f"{field} in config.json" in err


def test_tp_must_divide() -> None:
    with pytest.raises(ConfigError, match="tp = 3"):
        load_model(STORIES / "hf", device=CPU, dtype=torch.float32, tp=3)


@pytest.mark.parametrize("kind", ["llama3", "llama2", "hf_llama3_1"])
def test_streamed_text_is_the_whole_text(kind: str) -> None:
    """Whatever is cut between tokens: characters of several bytes, spaces, emoji joined from several."""
    from toolkit.data.tokenizers.load_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ASSETS / "tokenizers" / kind)
    text = "naïve 日本語 — 👩‍👩‍👧‍👦 and 𝔘𝔫𝔦, two  spaces,\n\tతెలుగు; end. " + "x" * 20 + " ꙮ"
    ids = tokenizer.encode(text)

    def decode(tokens: object) -> str:
        return tokenizer.decode(tokens, skip_special=True)  # type: ignore[arg-type]

    for cut in range(0, len(ids), 3):
        prompt = [tokenizer.bos_id or 0, *ids[:cut]]
        stream = TextStream(decode, prompt)
        pieces = [stream.add(token) for token in ids[cut:]]
        before = decode(prompt)
        if not before.endswith("\ufffd"):
            assert before + "".join(pieces) + stream.rest() == text
