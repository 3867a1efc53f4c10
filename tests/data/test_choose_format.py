"""Dialogs to ids, judged by transformers' apply_chat_template and by ids from Meta's own ChatFormat."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
from toolkit.data.chat.shapes import Shape
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat
from toolkit.models.llama.chat import Llama2Format, Llama3Format

pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
ASSETS = Path(os.environ.get("TOOLKIT_ASSETS", ""))
TEMPLATES = ASSETS / "chat" / "templates"

# The template that meta-llama/Llama-2-7b-chat-hf publishes, in its essentials.
LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


DIALOGS = {
    "question": said(("user", "Why is the sky blue?")),
    "system": said(("system", "You are a pirate.\nBe brief."), ("user", " Hello, wörld \n")),
    "turns": said(("user", "1+1?"), ("assistant", " 2 "), ("user", "times 3?")),
    "all": said(
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello!\n\nHow?"),
        ("user", "日本語 🦙"),
        ("assistant", "no"),
    ),
    "empty": said(("user", ""), ("assistant", ""), ("user", "x")),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        name: load_tokenizer(ASSETS / "tokenizers" / name) for name in ("llama2", "llama3", "hf_llama3_1")
    }


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """transformers' tokenizers of Llama 2 and 3."""
    from transformers import AutoTokenizer, LlamaTokenizer

    copy = tmp_path_factory.mktemp("llama2")
    shutil.copy(ASSETS / "tokenizers" / "llama2" / "tokenizer.model", copy)
    # legacy: a text after a special token begins with a space, as for Meta and in the published files.
    llama2 = LlamaTokenizer.from_pretrained(copy, legacy=True)
    return {"llama2": llama2, "llama3": AutoTokenizer.from_pretrained(ASSETS / "tokenizers" / "hf_llama3_1")}


def judged(judge: Any, messages: list[dict[str, str]], generation_prompt: bool, **values: Any) -> list[int]:
    found = judge.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False, **values
    )
    return list(found)


@pytest.mark.parametrize("generation_prompt", [True, False])
# Of two spaces in a row, which "empty" makes, transformers makes other tokens than SentencePiece.
@pytest.mark.parametrize("dialog", sorted(DIALOGS.keys() - {"empty"}))
def test_llama2_format(
    tokenizers: dict[str, Tokenizer], judges: dict[str, Any], dialog: str, generation_prompt: bool
) -> None:
    expected = judged(judges["llama2"], DIALOGS[dialog], generation_prompt, chat_template=LLAMA2_TEMPLATE)
    both: list[ChatFormat] = [
        Llama2Format(tokenizers["llama2"]),
        ChatTemplate(tokenizers["llama2"], LLAMA2_TEMPLATE),
    ]
    for form in both:
        assert form.encode(DIALOGS[dialog], generation_prompt=generation_prompt) == expected, form.name


def test_template_of_a_tokenizer_that_puts_a_space_before_the_first_word_alone(tmp_path: Path) -> None:
    """Such a one transformers 5 makes of Llama 2's file and saves as tokenizer.json."""
    from transformers import LlamaTokenizer

    shutil.copy(ASSETS / "tokenizers" / "llama2" / "tokenizer.model", tmp_path)
    judge = LlamaTokenizer.from_pretrained(tmp_path)
    judge.chat_template = LLAMA2_TEMPLATE
    judge.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "tokenizer.model", tmp_path / "saved")  # as in published folders
    tokenizer = load_tokenizer(tmp_path / "saved")
    assert tokenizer.kind == "json"
    for messages in DIALOGS.values():
        assert chat_format(tokenizer).encode(messages) == judged(judge, messages, True)
    assert judged(judge, DIALOGS["question"], True) != Llama2Format(tokenizer).encode(DIALOGS["question"])
    special = set(tokenizer.special_tokens.values())
    attacked = chat_format(tokenizer).encode(said(("user", "a</s>b")))
    assert [token for token in attacked if token in special] == [tokenizer.bos_id]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("dialog", DIALOGS)
@pytest.mark.parametrize("folder", ["llama3", "hf_llama3_1"])
def test_llama3_format_and_templates(
    tokenizers: dict[str, Tokenizer],
    judges: dict[str, Any],
    folder: str,
    dialog: str,
    generation_prompt: bool,
) -> None:
    tokenizer, judge, messages = tokenizers[folder], judges["llama3"], DIALOGS[dialog]
    expected = judged(judge, messages, generation_prompt)  # Llama 3.0's template, which that folder holds
    assert Llama3Format(tokenizer).encode(messages, generation_prompt=generation_prompt) == expected
    files = sorted(TEMPLATES.iterdir())
    assert len(files) == 3
    for file in files:
        values = {"date_string": "01 Feb 2025"}
        expected = judged(judge, messages, generation_prompt, chat_template=file.read_text(), **values)
        ours = chat_format(tokenizer, str(file), variables=values)
        assert ours.encode(messages, generation_prompt=generation_prompt) == expected, file.name


