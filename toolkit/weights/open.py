"""Open weights on disk in any format: a Hugging Face folder, a Meta folder, or a checkpoint.

A checkpoint is a step-N folder; given a folder of checkpoints or a run's folder, the newest one is opened. A
folder with weights in two formats is rejected, because they may belong to different models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import tensor_entries
from toolkit.checkpoint.manifest import MANIFEST, committed_steps, step_folder
from toolkit.checkpoint.read_tensor import open_checkpoint, read_chunks, saved_chunks
from toolkit.config.local_paths import expand_user
from toolkit.config.types import MAX_LAYERS, MAX_SIZE
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError
from toolkit.io.json_fields import Fields, check_heads, is_count, is_size
from toolkit.models.common.args import (
    Classifier,
    IRoPEArgs,
    LinearScaling,
    MLAArgs,
    ModelArgs,
    MoEArgs,
    RopeScaling,
    Scaling,
    YarnScaling,
)
from toolkit.models.common.spec import CONFIG, PARAMS
from toolkit.models.on_disk import EXPORTS
from toolkit.models.registry import families
from toolkit.optim.optimizer_state import EMA_PREFIX
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import Region, StoredTensor, WeightSource

MODEL_PREFIX = "model."
"""Prefix of a model's tensors in a checkpoint."""

_NEEDED = """it must be one of
    a Hugging Face folder: config.json and model.safetensors, or shards with model.safetensors.index.json
    a Meta folder: params.json and consolidated.00.pth, consolidated.01.pth …
    a checkpoint of this toolkit: a step-N folder, or a folder of step-N folders"""


class CheckpointWeights:
    """The model in a checkpoint, as a :class:`~toolkit.weights.source.WeightSource`.

    ``metadata`` is the validated index of the tensors, ``run`` the manifest's entry. With ``ema``, trained
    weights are their moving average.

    Raises:
        CheckpointError: the manifest has no valid model args, or there is no average.
    """

    def __init__(self, folder: Path, metadata: Metadata, run: Mapping[str, Any], *, ema: bool = False):
        self.place = folder
        self.run = run
        self.args = _args(folder, run.get("model"))
        entries = tensor_entries(metadata)
        if ema and not any(name.startswith(EMA_PREFIX) for name in entries):
            raise CheckpointError(f"{folder} has no EMA of weights: its run did not set optimizer.ema_decay")
        names = [it.removeprefix(MODEL_PREFIX) for it in entries if it.startswith(MODEL_PREFIX)]
        averaged = {name for name in names if ema and EMA_PREFIX + name in entries}
        stored = {name: (EMA_PREFIX if name in averaged else MODEL_PREFIX) + name for name in names}
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(entries[key].size), entries[key].properties.dtype)
            for name, key in stored.items()
        }
        self._chunks = cache(lambda name: saved_chunks(folder, metadata, stored[name]))

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """See :meth:`toolkit.weights.source.WeightSource.read`."""
        stored = self.tensors[name]
        return read_chunks(self._chunks(name), stored.shape, stored.dtype, region, out)


_COUNTS = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "head_dim")


def _args(folder: Path, shape: dict[str, Any] | None) -> ModelArgs:
    """Read model args written by :func:`dataclasses.asdict`, possibly before a field was added."""
    given = Fields(shape or {})
    scaling = given.inner("rope_scaling")
    family = given.values.get("family", ModelArgs.family)
    if family not in families():
        given.reject("family", f"must be {', '.join(families())}, or registered by job.custom_import")
    limits = {"n_layers": MAX_LAYERS}
    counts = {name: given.count(name, at_most=limits.get(name, MAX_SIZE)) for name in _COUNTS}
    args = ModelArgs(
        **counts,
        norm_eps=given.positive("norm_eps", ModelArgs.norm_eps),
        rope_theta=given.positive("rope_theta", ModelArgs.rope_theta),
        rope_scaling=None if scaling is None else _scaling(scaling),
        max_seq_len=given.count("max_seq_len", ModelArgs.max_seq_len),
        tie_embeddings=given.flag("tie_embeddings"),
        qk_norm=given.flag("qk_norm"),
        qkv_bias=given.flag("qkv_bias"),
        out_bias=given.flag("out_bias"),
        sinks=given.flag("sinks"),
        sliding_window=given.count("sliding_window") if "sliding_window" in given.values else None,
        full_attention_step=_size(given, "full_attention_step"),
        family=family if isinstance(family, str) else "",
        classifier=_classifier(given),
        moe=_moe(given),
        mla=_mla(given),
        irope=_irope(given),
    )
    _reject_unknown(given, ModelArgs)
    check_heads(
        given, heads="n_heads", kv_heads="n_kv_heads", n_heads=args.n_heads, n_kv_heads=args.n_kv_heads
    )
    try:
        given.finish(f"the manifest of {folder} has no valid model args")
    except DataError as error:
        raise CheckpointError(str(error)) from None
    return args


