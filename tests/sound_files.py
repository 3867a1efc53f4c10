"""A sound file of each format that users hand in, as small as it can be."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.tampering import seal
from toolkit.checkpoint.manifest import MANIFEST
from toolkit.cli import run_command
from toolkit.config import load_config
from toolkit.data import content_hash
from toolkit.data.build import open_data
from tools import make_random_model

TOKENIZER = Path(__file__).parent / "assets" / "tokenizer"
SHAPE = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 16, "vocab_size": 4352}


def run_flags(folder: Path, *flags: object) -> list[str]:
    """A small run whose outputs and caches lie in ``folder``."""
    words = [
        f"--job.dump_folder={folder}/out",
        f"--data.cache_folder={folder}/cache",
        "--training.dataset=embedded_validation",
        "--training.seq_len=64",
        "--training.global_batch_size=8",
        *flags,
    ]
    return [str(word) for word in words]


def build_cache(folder: Path) -> None:
    """Tokenize the rows, or read what was made of them."""
    flags = [f"--training.dataset_path={folder}/rows.jsonl", f"--model.hf_assets_path={TOKENIZER}"]
    open_data(load_config(run_flags(folder, *flags)), progress=True)


def small_tokenizer_json() -> bytes:
    """A tokenizer.json with each kind of part, and as few tokens as that takes."""
    letters = {chr(code): number for number, code in enumerate(range(33, 127))}
    words = {**letters, "Ġ": 94, "Ċ": 95, "th": 96}
    special = [
        {
            "id": 97 + number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for number, name in enumerate(("<s>", "</s>"))
    ]  # fmt: skip
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"Regex": "x{2,9}"}, "content": "x"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|\\w+"},
                    "behavior": "Isolated", "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [97], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": words, "merges": [["t", "h"]],
        },
    }  # fmt: skip
    return json.dumps(parts).encode()


TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "added_tokens_decoder": {
        "97": {"content": "<s>", "special": True},
        "98": {"content": "</s>", "special": True},
    },
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "chat_template": "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "model_max_length": 10**30,
}
TEMPLATE = """{%- if not date is defined %}{% set date = strftime_now("%d %b %Y") %}{% endif %}
{{- bos_token }}{% for message in messages %}{% if message.role not in ['user', 'assistant', 'system'] %}
{{ raise_exception("no such role") }}{% endif %}{{ '[' ~ message.role | upper ~ ']' }}
{{- ' ' ~ message['content'] | trim }}
{%- endfor %}{% if add_generation_prompt %}{{ '[ASSISTANT]' * 1 }}{% endif %}
{% macro f(n) %}{{ n }}{% endmacro %}{{ f(range(3) | list | tojson) }}
"""
RUN_TOML = """# a run
extends = "base.toml"

[model]
name = "llama3"
flavor = "debugmodel"
n_layers = 2
dim = 64

[training]
seq_len = 64
global_batch_size = 8
local_batch_size = 4
steps = 10

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[optimizer]
lr = 1e-3

[data.mixture.books]
dataset = "embedded"
weight = 2.5
"""


def make_all(folder: Path) -> None:
    """Fill ``folder`` with them."""
    shape = [word for key, value in SHAPE.items() for word in ("--set", f"{key}={value}")]
    hf = folder / "hf"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        random_model = [
            str(hf),
            "--name",
            "llama3",
            "--flavor",
            "debugmodel",
            "--tokenizer",
            str(TOKENIZER),
            *shape,
        ]
        assert make_random_model.main(random_model) == 0
        assert run_command("convert", ["hf-to-meta", str(hf), str(folder / "meta")]) == 0
        for step in (1, 2):
            made = folder / "run/checkpoint" / f"step-{step}"
            assert run_command("convert", ["hf-to-dcp", str(hf), str(made)]) == 0
            as_saved_by_a_run(made)
    (hf / "model.safetensors").rename(hf / "a.safetensors")
    header = (hf / "a.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names.keys() - {"__metadata__"}, "a.safetensors"),
    }
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    write_adapter(folder / "adapter", folder / "hf")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_bytes(small_tokenizer_json())
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    shutil.copytree(folder / "tokenizer", folder / "templated")
    (folder / "templated/chat_template.jinja").write_text(TEMPLATE)
    rows = [{"text": f"Row {number} has words.", "title": "é" * number, "n": number} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(rows)
    arrow.parquet.write_table(table, folder / "rows.parquet")
    with (
        arrow.OSFile(str(folder / "rows.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (folder / "run.toml").write_text(RUN_TOML)
    (folder / "base.toml").write_text("[metrics]\nlog_freq = 2\n")
    with mock.patch.object(content_hash, "SETTLED_SECONDS", -1.0):  # what is so young is remembered, too
        build_cache(folder)


def write_adapter(folder: Path, base: Path) -> None:
    """Write PEFT's folder of a LoRA of rank 2."""
    folder.mkdir()
    attention, dim, kv = "base_model.model.model.layers.0.self_attn", SHAPE["dim"], SHAPE["dim"] // 2
    shapes = {"q_proj.lora_A": (2, dim), "q_proj.lora_B": (dim, 2)}
    shapes |= {"v_proj.lora_A": (2, dim), "v_proj.lora_B": (kv, 2)}
    tensors = {f"{attention}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": 2,
        "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False,
        "target_modules": ["q_proj", "v_proj"], "modules_to_save": None, "rank_pattern": {},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))


def as_saved_by_a_run(step: Path) -> None:
    """Have a checkpoint tell of a run that goes on, as those of the trainer do."""
    manifest = json.loads((step / MANIFEST).read_text())
    flags = run_flags(Path("somewhere"), *(f"--model.{key}={value}" for key, value in SHAPE.items()))
    run = manifest["run"] | {
        "model_only": False,
        "config": load_config(flags).to_toml(),
        "data_parallel_degree": 1,
        "global_batch_size": 8,
        "id": "0",
        "tokens": 512,
        "schedule_start": 0,
        "best_validation": None,
        "loader": {"samples": 8, "corpus": "0", "seq_len": 64, "packing": True, "shuffle": True, "seed": 0},
    }
    (step / MANIFEST).write_text(json.dumps(manifest | {"run": run}))
    seal(step)
