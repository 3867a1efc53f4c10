"""Dialogs of ``llama-toolkit chat`` with a real model: what is asked, kept and forgotten."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from toolkit import cli
from toolkit.cli import run_command
from toolkit.commands.dialog import Dialog, Terminal, talk
from toolkit.data.chat.choose_format import chat_format
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FINISHED, DataError
from toolkit.generation.load import LoadedModel, load_model, require_tokenizer
from toolkit.generation.sampling import Sampling
from toolkit.io import standard_streams
from toolkit.models.common.chat_format import Message
from toolkit.models.llama.chat import Llama2Format

pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
MODEL = Path(os.environ.get("TOOLKIT_ASSETS", ""), "stories15M", "hf")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(MODEL, device=torch.device("cpu"), dtype=torch.float32)


def dialog(loaded: LoadedModel, *, temperature: float = 0.0, **options: object) -> Dialog:
    tokenizer = require_tokenizer(loaded)
    settings = {"max_new_tokens": 16, "sampling": Sampling(temperature=temperature)} | options
    return Dialog(loaded.generator(), tokenizer, chat_format(tokenizer), **settings)


def test_an_answer_is_the_continuation_of_the_whole_dialog(loaded: LoadedModel) -> None:
    """Each turn's prompt is what the format makes of all before it, and the pieces are the answer."""
    talked = dialog(loaded, system="Be nice.")
    tokenizer = require_tokenizer(loaded)
    form, messages = Llama2Format(tokenizer), [{"role": "system", "content": "Be nice."}]
    for question in ("Tell me of Lily", "And then?"):
        messages.append({"role": "user", "content": question})
        [ids] = loaded.generator().generate(
            [form.encode(messages)], max_new_tokens=16, stop_ids=form.stop_ids
        )
        expected = tokenizer.decode([token for token in ids if token not in form.stop_ids]).strip()
        pieces = list(talked.answer(question))
        assert expected and "".join(pieces).strip() == expected
        assert len(pieces) > 3
        messages.append({"role": "assistant", "content": expected})
        assert [{"role": "system", "content": "Be nice."}, *talked.turns] == messages
    talked.reset()
    assert talked.turns == []
    again = "".join(talked.answer("Tell me of Lily")).strip()
    assert again == messages[2]["content"]


def test_a_stop_token_is_no_part_of_the_answer(loaded: LoadedModel) -> None:
    talked = dialog(loaded, max_new_tokens=200)
    text = "".join(talked.answer("Once upon a time"))
    assert "</s>" not in text and "<s>" not in text
    assert talked.turns[-1]["content"] == text.strip()


def test_an_answer_that_is_cut_short_is_kept_as_far_as_it_came(loaded: LoadedModel) -> None:
    talked = dialog(loaded)
    answer = talked.answer("Once")
    began = [next(answer) for _ in range(4)]
    answer.close()
    assert talked.turns[-1] == {"role": "assistant", "content": "".join(began).strip()}