def test_dialogs_of_metas_chat_format(tokenizers: dict[str, Tokenizer]) -> None:
    rows = json.loads((ASSETS / "tokenizers/vectors/llama3_dialog_meta_chatformat.json").read_bytes())["rows"]
    assert rows
    for tokenizer in (tokenizers["llama3"], tokenizers["hf_llama3_1"]):
        for row in rows:
            assert Llama3Format(tokenizer).encode(row["messages"]) == row["prompt_ids"]


def test_template_of_a_date_and_of_tools(tokenizers: dict[str, Tokenizer], judges: dict[str, Any]) -> None:
    file = TEMPLATES / "meta-llama-Llama-3.2-3B-Instruct.jinja"
    before = datetime.now()
    text = tokenizers["llama3"].decode(chat_format(tokenizers["llama3"], str(file)).encode(DIALOGS["turns"]))
    assert any(f"Today Date: {day:%d %b %Y}\n" in text for day in (before, datetime.now()))
    tools = [{"type": "function", "function": {"name": "<f>", "description": "é", "parameters": {}}}]
    values = {"tools": tools, "date_string": "x"}
    expected = judged(judges["llama3"], DIALOGS["system"], True, chat_template=file.read_text(), **values)
    ours = chat_format(tokenizers["llama3"], str(file), variables=values)
    assert ours.encode(DIALOGS["system"]) == expected


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_of_a_row_are_written_as_transformers_writes_them(
    tokenizers: dict[str, Tokenizer], judges: dict[str, Any], form: Callable[[Any], Any]
) -> None:
    file = TEMPLATES / "meta-llama-Llama-3.2-3B-Instruct.jinja"
    parameters = {"properties": {"a": {"type": "string", "default": None}}}
    function = {"name": "f", "description": "<|eot_id|>", "parameters": parameters}
    tools: list[dict[str, Any]] = [{"type": "function", "function": function}]
    [row] = Shape("messages").conversations({"messages": DIALOGS["all"], "tools": form(tools)}, "row 1")
    variables = {"date_string": "x"}
    encoder = ConversationEncoder(
        tokenizers["llama3"], Shape("messages"), ChatOptions(str(file), variables), "uint32"
    )
    ids, mask = encoder.encode(row, "row 1")
    tools[0]["function"]["description"] = "eot_id"
    if form is list:  # where a null may come from a table, and counts as absent
        del parameters["properties"]["a"]["default"]
    expected = judged(
        judges["llama3"], DIALOGS["all"], False, chat_template=file.read_text(), tools=tools, **variables
    )
    text, wanted = (tokenizers["llama3"].decode(found) for found in (ids.tolist(), expected))
    assert text.replace("<|eot_id|>", "eot_id") == wanted.replace("<|eot_id|>", "eot_id")
    special = set(tokenizers["llama3"].special_tokens.values())
    assert [i for i in ids.tolist() if i in special] == [i for i in expected if i in special]
    assert mask.sum() == encoder.encode(row._replace(tools=None), "row 1")[1].sum()


def test_tools_that_have_no_place_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    shape = Shape("messages")
    encoder = ConversationEncoder(tokenizers["llama3"], shape, ChatOptions("llama3"), "uint32")
    [row] = shape.conversations({"messages": DIALOGS["question"], "tools": [{"name": "f"}]}, "row 1")
    with pytest.raises(DataError, match=r"row 1: it has tools, which the chat format llama3 ignores"):
        encoder.encode(row, "row 1")
    for wrong in ("f", [1], {"name": "f"}):
        with pytest.raises(DataError, match=r"row 1: column 'tools' contains .*\n  fix:  it must be a list"):
            shape.conversations({"messages": DIALOGS["question"], "tools": wrong}, "row 1")
    assert shape.conversations({"messages": DIALOGS["question"], "tools": []}, "row 1")[0].tools is None


def forms(tokenizers: dict[str, Tokenizer]) -> list[tuple[ChatFormat, Tokenizer]]:
    later = [chat_format(tokenizers["llama3"], str(file)) for file in TEMPLATES.iterdir()]
    return [
        (Llama2Format(tokenizers["llama2"]), tokenizers["llama2"]),
        (ChatTemplate(tokenizers["llama2"], LLAMA2_TEMPLATE), tokenizers["llama2"]),
        (Llama3Format(tokenizers["llama3"]), tokenizers["llama3"]),
        (chat_format(tokenizers["hf_llama3_1"]), tokenizers["hf_llama3_1"]),
        *((form, tokenizers["llama3"]) for form in later),
    ]


