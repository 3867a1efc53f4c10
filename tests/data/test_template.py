"""Templates that come in twos, that open answers with a think block, that end no turn, and that write less
than a row holds; judged by transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_data import ASSETS, CHATML, UNMARKED, other_tokenizer, write_rows
from toolkit.cli import run_command
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
from toolkit.data.chat.shapes import Shape
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.files import TOOL_USE
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.errors import EXIT_FINISHED, DataError
from toolkit.weights.hf_assets import tokenizer_companions

TRL = importlib.util.find_spec("trl")
WITH_TOOLS = "{{ tools | tojson }}\n" + UNMARKED
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TEXT_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLS = [
    {"role": "user", "content": "q?", "name": "bob"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Sun."},
]
WRITES_CALLS = UNMARKED.replace(
    "{{ message.content }}",
    "{{ message.tool_calls | tojson if message.tool_calls else message.content }}",
)
"""As Llama 3.1's: a message that calls tools has no text."""
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: the last turn alone has a think block."""


def _learnt(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = load_tokenizer(folder)
    encoder = ConversationEncoder(tokenizer, Shape("messages"), ChatOptions(**options), "uint32")
    row = encoder.shape.conversation({"messages": messages}, "here")
    ids, mask = encoder.encode(row, "here")
    return tokenizer.decode(ids[mask > 0].tolist())


def _with_two(folder: Path, place: str) -> Path:
    other_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if place == "config":
        named = {"default": UNMARKED, "tool_use": WITH_TOOLS}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (folder / TOOL_USE).parent.mkdir()
        (folder / TOOL_USE).write_text(WITH_TOOLS)
        (folder / "chat_template.jinja").write_text(UNMARKED)
    return folder


@pytest.mark.parametrize("place", ["config", "files"])
def test_rows_with_tools_take_the_template_tool_use_as_in_transformers(tmp_path: Path, place: str) -> None:
    from transformers import AutoTokenizer

    folder = _with_two(tmp_path / "given", place)
    handed_on = tmp_path / "handed on"
    (handed_on / TOOL_USE).parent.mkdir(parents=True)
    for name, content in tokenizer_companions(folder).files.items():
        (handed_on / name).write_bytes(content)
    more = extend_tokenizer(folder, tmp_path / "cache", tokens=["<|new|>"])
    for path in (folder, handed_on, more):
        tokenizer, judge = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
        encoder = ConversationEncoder(tokenizer, Shape("messages"), ChatOptions(), "uint32")
        form = chat_format(tokenizer)
        assert isinstance(form, ChatTemplate)
        for tools in (TOOLS, None):
            row = encoder.shape.conversation({"messages": ASKED, "tools": tools}, "here")
            expected = judge.apply_chat_template(ASKED, tools=tools, return_dict=False)
            assert encoder.encode(row, "here")[0].tolist() == expected
            expected = judge.apply_chat_template(
                ASKED[:1], tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert form.encode(ASKED[:1], tools=tools) == expected
    asked = extend_tokenizer(
        folder, tmp_path / "cache", template=CHATML
    )  # for all dialogs, with tools or without
    assert not (asked / TOOL_USE).exists()


def test_tools_without_a_template_that_writes_them(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path)
    shape = Shape("messages")
    row = shape.conversation({"messages": ASKED, "tools": TOOLS}, "here")
    for template in (UNMARKED, "{% set tools = none %}{{ tools }}" + UNMARKED, "llama3"):
        tokenizer = load_tokenizer(folder if template != "llama3" else ASSETS / "tokenizer")
        encoder = ConversationEncoder(tokenizer, shape, ChatOptions(template), "uint32")
        with pytest.raises(DataError, match=r"here: it has tools, which .*\n  fix:  .* tool_use"):
            encoder.encode(row, "here")
    config = {"chat_template": [{"name": "rag", "template": "a"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="named rag but none named default\n  fix:  write the one"):
        chat_format(load_tokenizer(folder))


def test_what_the_generation_prompt_writes_is_not_learnt(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path)
    empty, end = "<think>\n\n</think>\n\n", "<|im_end|>"
    reasoned = [ASKED[0], ASKED[1] | {"reasoning_content": "since"}]
    off: dict[str, Any] = {"variables": {"enable_thinking": False}}
    assert _learnt(folder, ASKED, template=THINKS) == f"{empty}yes{end}"
    for options in (off, {"mask_empty_thinking": True}):
        options |= {"template": THINKS}
        assert _learnt(folder, ASKED, **options) == f"yes{end}"
        assert _learnt(folder, ASKED + ASKED, **options) == f"yes{end}" * 2
        assert _learnt(folder, reasoned, **options) == f"<think>\nsince\n</think>\n\nyes{end}"
    with pytest.raises(DataError, match="has no variable 'enable_thinking'"):
        _learnt(folder, ASKED, template=UNMARKED, mask_empty_thinking=True)
    with pytest.raises(DataError, match="starts every answer in the same way"):
        _learnt(folder, ASKED, template="{{ enable_thinking }}" + UNMARKED, mask_empty_thinking=True)


@pytest.mark.skipif(TRL is None, reason="trl is not installed")
@pytest.mark.parametrize("name", ["qwen3_training", "nemotron_3_nano", "nemotron_3_nano_training", "glm4moe"])
def test_think_blocks_of_templates_that_trl_ships(tmp_path: Path, name: str) -> None:
    assert TRL is not None and TRL.submodule_search_locations
    template = (Path(TRL.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()
    folder = other_tokenizer(tmp_path)
    by_default = _learnt(folder, ASKED, template=template)
    # Nemotron's prompt for a model that thinks is not how an answer without reasoning begins.
    assert ("</think>" in by_default) == (not name.startswith("nemotron"))
    for options in ({"variables": {"enable_thinking": False}}, {"mask_empty_thinking": True}):
        learnt = _learnt(folder, ASKED + ASKED, template=template, **options)
        assert "think" not in learnt and learnt.count("yes") == 2


def test_an_answer_that_would_lose_its_text_is_refused(tmp_path: Path) -> None:
    """In gpt-oss' template, the token after an answer depends on whether it is the last one."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<|im_start|>final\n{% endif %}{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% else %}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = other_tokenizer(tmp_path)
    assert _learnt(folder, ASKED, template=template) == "<|im_start|>final\nyes<|end_of_text|>"
    with pytest.raises(DataError, match="the end of message 2 cannot be determined"):
        _learnt(folder, ASKED * 2, template=template)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_token_that_ends_the_dialog_ends_its_last_answer_alone(tmp_path: Path, turns: int) -> None:
    """Where no turn has special tokens, what is between the answers is not learnt."""
    template = (
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:{% else %}{{ eos_token }}{% endif %}"
    )
    folder = other_tokenizer(tmp_path)
    assert _learnt(folder, ASKED * turns, template=template) == " yes\n" * turns + "<|end_of_text|>"
    follows = [*ASKED, ASKED[0]]
    assert _learnt(folder, follows, template=template) == " yes\n"


