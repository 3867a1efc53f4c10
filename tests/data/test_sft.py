"""Conversations to ids and loss masks, judged by transformers and by a reading of the ids that is the
tests' own."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import random
import shutil
import typing
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chat_data import (
    ASSETS,
    CHATML,
    ENDS_WHOLE_DIALOG,
    OPEN_ASSISTANT,
    THINKING,
    UNMARKED,
    as_row,
    conversation,
    other_tokenizer,
)
from tests.data.test_choose_format import LLAMA2_TEMPLATE
from toolkit.config.training import ConversationFormat
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder, token_weights
from toolkit.data.chat.shapes import FORMATS, PREFERENCE, UNPAIRED, Conversation, Shape
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import EXIT_CONFIG, EXIT_FINISHED, DataError
from toolkit.models.llama.chat import Llama2Format, Llama3Format
from tools import make_chat_data

REAL = Path(os.environ.get("TOOLKIT_ASSETS", ""))
needs_assets = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
TRL = importlib.util.find_spec("trl")
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def llama3() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer")


@pytest.fixture(scope="module")
def llama2() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer_sentencepiece")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_tokenizer(tmp_path_factory.mktemp("other"))


@functools.cache  # a template takes longer to compile than to use
def _encoder(tokenizer: Tokenizer, shape: str, *options: tuple[str, str]) -> ConversationEncoder:
    return ConversationEncoder(tokenizer, Shape(shape), ChatOptions(**dict(options)), "uint32")


def _encoded(
    tokenizer: Tokenizer, shape: str, row: dict[str, Any], **options: Any
) -> tuple[list[int], list[int]]:
    encoder = _encoder(tokenizer, shape, *options.items())
    ids, mask = encoder.encode(encoder.shape.conversation(row, "here"), "here")
    return ids.tolist(), mask.tolist()


def _generated(n: int, shape: str = "messages") -> Iterator[list[dict[str, str]]]:
    rng = random.Random(f"{shape} {n}")
    for _ in range(n):
        yield conversation(rng, turns=1 if shape == "alpaca" else 3)


def _between(ids: list[int], opening: list[int], end: int) -> list[int]:
    """1 from after each ``opening`` up to and with the next ``end``: a reading of the ids alone."""
    mask, inside = [0] * len(ids), False
    for at, token in enumerate(ids):
        inside = inside or ids[max(0, at - len(opening)) : at] == opening
        mask[at] = int(inside)
        inside = inside and token != end
    return mask


@pytest.mark.parametrize("shape", FORMATS)
def test_llama3_learns_the_assistants_turns_and_their_ends(llama3: Tokenizer, shape: str) -> None:
    special = llama3.special_tokens
    opening = [special["<|start_header_id|>"], *llama3.encode("assistant"), special["<|end_header_id|>"]]
    opening += llama3.encode("\n\n")
    for messages in _generated(500, shape):
        ids, mask = _encoded(llama3, shape, as_row(shape, messages))
        assert ids == Llama3Format(llama3).encode(messages, generation_prompt=False)
        expected = _between(ids, opening, special["<|eot_id|>"])
        if shape == "prompt_completion":  # what is in the prompt is given
            last = max(at for at in range(len(ids)) if ids[at - len(opening) : at] == opening)
            expected = [held if at >= last else 0 for at, held in enumerate(expected)]
        assert mask == expected


@pytest.mark.parametrize("shape", FORMATS)
def test_llama2_learns_the_assistants_turns_and_their_ends(llama2: Tokenizer, shape: str) -> None:
    assert llama2.bos_id is not None and llama2.eos_id is not None
    for messages in _generated(500, shape):
        ids, mask = _encoded(llama2, shape, as_row(shape, messages))
        assert ids == Llama2Format(llama2).encode(messages)
        answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
        starts = [at for at, token in enumerate(ids) if token == llama2.bos_id] + [len(ids)]
        for turn, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            learnt = [at for at in range(begin, end) if mask[at]]
            if shape == "prompt_completion" and turn < len(answers) - 1:
                assert not learnt
                continue
            assert learnt == list(range(learnt[0], end)) and ids[end - 1] == llama2.eos_id
            prompt, answer = ids[begin + 1 : learnt[0]], ids[learnt[0] : end - 1]
            assert llama2.decode(prompt).endswith("[/INST]")
            assert llama2.decode(answer).strip() == answers[turn]


def _judge(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _mask(tokenizer: Tokenizer, template: str, messages: list[dict[str, str]]) -> tuple[list, list]:
    return _encoded(tokenizer, "messages", {"messages": messages}, template=template)


def test_marked_templates_have_transformers_ids_and_masks(other: Path) -> None:
    tokenizer, judge = load_tokenizer(other), _judge(other)
    for messages in [
        *_generated(300),
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\na"}],
    ]:
        messages = [
            m | {"content": m["content"].replace("<|eot_id|>", "")} for m in messages
        ]  # is text to us
        expected = judge.apply_chat_template(
            messages, chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True
        )
        assert _mask(tokenizer, CHATML, messages) == (
            expected["input_ids"],
            list(expected["assistant_masks"]),
        )


def test_an_answer_may_begin_within_a_token_that_ends_within_its_first_character(other: Path) -> None:
    described = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"]["Ġâ"] = load_tokenizer(other).n_words  # a space and a byte, as Llama 3 has
    described["model"]["merges"].append(["Ġ", "â"])
    folder = other_tokenizer(other / "joined")
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    template = CHATML.replace("{% generation %}", "ASSISTANT: {% generation %}")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "✅ done"}]
    expected = _judge(folder).apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = _mask(load_tokenizer(folder), template, messages)
    assert described["model"]["vocab"]["Ġâ"] == ids[mask.index(1)]
    assert (ids, mask) == (expected["input_ids"], list(expected["assistant_masks"]))


def test_unmarked_templates_learn_what_marks_would_say(other: Path) -> None:
    """Where an answer begins in the middle of a token, too."""
    tokenizer = load_tokenizer(other)
    for messages in _generated(200):
        assert _mask(tokenizer, UNMARKED, messages) == _mask(tokenizer, CHATML, messages)


@pytest.mark.parametrize(
    "template, opening, end",
    [
        (OPEN_ASSISTANT, "<|assistant|>", "<|endoftext|>"),
        (ENDS_WHOLE_DIALOG, "<|assistant|>", "<|end|>"),
        (THINKING, "<|im_start|>assistant\n", "<|im_end|>"),
    ],
    ids=["open assistant", "ends the whole dialog", "thinking"],
)
def test_templates_without_marks(other: Path, template: str, opening: str, end: str) -> None:
    tokenizer, judge = load_tokenizer(other), _judge(other)
    special = tokenizer.special_tokens
    name = opening[: opening.index(">") + 1]
    begins = [special[name], *tokenizer.encode(opening.removeprefix(name))]
    for messages in _generated(100):
        messages = [m | {"content": m["content"].replace("<|eot_id|>", "")} for m in messages]
        ids, mask = _mask(tokenizer, template, messages)
        assert ids == judge.apply_chat_template(messages, chat_template=template, return_dict=False)
        if template == ENDS_WHOLE_DIALOG:  # the token after the last turn is learnt with it
            assert ids.pop() == tokenizer.eos_id
            mask.pop()
        assert mask == _between(ids, begins, special[end])


@needs_assets
def test_llama2_and_31_have_transformers_ids(tmp_path: Path) -> None:
    """And what is learnt is between the header of the assistant and the end of its turn."""
    from transformers import LlamaTokenizer

    shutil.copy(REAL / "tokenizers" / "llama2" / "tokenizer.model", tmp_path)
    judge = LlamaTokenizer.from_pretrained(tmp_path, legacy=True)
    llama2, llama3 = (load_tokenizer(REAL / "tokenizers" / name) for name in ("llama2", "llama3"))
    source = (REAL / "chat" / "templates" / "meta-llama-Llama-3.1-8B-Instruct.jinja").read_text()
    judge3, special = _judge(REAL / "tokenizers" / "hf_llama3_1"), llama3.special_tokens
    opening = [special["<|start_header_id|>"], *llama3.encode("assistant"), special["<|end_header_id|>"]]
    for messages in _generated(100):
        for message in messages:
            message["content"] = (
                message["content"].replace("</s>", "").replace("<|eot_id|>", "").strip() or "x"
            )
            message["content"] = " ".join(message["content"].split(" "))
        ids, _ = _encoded(llama2, "messages", {"messages": messages})
        if not any("  " in message["content"] for message in messages):  # where transformers differs
            assert ids == judge.apply_chat_template(
                messages, chat_template=LLAMA2_TEMPLATE, return_dict=False
            )
        ids, mask = _encoded(llama3, "messages", {"messages": messages}, template=source)
        assert ids == judge3.apply_chat_template(messages, chat_template=source, return_dict=False)
        assert mask == _between(ids, [*opening, *llama3.encode("\n\n")], special["<|eot_id|>"])


@pytest.mark.skipif(TRL is None, reason="trl is not installed")
@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "qwen3", "qwen3_instruct_2507", "phi3"])
def test_templates_that_trl_ships(other: Path, name: str) -> None:
    """Each has a twin with marks in trl, which transformers can judge. Without them the ends of turns are the
    same, but for Qwen3's thinking, which the one with marks writes in every turn, and for line ends after a
    turn."""
    assert TRL is not None and TRL.submodule_search_locations
    folder = Path(TRL.submodule_search_locations[0]) / "chat_templates"
    source, marked = ((folder / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    tokenizer, judge = load_tokenizer(other), _judge(other)
    for messages in _generated(40):
        messages = [m | {"content": m["content"].replace("<|eot_id|>", "")} for m in messages]
        expected = judge.apply_chat_template(
            messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = _mask(tokenizer, marked, messages)
        judged = list(expected["assistant_masks"])
        for index, message in enumerate(messages):  # qwen2_5 marks the line end of the generation prompt
            if message["role"] == "assistant":
                prompt = judge.apply_chat_template(
                    messages[:index], chat_template=marked, add_generation_prompt=True, return_dict=False
                )
                judged[len(prompt) - 1] = 0
        assert (ids, mask) == (expected["input_ids"], judged)
        ids, mask = _mask(tokenizer, source, messages)
        assert ids == judge.apply_chat_template(messages, chat_template=source, return_dict=False)
        learnt = tokenizer.decode([token for token, held in zip(ids, mask, strict=True) if held])
        answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
        end = {"llama3": "<|eot_id|>", "phi3": "<|end|>"}.get(name, "<|im_end|>")
        parts = [part.removeprefix("<think>\n\n</think>\n\n").strip() for part in learnt.split(end)]
        assert [part for part in parts if part] == [
            *answers,
            *(["<|end_of_text|>"] if name == "phi3" else []),
        ]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_written_whatever_a_data_set_calls_it(other: Path, name: str) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.thinking }}|{{ m.reasoning_content }}|"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", name: "<|im_end|>", "content": "a"}]
    tokenizer = load_tokenizer(other)
    ids, _ = _mask(tokenizer, source, messages)
    assert tokenizer.decode(ids) == "user||q<|im_end|>assistant<|im_end|>|<|im_end|>|a<|im_end|>"
    assert ids.count(tokenizer.special_tokens["<|im_end|>"]) == 2


def test_what_is_learnt_is_chosen(llama3: Tokenizer) -> None:
    messages = next(_generated(1)) + [
        {"role": "user", "content": "more?"}, {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    row = {"messages": messages}
    unweighted = {"messages": [{k: v for k, v in m.items() if k != "weight"} for m in messages]}
    ids, mask = _encoded(llama3, "messages", unweighted)
    _, every = _encoded(llama3, "messages", unweighted, train_on="all")
    assert every == [0] + [1] * (len(ids) - 1)
    _, last = _encoded(llama3, "messages", unweighted, train_on="last_assistant")
    end = llama3.special_tokens["<|eot_id|>"]
    assert [token for token, held in zip(ids, last, strict=True) if held] == [*llama3.encode("yes"), end]
    _, weighted = _encoded(llama3, "messages", row)
    left_out = np.flatnonzero(np.array(mask) != np.array(weighted))
    assert [ids[at] for at in left_out] == [*llama3.encode("no"), end]
    _, weighted = _encoded(llama3, "messages", row, train_on="all")
    assert np.flatnonzero(np.array(weighted) == 0).tolist() == [0, *left_out]
    for weight in (0, 0.5):
        messages[0] |= {"weight": weight}
        said = rf"here: message 1 has weight {weight} and is the {messages[0]['role']}'s: .*\n  fix:  remove"
        with pytest.raises(DataError, match=said):
            _encoded(llama3, "messages", row, train_on="all")


@pytest.mark.parametrize("shape", FORMATS)
def test_a_weight_is_that_of_the_row_times_that_of_the_message(llama3: Tokenizer, shape: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}] * 2
    messages = messages[:2] if shape == "alpaca" else messages
    row = as_row(shape, messages)
    ids, mask = _encoded(llama3, shape, row)
    _, every = _encoded(llama3, shape, row, train_on="all")
    for weight, factor in ((2, 2.0), (0.25, 0.25), (None, 1.0), (1.0, 1.0), (0, 0.0), (Decimal("2.5"), 2.5)):
        for train_on, plain in (("assistant", mask), ("all", every)):
            found = _encoded(llama3, shape, row | {"weight": weight}, train_on=train_on)
            assert found == (ids, [held * factor for held in plain])
    column = Shape(shape, (("weight", "importance"),)).conversation(
        row | {"importance": 3, "weight": 2}, "here"
    )
    assert column.weight == 3
    if shape == "alpaca":  # it has no messages
        return
    name = {"messages": "messages", "sharegpt": "conversations", "prompt_completion": "completion"}[shape]
    weighted = row | {"weight": 0.7, name: [dict(message) for message in row[name]]}
    weighted[name][-1]["weight"] = 0.3
    for train_on, plain in (("assistant", mask), ("all", every)):
        _, found = _encoded(llama3, shape, weighted, train_on=train_on)
        last = max(at for at in range(1, len(ids)) if mask[at] and not mask[at - 1])
        others = [np.float32(held * 0.7) for held in plain]
        assert found == [
            np.float32(0.7 * 0.3) if at >= last and mask[at] else others[at] for at in range(len(ids))
        ]


def test_preferences_reject_weights(llama3: Tokenizer) -> None:
    pair = {"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}]}
    pair["rejected"] = [{"role": "assistant", "content": "b", "weight": 0}]
    shape = Shape("preference")
    assert [it.weight for it in shape.conversations(pair | {"weight": 1.0}, "here")] == [1, 1]
    for weight in (2, 0, 0.5):
        with pytest.raises(
            DataError, match=rf"^here: weight {weight}, but preferences have no weights\n  fix:  remove"
        ):
            shape.conversations(pair | {"weight": weight}, "here")
    pair["rejected"][0]["weight"] = 0.5  # type: ignore[index]
    with pytest.raises(DataError, match=r"^here: weight 0.5, but preferences have no weights"):
        shape.conversations(pair, "here")
    assert "weight" in shape.columns(["prompt", "chosen", "rejected", "weight", "other"], "here")


def test_names_that_are_others(llama3: Tokenizer) -> None:
    shape = Shape("sharegpt", (("conversations", "dialog"), ("from", "speaker"), ("value", "text")))
    row = {"dialog": [{"speaker": "human", "text": "q"}, {"speaker": "gpt", "text": "a"}], "system": "s"}
    assert shape.conversation(row, "here").messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    row["dialog"][0] |= {"from": "gpt", "value": "b", "role": "tool", "content": "c"}
    assert shape.conversation(row, "here").messages[1] == {
        "role": "user",
        "content": "q",
        "from": "gpt",
        "value": "b",
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Shape("messages").conversation(
        {"messages": [{"role": "user", "content": parts}]}, ""
    ).messages == [{"role": "user", "content": "ab"}]


def test_tools_stand_beside_prompts_and_answers() -> None:
    """As trl reads them."""
    tools = [{"name": "f", "parameters": {}}]
    asked, answer = ([{"role": role, "content": "a"}] for role in ("user", "assistant"))
    for shape, row in (
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}], "system": "s"}),
        ("alpaca", {"instruction": "q", "output": "a"}),
        ("prompt_completion", {"prompt": "q", "completion": "a"}),
        ("prompt_completion", {"prompt": asked, "completion": answer}),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("preference", {"chosen": [*asked, *answer], "rejected": [*asked, *answer]}),
    ):
        for held in (tools, json.dumps(tools)):
            found = Shape(shape).conversations({**row, "tools": held}, "here")
            assert [conversation.tools for conversation in found] == [tools] * len(found)
        assert Shape(shape).conversations(row, "here")[-1].tools is None


def test_offsets_of_tokens_are_those_of_the_tokenizers_library(llama3: Tokenizer, llama2: Tokenizer) -> None:
    """tiktoken and SentencePiece do not tell them; the same vocabulary as a tokenizer.json does."""
    judge = load_tokenizer(ASSETS / "tokenizer_json")
    rng = random.Random(0)
    texts = ["", " ", "a", "日本", *(" ".join(m["content"] for m in conversation(rng)) for _ in range(200))]
    for text in texts:
        assert llama3.encode_with_offsets(text) == judge.encode_with_offsets(text)
        ids, offsets = llama2.encode_with_offsets(text)
        starts, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
        assert ids == llama2.encode(text) and starts == sorted(starts) and ends == sorted(ends)
        for at in range(1, len(starts)):
            if starts[at] > starts[at - 1]:  # decoded up to there, the text is that before it
                assert llama2.decode(ids[:at]) == text[: starts[at]]
                assert ends[at - 1] == starts[at]


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(200), "x")
BAD = {
    "role": ("messages", {"messages": [{"role": "narrator", "content": "a"}]}, "message 1: role 'narrator'"),
    "role alike": (
        "messages",
        {"messages": [{"role": "asistant", "content": "a"}]},
        "did you mean assistant",
    ),
    "null": ("messages", {"messages": [{"role": None, "content": "a"}]}, "message 1: role null"),
    "calls": (
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": "f"}]},
        "tool_calls that are a text",
    ),
    "half a key": (
        "messages",
        {"messages": [{"role": "user", "content": "a", "k": {"\ud800": 1}}]},
        "surrogate",
    ),
    "deep": ("messages", {"messages": [{"role": "user", "content": "a", "k": DEEP}]}, "more than 100 deep"),
    "no role": ("messages", {"messages": [{"content": "a"}]}, "no key 'role'; it has 'content'"),
    "speaker": ("sharegpt", {"conversations": [{"from": "gtp", "value": "a"}]}, "did you mean gpt"),
    "empty": ("messages", {"messages": [{"role": "user", "content": " "}]}, "the user's turn is empty"),
    "empty answer": ("alpaca", {"instruction": "a", "output": ""}, "the assistant's turn is empty"),
    "none": ("messages", {"messages": []}, "has no message"),
    "no list": ("messages", {"messages": "hello"}, "column 'messages' contains a text"),
    "no objects": ("messages", {"messages": ["hello"]}, "message 1: it is a text"),
    "no text": ("messages", {"messages": [{"role": "user", "content": 3}]}, "content that is a number"),
    "image": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "only text can be trained on",
    ),
    "column": (
        "alpaca",
        {"question": "a", "answer": "b"},
        "no column 'instruction'.*it has 'question', 'answer'",
    ),
    "number": (
        "prompt_completion",
        {"prompt": 1, "completion": "b"},
        "column 'prompt' contains a JSON number",
    ),
    "surrogate": ("alpaca", {"instruction": "a\ud800", "output": "b"}, "an unpaired surrogate"),
    **{
        f"weight {weight}": (
            "messages",
            {"messages": [{"role": "user", "content": "a", "weight": weight}]},
            "message 1: weight .* is neither 0 nor a number from 1e-09 to 1e\\+09",
        )
        for weight in (-1, math.nan, math.inf, -math.inf, 10**400, 1e-30, 1e30, "2", True, [1])
    },
    "weight of a row": ("alpaca", {"instruction": "a", "output": "b", "weight": -0.5}, ": weight -0.5 is"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_conversation_is_told_with_place_and_fix(llama3: Tokenizer, case: str) -> None:
    shape, row, said = BAD[case]
    with pytest.raises(DataError, match=rf"(?s)^a.jsonl, line 7.*{said}.*"):
        Shape(shape).conversation(row, "a.jsonl, line 7")
    try:
        Shape(shape).conversation(row, "a.jsonl, line 7")
    except DataError as error:
        assert "fix:  " in str(error)


def test_what_a_format_has_no_place_for_is_told_with_place_and_fix(llama2: Tokenizer, other: Path) -> None:
    twice = [{"role": "user", "content": "a"}] * 2 + [{"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"^here: message roles user, user, assistant.*\n  fix:  correct it"):
        _encoded(llama2, "messages", {"messages": twice})
    tokenizer = load_tokenizer(other)
    first = [{"role": "assistant", "content": "a"}]
    with pytest.raises(DataError, match=r"here: .*assistant speaks first\n  fix:  put \{% generation %\}"):
        _mask(tokenizer, UNMARKED, first)
    changing = "{{ messages | length }}" + UNMARKED
    with pytest.raises(DataError, match=r"the text before it depends on it\n  fix:  put"):
        _mask(tokenizer, changing, next(_generated(1)))
    with pytest.raises(DataError, match=r"here: chat template .*: no tools\n  fix:  correct it"):
        _mask(tokenizer, "{{ raise_exception('no tools') }}", first)
    with pytest.raises(DataError, match=r"has no variable 'nothing'\n  fix:  remove it; .* messages"):
        chat_format(tokenizer, UNMARKED, variables={"nothing": "a"})
    unended = CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|eot_id|>")
    with pytest.raises(DataError, match=r"<\|eot_id\|>, which ends a model's turn\n  fix:  move"):
        _mask(tokenizer, unended, next(_generated(1)))
    marked_twice = CHATML.replace("{{ message.content }}<|im_end|>{% endg", "{% endgeneration %}"
                                  "{% generation %}{{ message.content }}<|im_end|>{% endg", 1)  # fmt: skip
    with pytest.raises(DataError, match=r"marks 2 ranges for 1 turns"):
        dialog = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        _encoded(
            tokenizer, "messages", {"messages": dialog}, template=marked_twice, train_on="last_assistant"
        )


def test_the_configuration_has_every_shape() -> None:
    assert typing.get_args(ConversationFormat) == (*FORMATS, PREFERENCE, UNPAIRED)


def test_an_answer_of_no_conversation_is_no_loss() -> None:
    alone = Conversation([{"role": "user", "content": "a"}])
    assert not token_weights(alone, [], 5, "assistant").any()
    assert not token_weights(alone, [], 5, "last_assistant").any()


def test_the_shipped_conversations_are_made_by_their_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_chat_data.main([f"--output={tmp_path / 'made' / 'sums.jsonl'}"]) == EXIT_FINISHED
    for name in ("sums.jsonl", "sums.held_out.jsonl"):
        assert (tmp_path / "made" / name).read_bytes() == (ASSETS / "chat" / name).read_bytes()
    for place, said in (
        ("chats.v1", "must end with .jsonl"),
        ("made/sums.jsonl/a.jsonl", "cannot be written: File exists"),
    ):
        with pytest.raises(SystemExit) as caught:
            make_chat_data.main([f"--output={tmp_path / place}"])
        assert caught.value.code == EXIT_CONFIG and said in capsys.readouterr().err
