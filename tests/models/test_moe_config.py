"""Experts in config.json, as transformers 4 and 5 write it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import DataError
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.on_disk import read_hf_config
from toolkit.models.registry import resolve, spec

FIELDS = {
    "qwen3_moe": (
        "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok",
        "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "output_router_logits",
    ),
    "mixtral": (
        "num_local_experts", "num_experts_per_tok", "router_jitter_noise", "router_aux_loss_coef",
        "output_router_logits",
    ),
}  # fmt: skip
SIZES = [(name, flavor) for name in FIELDS for flavor in spec(name).sizes[name]]


def as_json(args: ModelArgs) -> dict[str, Any]:
    return spec(args.family).hf_config().write(args, dtype="bfloat16", bos=1, eos=2, pad=None)


def read(folder: Path, values: dict[str, Any]) -> ModelArgs:
    (folder / "config.json").write_text(json.dumps(values))
    return read_hf_config(folder)


@pytest.mark.parametrize(("name", "flavor"), SIZES)
def test_transformers_reads_what_we_write_and_we_what_it_writes(
    name: str, flavor: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    args = resolve(name, flavor)
    moe = args.moe
    assert moe is not None and read(tmp_path, as_json(args)) == args
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.num_experts, theirs.num_experts_per_tok) == (moe.num_experts, moe.top_k)
    width = theirs.moe_intermediate_size if name == "qwen3_moe" else theirs.intermediate_size
    assert width == moe.ffn_dim and getattr(theirs, "norm_topk_prob", True) == moe.route_norm
    theirs.save_pretrained(tmp_path)
    assert "num_local_experts" in json.loads((tmp_path / "config.json").read_text()), "as transformers 5"
    assert read_hf_config(tmp_path) == args


@pytest.mark.parametrize("name", FIELDS)
def test_an_absent_field_is_what_it_is_for_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    values = {key: value for key, value in as_json(resolve(name, "debugmodel")).items()}
    moe = read(tmp_path, {key: values[key] for key in values.keys() - set(FIELDS[name])}).moe
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert moe == MoEArgs(
        num_experts=theirs.num_experts,
        top_k=theirs.num_experts_per_tok,
        ffn_dim=theirs.moe_intermediate_size if name == "qwen3_moe" else theirs.intermediate_size,
        route_norm=theirs.norm_topk_prob if name == "qwen3_moe" else True,
    )


def test_leading_layers_may_be_dense(tmp_path: Path) -> None:
    args = resolve("qwen3_moe", "debugmodel")
    values = as_json(args) | {"mlp_only_layers": [0, 1]}
    found = read(tmp_path, values)
    assert args.moe is not None and found == replace(args, moe=replace(args.moe, first_dense=2))
    assert as_json(found) == values


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: must be 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]: must be empty, or the first layers"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1: must be empty"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts = 0: must be a positive integer"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "must be at most num_experts, which is 8"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
        ("mixtral", {"num_experts_per_tok": 9}, "must be at most num_local_experts, which is 8"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: must be 0"),
    ],
)
def test_experts_that_compute_something_else_are_refused(
    name: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, as_json(resolve(name, "debugmodel")) | fields)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["llama3.1", "mistral0.3", "qwen2.5", "qwen3"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_dense_families_refuse_experts(name: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{key} = 8: must be absent or null"):
        read(tmp_path, as_json(resolve(name, "debugmodel")) | {key: 8})


@pytest.mark.parametrize("moe", [{"score_func": "sigmoid"}, {"num_shared_experts": 1}, {"expert_bias": True}])
@pytest.mark.parametrize("name", FIELDS)
def test_experts_that_the_file_cannot_describe_are_not_written(name: str, moe: dict[str, Any]) -> None:
    args = resolve(name, "debugmodel")
    assert args.moe is not None
    with pytest.raises(DataError, match="cannot describe MoEArgs"):
        as_json(replace(args, moe=replace(args.moe, **moe)))