def test_a_template_that_ends_no_turn_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for m in messages %}### {{ 'Bot' if m.role == 'assistant' else 'User' }}: {{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}### Bot:{% endif %}"
    )
    file = tmp_path / "bot.jinja"
    file.write_text(template)
    named = [{"role": "user", "content": "q?", "name": "bob"}, ASKED[1]]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": ASKED}] * 2 + [{"messages": named}])
    words = [
        f"--training.dataset_path={rows}", "--data.format=messages", f"--data.chat_template={file}",
        f"--data.cache_folder={tmp_path / 'cache'}", f"--model.tokenizer_path={ASSETS / 'tokenizer'}",
        "--training.seq_len=64", "--model.flavor=debugmodel",
    ]  # fmt: skip
    for _ in range(2):  # the second finds the tokens that the first has written
        assert run_command("prepare-data", words) == EXIT_FINISHED
        said = capsys.readouterr().err
        assert said.count("in 3 of 3 conversations no answer ends with a special token") == 1
        assert "put {{ eos_token }} after each answer" in said
        assert "in 1 of 3 conversations the chat format ignores 'name'" in said
    ended = template.replace("\n{% endfor", "{{ eos_token }}\n{% endfor")
    marked = "{% generation %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}{% endfor"
    for text in (ended, ended.replace("{{ m.content }}{{ eos_token }}\n{% endfor", marked)):
        file.write_text(text)
        assert run_command("prepare-data", words) == EXIT_FINISHED
        assert "no answer ends" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "messages, template, said",
    [
        (CALLS, UNMARKED, r"message 2 \(assistant\) has tool_calls"),
        (CALLS, "llama3", r"message 2 \(assistant\) has tool_calls"),
        (
            [CALLS[0], {**CALLS[1], "tool_calls": [CALL, CALL | {"id": "c2"}]}, *CALLS[2:]],
            WRITES_CALLS.replace("message.tool_calls |", "message.tool_calls[0] |"),
            r"message 2 \(assistant\) has tool_calls",
        ),
        (
            [CALLS[0], {**CALLS[1], "tool_calls": [TEXT_CALL]}, *CALLS[2:]],
            UNMARKED.replace(
                "{{ message.content }}",
                "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
                "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}{% endif %}"
                "{% endfor %}{{ message.content }}",
            ),
            r"message 2 \(assistant\) has arguments of tool_calls",
        ),
        (
            [{"role": "system", "content": "Be kind."}, *ASKED],
            UNMARKED.replace("in messages", "in messages if message.role != 'system'"),
            r"message 1 \(system\) has content",
        ),
    ],
    ids=["calls", "calls of a family", "second call", "arguments as text", "system"],
)
def test_what_a_template_leaves_out_is_rejected(
    tmp_path: Path, messages: list[dict[str, Any]], template: str, said: str
) -> None:
    folder = ASSETS / "tokenizer" if template == "llama3" else other_tokenizer(tmp_path)
    with pytest.raises(DataError, match=rf"^here: {said}, which .* ignores\n  fix:  set data.chat"):
        _learnt(folder, messages, template=template)


def test_what_matters_less_is_noted_and_a_structure_is_rendered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ConversationEncoder(
        load_tokenizer(other_tokenizer(tmp_path)), Shape("messages"), ChatOptions(WRITES_CALLS), "uint32"
    )
    rendered = []
    render = ChatTemplate._render
    monkeypatch.setattr(
        ChatTemplate, "_render", lambda *given, **named: rendered.append(1) or render(*given, **named)
    )
    spoken = [CALLS[0], CALLS[1] | {"content": "Let me see."}, *CALLS[2:]]
    n = []
    for messages in (CALLS, CALLS, spoken, ASKED):
        before = len(rendered)
        encoder.encode(encoder.shape.conversation({"messages": messages}, "here"), "here")
        n.append(len(rendered) - before)
    said = "the chat format ignores"
    assert dict(encoder.remarks) == {
        f"{said} 'name'": 3,
        f"{said} 'tool_call_id'": 3,
        f"{said} 'content' next to tool_calls": 1,
    }
    whole = 1 + 2 * 2  # the dialog, and for each answer what is before it and up to its end
    keys = ("name", "tool_calls", "content", "tool_call_id")
    assert n[1] == whole and n[2] == whole + 1 + len(keys) + 2 and n[3] == 1 + 2