def test_after_an_error_no_question_is_left_without_an_answer(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talked = dialog(loaded)
    list(talked.answer("Once"))
    kept = list(talked.turns)
    with monkeypatch.context() as patched:
        patched.setattr(talked._generator, "stream", lambda *_, **__: iter([[5], [10**6]]))
        with pytest.raises(DataError, match="token id 1000000"):
            list(talked.answer("And then?"))
    assert talked.turns == kept
    assert list(talked.answer("And then?")) and len(talked.turns) == 4


def test_a_question_that_is_cut_short_is_not_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first token: no two questions follow one another in the next prompt."""

    def interrupted(*_: object, **__: object) -> list[int]:
        raise KeyboardInterrupt

    talked = dialog(loaded)
    with monkeypatch.context() as patched:
        patched.setattr(talked._form, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(talked.answer("Once"))
    assert talked.turns == [] and list(talked.answer("Once"))


def test_an_answer_has_ids_of_the_tokenizer_alone(loaded: LoadedModel) -> None:
    """Where the model has more."""
    smaller = copy.copy(require_tokenizer(loaded))
    smaller.n_words = 300
    generator = replace(loaded, tokenizer=smaller).generator()
    [ids] = generator.generate([[1]], max_new_tokens=20)
    assert max(ids) < 300 <= max(loaded.generator().generate([[1]], max_new_tokens=20)[0])


def test_old_turns_are_forgotten_when_the_context_is_full(loaded: LoadedModel) -> None:
    talked = dialog(loaded, system="Be nice.", max_new_tokens=8)
    questions = [f"Question {number}: " + "was there a dog? " * 10 for number in range(4)]
    for question in questions:
        list(talked.answer(question))
    assert talked.forgotten > 0
    assert [turn["content"] for turn in talked.turns[::2]] == questions[talked.forgotten :]
    kept = list(talked.turns), talked.forgotten
    with pytest.raises(DataError, match="256"):
        list(talked.answer("too long " * 300))
    assert (talked.turns, talked.forgotten) == kept


def test_sampled_answers_follow_the_seed_and_the_turn(loaded: LoadedModel) -> None:
    def answers(seed: int) -> list[str]:
        talked = dialog(loaded, sampling=Sampling(temperature=1.0, seed=seed))
        return ["".join(talked.answer("Once")) for _ in range(2)]

    assert answers(0) == answers(0) != answers(1)


def test_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "Tell me of Lily\n\n/reset\nTell me of Lily\n/quit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    options = ["--temperature", "0", "--max-new-tokens", "12", "--dtype", "float32"]
    assert run_command("chat", [str(MODEL), *options]) == EXIT_FINISHED
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first == second != ""
    assert "llama2 format" in printed.err and "starts again" in printed.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me of Lily\n/exit\nnever\n"))
    assert run_command("chat", [str(MODEL), *options]) == EXIT_FINISHED
    assert capsys.readouterr().out.splitlines() == [first]
    monkeypatch.setattr(sys, "stdin", io.StringIO("too long " * 300 + "\nTell me of Lily\n"))
    assert run_command("chat", [str(MODEL), *options]) == EXIT_DATA
    printed = capsys.readouterr()
    assert printed.out == "" and "error: the message makes a prompt of" in printed.err
    marked = b"\xef\xbb\xbfTell me of Lily\nLily \xff\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(marked), encoding="utf-8"))
    assert run_command("chat", [str(MODEL), *options]) == EXIT_FINISHED
    assert capsys.readouterr().out.splitlines()[0] == first
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run_command("chat", ["nowhere", "--format", "nowhere.jinja"]) == EXIT_DATA
    assert "llama2, llama3, mistral or a file" in capsys.readouterr().err
    assert run_command("chat", [str(MODEL), "--top-p", "0"]) == EXIT_CONFIG
    assert run_command("chat", ["nowhere"]) == EXIT_DATA


def test_an_answer_ends_where_generation_config_says(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [_, end, *_] = require_tokenizer(loaded).encode("".join(dialog(loaded).answer("Tell me of Lily")))
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me of Lily\n"))
    assert run_command("chat", [str(tmp_path), "--temperature", "0", "--dtype", "float32"]) == EXIT_FINISHED
    [answer] = capsys.readouterr().out.splitlines()
    assert len(require_tokenizer(loaded).encode(answer)) == 1


def test_a_template_has_the_variables_of_the_flag_else_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = "{{ bos_token }}{{ 'A dog' if dog else 'Lily' }}{{ messages[-1].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)

    def answer(*flags: str, message: str = " was") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(message))
        words = [str(tmp_path), "--temperature", "0", "--dtype", "float32", "--max-new-tokens", "8", *flags]
        assert run_command("chat", words) == EXIT_FINISHED
        return capsys.readouterr().out

    dog, lily = answer("--chat-template-kwargs", "dog=true"), answer("--chat-template-kwargs=dog=false")
    assert dog != lily == answer()
    run = {"config": "data.chat_template_kwargs = {dog = true}"}
    monkeypatch.setattr("toolkit.generation.load.run_of", lambda source: run)
    assert answer() == dog and answer("--chat-template-kwargs", "dog=false") == lily
    assert run_command("chat", [str(tmp_path), "--chat-template-kwargs", "cat=true"]) == EXIT_DATA
    assert "has no variable 'cat'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_command("chat", [str(tmp_path), "--chat-template-kwargs", "dog"])
    assert "'dog' is not NAME=VALUE" in capsys.readouterr().err


def test_an_answer_that_is_lost_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(standard_streams, "protect", lambda **_: None)
    monkeypatch.setattr(standard_streams, "exit_code", lambda code: {EXIT_FINISHED: 1}[code])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main(["chat", str(MODEL)]) == 1
    assert "no chat template: its tokenizer suggests llama2" in capsys.readouterr().err


@pytest.mark.parametrize("tp", [0, -1, 2])
def test_a_tp_that_the_ranks_do_not_divide_by(tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("chat", [str(MODEL), "--tp", str(tp)]) == EXIT_CONFIG
    assert "at least 1 and divide the 1 ranks" in capsys.readouterr().err


def _errors_of_a_tokenizer(folder: str) -> list[str]:
    """Messages of this rank where rank 1 has none, and where it has another."""
    said = []
    for other in ("nowhere", "another"):
        path = Path(folder, other) if dist.get_rank() == 1 else MODEL
        try:
            load_model(MODEL, device=torch.device("cpu"), dtype=torch.float32, tokenizer_path=path)
        except DataError as error:
            said.append(str(error))
    return said


def test_a_tokenizer_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    shutil.copytree(Path(os.environ["TOOLKIT_ASSETS"], "tokenizers", "llama3"), tmp_path / "another")
    first, second = run_world(_errors_of_a_tokenizer, 2, str(tmp_path))
    assert first == second
    assert len(first) == 2 and "nowhere" in first[0] and "rank 1 has another" in first[1]


def _talked_on_ranks() -> tuple[list[Message], timedelta | None]:
    """The turns, and how long ranks wait for the user of the first."""
    if dist.is_initialized():
        here = dist.get_rank() == 0
        sys.stdin = io.StringIO("Tell me of Lily\n/quit\n" if here else "never\n" * 3)
    talked = dialog(load_model(MODEL, device=torch.device("cpu"), dtype=torch.float32), max_new_tokens=6)
    terminal = Terminal()
    talk(talked, terminal)
    group = terminal._ranks.group
    return talked.turns, group and group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_hear_the_first_one_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me of Lily\n/quit\n"))
    expected, _ = _talked_on_ranks()
    assert len(expected) == 2
    for turns, patience in run_world(_talked_on_ranks, 2):
        assert turns == expected and patience > timedelta(days=30)
