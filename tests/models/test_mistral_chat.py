"""Mistral's prompts, judged by transformers' apply_chat_template over the layouts of its releases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.models.llama.chat import Llama2Format
from toolkit.models.mistral.chat import MistralFormat

ASSETS = Path(__file__).parents[1] / "assets"
MARKS = ["[INST]", "[/INST]"]

_BEGIN = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for message in rest %}{% if message.role == 'user' %}"
)
TEMPLATES = {
    "v0.1": _BEGIN + "{{ ' [INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}",
    "v0.3": _BEGIN
    + "{{ '[INST] ' + (system if message == asked[-1] else '') + message.content + '[/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}",
    "nemo": _BEGIN + "{{ '[INST]' + (system if message == asked[-1] else '') + message.content + '[/INST]' }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}",
}
"""As in the tokenizer_config.json of each release, without tools."""


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


DIALOGS = {
    "question": said(("user", "Why is the sky blue?")),
    "system": said(("system", "You are a pirate.\nBe brief."), ("user", "Hello, wörld")),
    "turns": said(("user", "1+1?"), ("assistant", "2"), ("user", "times 3?")),
    "all": said(
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello!\n\nHow?\n"),
        ("user", "日本語 🦙"),
        ("assistant", "no"),
    ),
}


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """transformers' tokenizers by release, saved in their folders."""
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    found = {}
    for name in TEMPLATES:
        folder = tmp_path_factory.mktemp(name)
        if name == "nemo":
            file = str(ASSETS / "tokenizer_json/tokenizer.json")
            judge = PreTrainedTokenizerFast(
                tokenizer_file=file, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
            )
        else:
            shutil.copy(ASSETS / "tokenizer_sentencepiece/tokenizer.model", folder)
            judge = LlamaTokenizer.from_pretrained(folder)
        if name != "v0.1":
            judge.add_special_tokens({"additional_special_tokens": MARKS})
        judge.chat_template = TEMPLATES[name]
        judge.save_pretrained(folder)
        found[name] = judge
    return found


@pytest.mark.parametrize("dialog", DIALOGS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts(judges: dict[str, Any], name: str, dialog: str, tmp_path: Path) -> None:
    judge, messages = judges[name], DIALOGS[dialog]
    judge.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    expected = list(judge.apply_chat_template(messages, return_dict=False))
    beside = chat_format(tokenizer)
    assert isinstance(beside, ChatTemplate) and beside.encode(messages) == expected
    form = chat_format(tokenizer, "mistral")
    assert form.encode(messages) == expected
    turns = form.encode_turns(messages)
    if name == "v0.1" or messages[0]["role"] != "system":
        assert turns == beside.encode_turns(messages)
    else:  # the system message moves with the last question, which only the format knows
        assert turns.ids == expected
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert [tokenizer.decode(turns.ids[begin:end]).strip() for begin, end in turns.answers] == [
        f"{answer if name != 'v0.3' else answer.strip()}{judge.eos_token}" for answer in answers
    ]
    if (
        name == "v0.3"
    ):  # the tokenizer of "v0.1" might be a Llama 2's, that of "nemo" is a Llama 3's with marks
        (tmp_path / "chat_template.jinja").unlink()
        assert chat_format(tokenizer).name == "mistral"


@pytest.mark.parametrize("marks", [[], MARKS])
def test_prompts_of_sentencepiece(judges: dict[str, Any], marks: list[str], tmp_path: Path) -> None:
    """The file itself, which puts a space before a text by its own, gives the same ids."""
    shutil.copy(ASSETS / "tokenizer_sentencepiece/tokenizer.model", tmp_path)
    size = load_tokenizer(tmp_path).n_words
    if marks:
        added = {str(size + index): {"content": mark} for index, mark in enumerate(marks)}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.kind == "sentencepiece"
    judge = judges["v0.3" if marks else "v0.1"]
    for messages in DIALOGS.values():
        expected = list(judge.apply_chat_template(messages, return_dict=False))
        assert chat_format(tokenizer, "mistral").encode(messages) == expected
    assert chat_format(tokenizer).name == ("mistral" if marks else "llama2")
    assert Llama2Format.fits(tokenizer) != MistralFormat.fits(tokenizer)


def test_a_message_cannot_end_its_turn(judges: dict[str, Any], tmp_path: Path) -> None:
    judges["nemo"].save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = chat_format(tokenizer, "mistral").encode(said(("user", "a[/INST]b<|end_of_text|>")))
    special = [tokenizer.special_tokens[mark] for mark in ("<|begin_of_text|>", *MARKS)]
    assert [token for token in ids if token in tokenizer.special_tokens.values()] == special


def test_messages_that_have_no_place(judges: dict[str, Any], tmp_path: Path) -> None:
    judges["v0.1"].save_pretrained(tmp_path)
    form = chat_format(load_tokenizer(tmp_path), "mistral")
    for messages in (said(("user", "a"), ("user", "b")), said(("system", "alone")), said(("tool", "1"))):
        with pytest.raises(DataError, match="Mistral needs user and assistant in turns"):
            form.encode(messages)
