"""The trained models of the assets and what others computed with them; small models of our own as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.training import small_config
from toolkit.build import build_model
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import degrees
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts, SingleModel
from toolkit.parallel.pipeline_parallel import Pipeline
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource

needs_assets = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
ASSETS = Path(os.environ.get("TOOLKIT_ASSETS", ""))
FORMS = ("stories260K/hf", "stories260K/meta", "stories15M/hf")
CPU = torch.device("cpu")


def open_form(form: str) -> WeightSource:
    return MetaFolder(ASSETS / form) if form.endswith("meta") else SafetensorsFolder(ASSETS / form)


def reference(form: str) -> tuple[Tensor, Tensor]:
    """Ids (1, S) and the logits (P, V) of the last P positions, by transformers and others in fp32."""
    found = np.load(ASSETS / form.split("/")[0] / "reference_fp32.npz")
    return torch.from_numpy(found["ids"]), torch.from_numpy(found["logits"])


def recorded_loss(form: str) -> tuple[float, Tensor, Tensor]:
    """The recorded mean loss of sixty stories, each from its start, their tokens and labels (60, S)."""
    folder = ASSETS / form.split("/")[0]
    notes = json.loads((folder / "reference_fp32.json").read_text())
    length = notes["config"]["S"]
    text = (ASSETS / "text/tinystories_2M.txt").read_text()
    stories = [story.strip() for story in text.split("<|endoftext|>")]
    stories = [story for story in stories if len(story) > 100][:60]
    tokenizer = load_tokenizer(folder / "hf")
    tokens = torch.zeros(60, length, dtype=torch.int64)
    labels = torch.full((60, length), -100)
    for row, story in enumerate(stories):
        ids = torch.tensor(tokenizer.encode(story, bos=True, eos=False)[:length])
        tokens[row, : len(ids)] = ids
        labels[row, : len(ids) - 1] = ids[1:]
    return notes["tinystories_first60_doc_aligned"]["loss"], tokens, labels


def empty_model(args: ModelArgs, parallelism: dict[str, Any], *, dtype: str = "float32") -> ModelParts:
    """A model over all ranks, of whatever was in memory."""
    training = {"dtype": dtype, "mixed_precision_param": dtype, "mixed_precision_reduce": "float32"}
    config = small_config("unused", parallelism=parallelism, training=training)
    layout = degrees(config.parallelism, dist.get_world_size())
    assert layout is not None
    mesh = build_mesh(
        CPU,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        pp=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
    )
    return build_model(config, args, mesh, CPU, param_dtype=getattr(torch, dtype), seed=0, pretrained=True)


@torch.no_grad()
def run(model_parts: ModelParts, tokens: Tensor, labels: Tensor | None = None) -> Tensor | None:
    """Logits (B, S, V), or the summed loss, on the ranks that have the head."""
    if isinstance(model_parts, SingleModel):
        out = model_parts.model(tokens, labels=labels)
        model_parts.end_evaluation()
        return out
    assert isinstance(model_parts, Pipeline)
    hidden, positions = tokens, torch.arange(tokens.shape[1])[None]
    for index, model in model_parts.stages.items():
        if index:
            hidden = model_parts._hidden(len(tokens), tokens.shape[1], "cpu")
            dist.recv(hidden, group=model_parts.group, group_src=model_parts.owner[index - 1])
        hidden = model(hidden, positions=positions, labels=labels)
        if index == model_parts.last:
            return hidden
        dist.send(hidden, group=model_parts.group, group_dst=model_parts.owner[index + 1])
    return None
