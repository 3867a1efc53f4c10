"""Runs that break the rules of ``rules.weights``, and folders of small models for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.preflight.bad_runs import TOKENIZER, Bad, bad, save
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.parameters import table
from toolkit.models.registry import spec

SHAPE = ModelArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=4352, head_dim=8, rope_theta=5e5
)
MOE = replace(SHAPE, family="qwen3_moe", qk_norm=True, moe=MoEArgs(4, 2, 16))
IN_HF = "checkpoint.enable checkpoint.initial_load_in_hf"
FROM_M = f"checkpoint.initial_load_path=m {IN_HF}"
NAMED = (
    "model.dim=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=48 model.norm_eps=1e-5"
)


def write_config(at: Path, args: ModelArgs, **fields: Any) -> Path:
    """A folder with config.json alone, ``fields`` of it changed."""
    at.mkdir()
    config = spec(args.family).hf_config().write(args, dtype="float32", bos=1, eos=2, pad=None)
    (at / "config.json").write_text(json.dumps(config | fields))
    return at


def write_model(folder: Path, name: str = "m", args: ModelArgs = SHAPE, **fields: Any) -> Path:
    """A Hugging Face folder of zeros in two files, with ``fields`` of config.json changed."""
    at = write_config(folder / name, args, **fields)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in table(args).hf_shapes.items()}
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: files["layers.1" in name] for name in tensors}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, at / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))
    return at


def _model(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: write_model(folder, **fields)


def _then(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A model of which ``change`` then breaks something."""
    return lambda folder: change(write_model(folder))


def _second(at: Path) -> Path:
    return at / "model-00002-of-00002.safetensors"


def _with_larger_tokenizer(folder: Path) -> None:
    write_model(folder)
    (folder / "m" / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {
                    "type": "BPE",
                    "vocab": {f"t{i}": i for i in range(4300)},
                    "merges": [],
                },
            }
        )
    )


def _narrow_tied_head(at: Path) -> None:
    config = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    first = at / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"lm_head.weight": np.zeros((4300, 32), np.float32)}, first)


def _quantize(at: Path) -> None:
    first = at / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"model.norm.weight": np.zeros(32, np.int32)}, first)


def _meta(folder: Path) -> None:
    (folder / "m").mkdir()
    (folder / "m" / "params.json").write_text("{}")


def _adapter(folder: Path) -> None:
    (folder / "m").mkdir()
    (folder / "m" / "adapter_config.json").write_text("{}")


def _alike(rule: str, flags: str, prepares: dict[str, Callable[[Path], Any]]) -> list[Bad]:
    """Cases that differ in what they find and say."""
    return [bad(rule, flags, *said.split(" | "), prepare=prepare) for said, prepare in prepares.items()]


NOT_LLAMA = {
    "model_type = 'gemma2'": _model(model_type="gemma2"),
    "sliding_window = 4096": _model(sliding_window=4096),
    "attention_bias = true | mlp_bias = true": _model(attention_bias=True, mlp_bias=True),
    'hidden_act = "gelu"': _model(hidden_act="gelu"),
    'rope_scaling.type = "dynamic"': _model(rope_scaling={"type": "dynamic", "factor": 2.0}),
}