def _size(given: Fields, name: str) -> int:
    size = given.values.get(name, 0)
    if not is_size(size):
        given.reject(name, "must be a nonnegative integer")
        return 0
    return size


def _mla(given: Fields) -> MLAArgs | None:
    if (inner := given.inner("mla")) is None:
        return None
    _reject_unknown(inner, MLAArgs)
    names = [field.name for field in fields(MLAArgs) if field.name != "q_lora_rank"]
    rank = inner.count("q_lora_rank") if inner.values.get("q_lora_rank") else 0
    return MLAArgs(q_lora_rank=rank, **{name: inner.count(name) for name in names})


def _irope(given: Fields) -> IRoPEArgs | None:
    if (inner := given.inner("irope")) is None:
        return None
    _reject_unknown(inner, IRoPEArgs)
    temperature = inner.positive("temperature") if inner.values.get("temperature") else 0.0
    return IRoPEArgs(inner.flag("qk_norm"), temperature, inner.count("temperature_floor"))


def _reject_unknown(given: Fields, kind: type) -> None:
    for name in given.values.keys() - {field.name for field in fields(kind)}:
        given.reject(name, "is not a model field of this toolkit")


def _scaling(given: Fields) -> Scaling:
    """Read RoPE scaling as the class that has these fields."""
    factor = given.positive("factor")
    if given.values.keys() == {"factor"}:
        return LinearScaling(factor)
    if "beta_fast" in given.values:
        return YarnScaling(
            factor,
            given.count("original_max_seq_len"),
            given.positive("beta_fast"),
            given.positive("beta_slow"),
            given.positive("attention_factor", 0.0) or None,
            given.flag("truncate", YarnScaling.truncate),
            given.positive("mscale_all_dim", 0.0) if given.values.get("mscale_all_dim") else 0.0,
        )
    return RopeScaling(
        factor,
        given.positive("low_freq_factor", RopeScaling.low_freq_factor),
        given.positive("high_freq_factor", RopeScaling.high_freq_factor),
        given.count("original_max_seq_len", RopeScaling.original_max_seq_len),
    )


def _classifier(given: Fields) -> Classifier | None:
    inner = given.inner("classifier")
    if inner is None:
        return None
    labels, sizes = inner.values.get("labels"), inner.values.get("hidden_sizes", [])
    if not isinstance(labels, list) or not all(isinstance(it, str) for it in labels) or not labels:
        inner.reject("labels", "must be the names of classes")
        labels = []
    if not isinstance(sizes, list) or not all(is_count(size, at_most=MAX_SIZE) for size in sizes):
        inner.reject("hidden_sizes", "must be sizes of layers")
        sizes = []
    return Classifier(tuple(labels), tuple(sizes))


def _moe(given: Fields) -> MoEArgs | None:
    inner = given.inner("moe")
    if inner is None:
        return None
    names = ("num_shared_experts", "num_expert_groups", "num_limited_groups", "first_dense")
    sizes = {name: _size(inner, name) for name in names}
    score_func = inner.values.get("score_func", MoEArgs.score_func)
    if score_func not in ("softmax", "sigmoid"):
        inner.reject("score_func", 'must be "softmax" or "sigmoid"')
    experts, top_k = inner.count("num_experts"), inner.count("top_k")
    _reject_unknown(inner, MoEArgs)
    moe = MoEArgs(
        experts,
        top_k,
        inner.count("ffn_dim"),
        score_func=score_func,
        route_norm=inner.flag("route_norm"),
        route_scale=inner.positive("route_scale", MoEArgs.route_scale),
        expert_bias=inner.flag("expert_bias"),
        step=inner.count("step", MoEArgs.step),
        bias=inner.flag("bias"),
        swiglu_limit=inner.positive("swiglu_limit") if inner.values.get("swiglu_limit") else 0.0,
        swiglu_alpha=inner.positive("swiglu_alpha", MoEArgs.swiglu_alpha),
        score_before_experts=inner.flag("score_before_experts"),
        **sizes,
    )
    for name, rule in {} if inner.problems else moe.broken_rules().items():
        inner.reject(name, rule)
    return moe


