"""Names of Meta's models on the Hub: the right one for what is mistaken, and the line that fetches it."""

from __future__ import annotations

import pytest

from toolkit.models.llama.args import PRESETS
from toolkit.models.llama.hub import HUB
from toolkit.preflight.hub import download_line


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3-8B", "Meta-Llama-3-8B"),
        ("meta-llama/Llama-3-8B-Instruct", "Meta-Llama-3-8B-Instruct"),
        ("meta-llama/Llama-3-3B", "Llama-3.2-3B"),
        ("meta-llama/Llama-3-405B", "Llama-3.1-405B"),
        ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "Llama-3.1-70B-Instruct"),
        ("meta-llama/llama-3.2-1b", "Llama-3.2-1B"),
        ("meta-llama/Llama-2-7b", "Llama-2-7b-hf"),
        ("meta-llama/Llama-2-7b-chat", "Llama-2-7b-chat-hf"),
        ("meta-llama/Llama-3.3-70B", "Llama-3.3-70B-Instruct"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("TinyLlama/TinyLlama_v1.1", None),
        ("./outputs", None),
    ],
)
def test_what_a_name_means(text: str, name: str | None) -> None:
    assert HUB.published_name(text) == name


def test_a_published_name_means_itself_and_is_a_preset() -> None:
    for name, (family, flavor) in HUB.published.items():
        assert HUB.published_name(f"meta-llama/{name}") == name
        assert flavor in PRESETS[family]


@pytest.mark.parametrize(
    ("path", "line", "gated"),
    [
        ("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir ./Llama-3.1-8B ", True),
        ("models/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir models/Llama-3.1-8B ", True),
        ("models/Llama-3-8B", "did you mean Meta-Llama-3-8B? hf download meta-llama/Meta-Llama-3-8B ", True),
        (
            "HuggingFaceTB/SmolLM2-135M",
            "hf download HuggingFaceTB/SmolLM2-135M --local-dir ./SmolLM2-135M ",
            False,
        ),
        ("mistral-7B-v0.3", "hf download mistralai/Mistral-7B-v0.3 --local-dir mistral-7B-v0.3 ", False),
        ("models/Qwen2.5-7B", "hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B ", False),
        ("Qwen/qwen2.5-0.5b-instruct", "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir ", False),
        ("Qwen/Qwen2.5-Coder-7B", "hf download Qwen/Qwen2.5-Coder-7B --local-dir ./Qwen2.5-Coder-7B ", False),
    ],
)
def test_how_to_get_what_is_not_there(path: str, line: str, gated: bool) -> None:
    said = download_line(path)
    assert said is not None and said.startswith(line)
    assert ("accept the license" in said and "hf auth login" in said) == gated


def test_a_path_that_means_no_model_gets_no_line() -> None:
    assert download_line("/data/my_model") is None and download_line("./a/b/c") is None
