"""No family of models is known outside toolkit/models: what differs between families is in their folders."""

from __future__ import annotations

import re
from pathlib import Path

TOOLKIT = Path(__file__).parents[2] / "toolkit"
FAMILIES = re.compile(
    "llama|qwen|mistral|mixtral|gemma|deepseek|olmo|smollm|falcon|bloom|internlm|granite", re.IGNORECASE
)
ALLOWED = {
    "llama-toolkit": "the name of this package, in its caches and in the keys of its hashes",
    "llama_toolkit": "the same, in names of Prometheus",
    "llama_adapter": "a technique of the literature, LLaMA-Adapter (arXiv:2303.16199)",
    "LlamaAdapter": "its class",
    "LLaMA-Adapter": "its name in prose",
    "llama-recipes": "the source of settings",
    "llama-cookbook": "the source of settings, by its later name",
}
EXCEPT = {
    "commands": "examples of presets in help texts, and the class names in another library's configs",
    "data/embedded/tokenizer": "the description of the included file",
}


def test_no_file_outside_the_families_folders_names_a_family() -> None:
    files = [path for path in TOOLKIT.rglob("*") if path.suffix in (".py", ".md", ".toml", ".json")]
    inside = {TOOLKIT / name for name in ("models", *EXCEPT)}
    outside = [path for path in files if inside.isdisjoint(path.parents)]
    assert len(outside) > 100
    allowed = re.compile("|".join(map(re.escape, sorted(ALLOWED, key=len, reverse=True))))
    named = [
        f"{path.relative_to(TOOLKIT)}:{number}: {line.strip()}"
        for path in outside
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if FAMILIES.search(allowed.sub("", f"{line}"))
    ]
    named += [str(path) for path in outside if FAMILIES.search(allowed.sub("", path.name))]
    assert not named, "\n".join(named)