def open_weights(
    path: Path | str, *, verify: bool = True, ranks: Ranks | None = None, ema: bool = False
) -> WeightSource:
    """Open the weights at ``path``, reading only headers. ``verify`` checks the hashes of a checkpoint,
    divided among ``ranks`` (:func:`~toolkit.checkpoint.read_tensor.open_checkpoint`). ``ema`` reads the
    moving average of the weights in a checkpoint.

    Raises:
        DataError, CheckpointError: there are no weights, or no average, or their headers, config or manifest
            are invalid.
    """
    folder = expand_user(path)
    step = find_checkpoint(folder)
    if step is not None:
        if step != folder and (other := _first(folder, "*.safetensors", "consolidated.*.pth")):
            raise DataError(
                f"{folder} has a model in two formats, {other.name} and the checkpoint {step}\n"
                f"  fix:  use {step} itself, or move one of them away"
            )
        manifest, metadata = open_checkpoint(step, verify=verify, ranks=ranks)
        return CheckpointWeights(step, metadata, manifest["run"], ema=ema)
    if ema:
        raise DataError(f"{folder} is not a checkpoint of this toolkit; only these have an EMA of weights")
    if not folder.is_dir():
        what, hint = ("is a file", "") if folder.exists() else ("does not exist", _hub_hint(str(path)))
        raise DataError(f"{folder} {what}; {_NEEDED}{hint}")
    if _first(folder, "*.safetensors", "*.safetensors.index.json"):
        return SafetensorsFolder(folder)
    if _first(folder, "consolidated.*.pth"):
        return MetaFolder(folder)
    contents = "no weights"
    if _first(folder, CONFIG, PARAMS):
        contents = "a config but no weights"
    if _first(folder, "pytorch_model*.bin"):
        contents = "only pytorch_model.bin: save the model as safetensors with transformers"
    raise DataError(f"{folder} has {contents}; {_NEEDED}")


def find_checkpoint(folder: Path) -> Path | None:
    """Return ``folder`` if it is a step-N, else the newest step in it; None if there is no checkpoint.

    Raises:
        CheckpointError: there are steps, but none is committed.
    """
    if (folder / MANIFEST).is_file() or (folder.name.startswith("step-") and (folder / ".metadata").exists()):
        return folder
    for candidate in _step_parents(folder):
        if steps := committed_steps(candidate):
            return step_folder(candidate, steps[-1])
    if _first(folder, "step-*/.metadata"):
        raise CheckpointError(f"{folder} has step-N folders, but no committed checkpoint")
    return None


def _step_parents(folder: Path) -> Iterator[Path]:
    """Yield the folders that may contain the steps, ``folder`` and its subfolders, because a run can choose
    the subfolder's name."""
    yield from (folder, folder / "checkpoint")
    if not _first(folder, CONFIG, PARAMS):
        inside = {path.parent for path in folder.glob("*/step-*")}
        yield from sorted(path for path in inside if path.name != EXPORTS)


def _first(folder: Path, *patterns: str) -> Path | None:
    """Return a path in ``folder`` that matches one of the ``patterns``, or None."""
    return next((path for pattern in patterns for path in folder.glob(pattern)), None)


def _hub_hint(name: str) -> str:
    """Return the fix for a path that looks like a model id of the Hugging Face Hub."""
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return ""
    folder = name.partition("/")[2]
    return (
        f"\n  fix:  for a model of the Hugging Face Hub: hf download {name} --local-dir {folder}, then use "
        f"{folder}; a gated model, such as Meta's, requires accepting its license there and hf auth login"
    )