CASES = [
    bad(
        "checkpoint_complete",
        "checkpoint.initial_load_path=m checkpoint.enable",
        "Hugging Face folder: set checkpoint.initial_load_in_hf = true",
        prepare=_model(),
    ),
    bad(
        "checkpoint_complete",
        "checkpoint.initial_load_path=m checkpoint.enable",
        "meta-to-dcp m",
        prepare=_meta,
    ),
    bad(
        "weights_options_act",
        f"checkpoint.initial_load_model_only=false {FROM_M}",
        "only weights",
        prepare=_model(),
    ),
    bad("weights_options_act", f"checkpoint.exclude_from_loading=model {FROM_M}", prepare=_model()),
    bad("options_act", "checkpoint.initial_load_broadcast checkpoint.enable", "initial_load_in_hf = false"),
    bad(
        "weights_options_act",
        "checkpoint.hf_export_interval=150 checkpoint.interval=100 checkpoint.enable",
        "checkpoint.interval, which is 100",
        "the nearest is 200",
    ),
    bad(
        "options_act",
        "checkpoint.last_save_in_hf checkpoint.load_only checkpoint.enable",
        "checkpoint.load_only = true",
    ),
    bad(
        "weights_options_act",
        "checkpoint.push_to_hub=me checkpoint.last_save_in_hf checkpoint.enable",
        'write it as "user/name"',
    ),
    bad(
        "architecture_readable",
        f"model.hf_assets_path=m model.tokenizer_path={TOKENIZER}",
        "sliding_window = 4096: must be absent or null",
        "set model.name and model.flavor",
        prepare=_model(sliding_window=4096),
    ),
    bad(
        "weights_match_model",
        f"{FROM_M} model.name=llama3.0 {NAMED} model.tie_embeddings=true model.n_layers=3",
        "n_layers 2 (this model: 3), tie_embeddings False (this model: True)",
        "remove model.name, model.dim, ",
        prepare=_model(),
    ),
    bad(
        "weights_match_model",
        f"{FROM_M} model.vocab_size=5000",
        "vocab_size 4352 (this model: 5000)",
        "hf-to-dcp m OUT --vocab-size 5000",
        prepare=_model(),
    ),
    bad(
        "weights_readable",
        "checkpoint.initial_load_path=meta-llama/Llama-3.2-1B-instruct model.flavor=debugmodel " + IN_HF,
        "hf download meta-llama/Llama-3.2-1B-Instruct --local-dir ./Llama-3.2-1B-Instruct",
        "gated",
        "hf auth login",
    ),
    bad(
        "weights_readable",
        "checkpoint.initial_load_path=models/Llama-3-8B model.flavor=debugmodel " + IN_HF,
        "did you mean Meta-Llama-3-8B? hf download meta-llama/Meta-Llama-3-8B",
    ),
    bad(
        "weights_readable",
        "checkpoint.initial_load_path=TinyLlama/TinyLlama_v1.1 model.flavor=debugmodel " + IN_HF,
        "hf download TinyLlama/TinyLlama_v1.1 --local-dir ./TinyLlama_v1.1",
    ),
    *_alike(
        "weights_readable",
        f"{FROM_M} model.flavor=debugmodel",
        {
            "m is not a folder": lambda folder: (folder / "m").write_text(""),
            "Meta's files | meta-to-dcp m OUT": _meta,
            "it contains an adapter: | finetune.adapter_path = m, | merge BASE m OUT": _adapter,
            "a checkpoint of this toolkit | initial_load_in_hf = false": lambda folder: save(
                folder, 5
            ).rename(folder / "m"),
        },
    ),
    *_alike(
        "weights_readable",
        FROM_M,
        {f"{said} | use the folder of a Llama": prepare for said, prepare in NOT_LLAMA.items()},
    ),
    *_alike(
        "weights_readable",
        FROM_M,
        {
            "model-00002-of-00002.safetensors": _then(lambda at: _second(at).unlink()),
            "a model in two formats, model.safetensors.index.json and model.safetensors | keep one": _then(
                lambda at: (at / "model.safetensors").write_bytes(_second(at).read_bytes())
            ),
            "a model in two formats, model.safetensors.index.json and consolidated.00.pth": _then(
                lambda at: (at / "consolidated.00.pth").touch()
            ),
            "wrong shape: lm_head.weight (4300, 32), expected (4352, 32)": _then(_narrow_tied_head),
            "norm.weight as I32 | use the original model": _then(_quantize),
            "is truncated: its header describes | use a folder with complete safetensors": _then(
                lambda at: _second(at).write_bytes(_second(at).read_bytes()[:-4])
            ),
            "missing: model.layers.2.": _model(num_hidden_layers=3),
            "unexpected: model.layers.1.": _model(num_hidden_layers=1),
            "missing: model.layers.0.mlp.experts.4.gate_proj.weight": _model(args=MOE, num_experts=5),
            "unexpected: model.layers.0.mlp.experts.3.": _model(args=MOE, num_experts=3),
            "wrong shape: model.layers.0.mlp.experts.0.gate_proj.weight (16, 32), expected (24, 32)": _model(
                args=MOE, moe_intermediate_size=24
            ),
            "wrong shape: model.layers.0.mlp.gate_proj.weight (48, 32), expected (64, 32)": _model(
                intermediate_size=64
            ),
        },
    ),
    bad(
        "tokenizer_matches_weights",
        f"model.hf_assets_path={TOKENIZER} {FROM_M}",
        "has 4096 tokens",
        "has 4300",
        'set model.hf_assets_path to "m"',
        prepare=_with_larger_tokenizer,
    ),
]