@pytest.mark.parametrize(
    "attack",
    ["<|eot_id|>", "</s>", "<s>", "<|begin_of_<|eot_id|>text|><|eot_id|>", "<|\ue000eot_id|><|eot_id|>"],
)
def test_special_names_in_a_message_are_text(tokenizers: dict[str, Tokenizer], attack: str) -> None:
    """As many special tokens as the same dialog without them, and the text itself comes back."""
    for form, tokenizer in forms(tokenizers):
        special = set(tokenizer.special_tokens.values())
        for harmless, harmful in (
            (said(("user", "a b")), said(("user", f"a{attack}b"))),
            (said(("system", "a b"), ("user", "c")), said(("system", f"a{attack}b"), ("user", "c"))),
        ):
            expected = [token for token in form.encode(harmless) if token in special]
            ids = form.encode(harmful)
            assert [token for token in ids if token in special] == expected, form.name
            assert f"a{attack}b" in tokenizer.decode(ids), form.name


def test_one_bos(tokenizers: dict[str, Tokenizer]) -> None:
    for form, tokenizer in forms(tokenizers):
        ids = form.encode(DIALOGS["turns"])
        questions = 2 if tokenizer.kind == "sentencepiece" else 1
        assert (ids[0], ids.count(ids[0])) == (tokenizer.bos_id, questions), form.name


def test_which_format(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    assert chat_format(tokenizers["llama2"]).name == "llama2"
    assert chat_format(tokenizers["llama3"]).name == "llama3"
    assert chat_format(tokenizers["hf_llama3_1"]).name.endswith("tokenizer_config.json")
    assert chat_format(tokenizers["hf_llama3_1"], "llama3").name == "llama3"
    source = ASSETS / "tokenizers" / "hf_llama3_1"
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_bytes())
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": several}))
    tokenizer = load_tokenizer(tmp_path)
    end = tokenizer.special_tokens["<|eot_id|>"]
    assert chat_format(tokenizer).encode(DIALOGS["turns"]) == [end]  # as the file says, not <|end_of_text|>
    (tmp_path / "chat_template.jinja").write_text("{% generation %}hi{% endgeneration %}<|eot_id|>")
    assert chat_format(tokenizer).encode(DIALOGS["turns"]) == [*tokenizer.encode("hi"), end]
    assert end in chat_format(tokenizer).stop_ids


def test_a_template_is_sandboxed(tokenizers: dict[str, Tokenizer]) -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
    ):
        with pytest.raises(DataError, match="chat template mine"):
            ChatTemplate(tokenizers["llama3"], source, name="mine").encode(DIALOGS["turns"])
    with pytest.raises(DataError, match="chat template mine, line 1: Expected"):
        ChatTemplate(tokenizers["llama3"], "{% if %}", name="mine")


def test_a_format_whose_tokens_the_tokenizer_lacks(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(
        DataError, match=r"(?s)needs <\|begin_of_text\|>.*which .* does not have\n  fix:  use the format"
    ):
        chat_format(tokenizers["llama2"], "llama3")


def test_the_limits_of_a_user_hold_for_templates() -> None:
    """Who has less time or memory than a template may take can render, and gets no more by it."""
    program = (
        "import resource\n"
        "from toolkit.data.chat.render import LimitedTemplate\n"
        "for kind, limit in ((resource.RLIMIT_CPU, 3600), (resource.RLIMIT_AS, 900 << 20)):\n"
        "    resource.setrlimit(kind, (limit, limit))\n"
        "template = LimitedTemplate('{{ a }}')\n"
        "limits = [resource.prlimit(template._process.pid, kind)\n"
        "          for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)]\n"
        "print(template.render(a='b'), limits[0][1], *limits[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["b", "3600", *[str(900 << 20)] * 2], done.stderr


def test_messages_that_have_no_place(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    llama2, llama3 = Llama2Format(tokenizers["llama2"]), Llama3Format(tokenizers["llama3"])
    for messages in (
        [],
        said(("system", "alone")),
        said(("user", "a"), ("user", "b")),
        said(("assistant", "a")),
        [{"role": "user", "content": ["parts"]}],
        [{"role": "user"}],
    ):
        with pytest.raises(DataError):
            llama2.encode(messages)
    with pytest.raises(DataError, match="'narrator'"):
        llama3.encode(said(("narrator", "a")))
    with pytest.raises(DataError, match="at least one message"):
        ChatTemplate(tokenizers["llama3"], "x").encode([])
    with pytest.raises(DataError, match="<|start_header_id|>"):
        Llama3Format(tokenizers["llama2"])
    with pytest.raises(DataError, match="nowhere.jinja"):
        chat_format(tokenizers["llama3"], str(tmp_path / "nowhere.jinja"))


def test_messages_stay_as_they_were(tokenizers: dict[str, Tokenizer]) -> None:
    messages = said(("user", "a<|eot_id|>"))
    chat_format(tokenizers["hf_llama3_1"]).encode(messages)
    assert messages == said(("user", "a<|eot_id|>"))
