"""One short run of a layout of tests/meshes.py, compared number by number with one process.

The runs are the trainer's own, from a configuration. Of each are taken the initial weights, every gradient
of the first step before it is clipped, losses and norms of all steps, the weights after the last, and a
validation at its own batch shape, through tensors that are gathered whole from wherever their parts are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import tests.models.gated_family
import tests.models.moe_family  # noqa: F401  registers the family
from tests import meshes
from tests.curves import differences, write_tokenizer
from tests.helpers import in_layout
from tests.traffic import Sent, Traffic, label
from tests.training import small_config, small_trainer
from toolkit.config import Config
from toolkit.distributed.process_group import DTYPES
from toolkit.hardware import detect
from toolkit.models import parameters
from toolkit.models.common.args import Classifier
from toolkit.models.common.parameter_table import ONES
from toolkit.models.registry import resolve, spec
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.pipeline_schedules import pipeline_stages
from toolkit.planner.traffic import Exchange, step_traffic
from toolkit.preflight.planned_run import PlannedRun

STEPS = 2

LIMITS = {"float64": (1e-9, 1e-8), "float32": (1e-5, 1e-3), "bfloat16": (1e-1, 3e-1)}
"""The largest relative differences of the first step (loss, norm, gradients), and of what comes after it.

A sum of hundreds rounds by some 1e-15, 1e-6 or 1e-2 in these precisions. Where a gradient is as small as its
rounding, AdamW makes an update of full size of it, hence the second; wrong factors are larger than all. In
bfloat16, weights that were updated in opposite directions are 0.26 of the largest one apart."""

SERIES = ("losses", "norms", "validation", "rewards")

Result = dict[str, Any]
"""The result of :func:`compare`: plain values, so that a world can hand it back and a file keep it."""


def configure(folder: str | Path, layout: str, sizes: meshes.Settings | None = None) -> Config:
    """The config of a layout that keeps its files in ``folder``, with other ``sizes`` than the table's."""
    folder = Path(folder)
    special = dict.fromkeys(("dpo", "cpo", "simpo", "orpo"), write_pairs)
    special |= {"kto": write_labeled, "reward": write_margins, "weighted": write_weighted}
    write = next((special[word] for word in layout.split() if word in special), write_documents)
    data = {
        "training.dataset_path": write(folder / f"{write.__name__}.jsonl", 400),
        "validation.dataset_path": write(folder / f"{write.__name__}.held-out.jsonl", 12),
        "model.hf_assets_path": str(write_tokenizer(folder / "tokenizer")),
    }
    values: meshes.Settings = {
        "training.steps": STEPS,
        "training.global_batch_size": meshes.SAMPLES,
        "validation.enable": True,
        "validation.freq": STEPS,
        "validation.seq_len": 16,
        "validation.local_batch_size": 3,
        **data,
        **meshes.settings(layout, sizes or {}),
    }
    if "distill" in layout.split():
        values["distillation.teacher_path"] = str(write_teacher(folder / "teacher"))
    if "whole" in layout.split():  # each layout computes its reference
        values["data.cache_folder"] = str(folder / "caches" / layout.replace(" ", "_"))
    degrees = meshes.degrees(layout)
    dp = degrees.get("replicate", 1) * degrees.get("shard", 1)
    local = meshes.SAMPLES // (dp * meshes.accumulation(layout))
    local = values.setdefault("training.local_batch_size", local)
    config = _nested(folder, layout, values)
    stages = len(pipeline_stages(config.parallelism, values["model.n_layers"]).modules)
    if stages > 1:
        sizes = [size for size in range(1, local + 1) if local % size == 0 and local // size >= stages]
        values.setdefault("parallelism.pipeline_parallel_microbatch_size", max(sizes or [1]))
    return _nested(folder, layout, values)


def write_pairs(file: Path, count: int) -> str:
    """Pairs of answers of other lengths, of which a row has several and some are cut."""
    if not file.exists():
        chance = random.Random(count)

        def text() -> str:
            return "".join(chance.choices("abcdefgh", k=chance.randint(1, 6)))

        rows = [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(count)]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_margins(file: Path, count: int) -> str:
    """The same pairs, of which some have margins."""
    if not file.exists():
        pairs = Path(write_pairs(file.with_name(f"of-{file.name}"), count)).read_text().splitlines()
        margins = [{}, {"margin": 0.5}, {"margin": 2}, {"margin": None}]
        rows = [json.loads(pair) | margins[number % 4] for number, pair in enumerate(pairs)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_labeled(file: Path, count: int) -> str:
    """The same answers one by one, of which every third is undesirable."""
    if not file.exists():
        pairs = Path(write_pairs(file.with_name(f"of-{file.name}"), count)).read_text().splitlines()
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 1}
            for number, row in enumerate(map(json.loads, pairs))
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_weighted(file: Path, count: int) -> str:
    """Conversations of which rows and messages have weights, some of them 0 or none."""
    if not file.exists():
        chance = random.Random(count)

        def message(role: str) -> dict[str, Any]:
            text = "".join(chance.choices("abcdefgh", k=chance.randint(1, 6)))
            weight = chance.choice([None, 1, 0.25, 3, 0]) if role == "assistant" else None
            return {"role": role, "content": text, "weight": weight}

        rows = [
            {
                "messages": [message(role) for _ in range(2) for role in ("user", "assistant")],
                "weight": chance.choice([None, 0.1, 1, 7.5]),
            }
            for _ in range(count)
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_teacher(folder: Path, vocab: int = 516, labels: tuple[str, ...] = ()) -> Path:
    """Make ``folder`` one of a Llama of other sizes with large random weights, in Hugging Face's format, or
    of a classifier with ``labels``."""
    if not folder.exists():
        sizes = {"dim": 48, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 52, "vocab_size": vocab}
        args = resolve("llama3", "debugmodel", **sizes)
        args = dataclasses.replace(args, classifier=Classifier(labels) if labels else None)
        torch.manual_seed(7)
        rows = parameters.table(args).values()
        tensors = {row.hf: torch.randn(row.hf_shape) * 0.2 + (row.init == ONES) for row in rows}
        config = spec(args.family).hf_config().write(args, dtype="float32", bos=None, eos=None, pad=None)
        part = folder.with_name(f"{folder.name}.{os.getpid()}")  # several ranks may come at once
        part.mkdir(parents=True)
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(OSError):
            part.rename(folder)
    return folder


def _nested(folder: Path, layout: str, values: meshes.Settings) -> Config:
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        inner: dict[str, Any] = tables
        for table in path:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return small_config(folder / "runs" / layout.replace(" ", "_"), **tables)


def write_documents(file: Path, count: int) -> str:
    """A corpus of documents so short that every row has several, which begin anywhere in it."""
    if not file.exists():
        chance = random.Random(count)
        texts = ["".join(chance.choices("abcdefgh ", k=chance.randint(1, 30))) for _ in range(count)]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text, "label": len(text) % 2}) + "\n" for text in texts))
    return str(file)


# A run

# It warns that pieces are gathered one dimension of the mesh after the other, which here does not matter.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def run(folder: str, layout: str) -> dict[str, Any]:
    """Train the layout in the world that is there. Tensors are those of this rank's stages, whole, as pairs
    of name and tensor, copies under the name of what they repeat."""
    torch._dynamo.reset()
    trainer = small_trainer(configure(folder, layout))
    model_parts = trainer.model_parts
    taken: dict[str, Any] = {"initial": _whole(model_parts, lambda parameter: parameter)}
    backward = model_parts.backward

    def watched(*args: Any) -> Tensor:
        total = backward(*args)
        if "gradients" not in taken:
            taken["gradients"] = _gradients(model_parts)
        return total

    model_parts.backward = watched
    sent: Sent = {}
    taken["sent"] = sent
    if "compiled" not in layout.split():  # torch runs no compiled code while operators are watched
        trainer.train_step = _counted(trainer.train_step, sent)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    steps = [record for record in trainer.history if "loss" in record]
    return (
        taken
        | {
            "final": _whole(model_parts, lambda parameter: parameter),
            "losses": [record["loss"] for record in steps],
            "norms": [record["grad_norm"] for record in steps],
            "validation": [
                record[key]
                for record in trainer.history
                for key in (
                    "validation_loss",
                    "validation_ema_loss",
                    "validation_accuracy",
                    "validation_f1",
                )
                if key in record
            ],
            "rewards": [
                value  # after the first step, where they are 0
                for record in trainer.history[1:]
                for name, value in record.items()
                if "rewards/" in name or name.startswith(("gate_", "moe/", "distillation/"))
            ],
        }
    )


def _counted(train_step: Callable[..., Any], sent: Sent) -> Callable[..., Any]:
    """``train_step``, which adds what it sends to ``sent`` the second time that it is called."""
    steps = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(steps) != 2:
            return train_step(*args, **kwargs)
        with Traffic() as traffic:
            result = train_step(*args, **kwargs)
        sent.update(traffic.bytes)
        return result

    return counted


def _whole(model_parts: ModelParts, of: Callable[[Any], Any]) -> list[tuple[str, Tensor]]:
    named = [*model_parts.named_parameters(), *model_parts.tied_copies(), *model_parts.named_buffers()]
    return [(name, _gathered(of(parameter))) for name, parameter in named]


def _gradients(model_parts: ModelParts) -> list[tuple[str, Tensor]]:
    """Those of what is trained; NaN where one is missing, or where there is one of what is frozen."""
    named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
    assert not [name for name, it in named if not it.requires_grad and it.grad is not None]
    return [(name, _gathered(parameter.grad)) for name, parameter in named if parameter.requires_grad]


def _gathered(tensor: Tensor | None) -> Tensor:
    if tensor is None:  # differs from everything
        return torch.tensor(math.nan)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


# What is sent


def planned(folder: str | Path, layout: str, ranks: Iterable[int] | None = None) -> list[list[Exchange]]:
    """Exchanges in a step of each rank of a layout, or of some ``ranks``, as the planner counts them."""
    config = configure(folder, layout)
    run = PlannedRun(config, meshes.ranks(layout), detect())
    assert run.mesh and run.model
    dtype = DTYPES[config.training.mixed_precision_param]
    return [
        step_traffic(config, run.model, run.mesh, rank, param_dtype=dtype)
        for rank in (range(run.world_size) if ranks is None else ranks)
    ]


def added_up(exchanges: Iterable[Exchange]) -> Sent:
    """Exchanges as they are counted."""
    sent: Counter[str] = Counter()
    for exchange in exchanges:
        # A run does not tell all-to-alls of experts from ring attention's.
        operation = "send" if exchange.dimension == "ep" else exchange.operation
        sent[label(operation, exchange.ranks)] += exchange.bytes
    return dict(sent)


# Comparing


def record(folder: str, layouts: Sequence[str]) -> None:
    """Run references in a world of one process, and keep what others are compared with."""
    for layout in layouts:
        torch.save(run(folder, layout), recording(folder, layout))


def recording(folder: str | Path, layout: str) -> Path:
    """Where what a reference gave is kept."""
    return Path(folder, f"{layout.replace(' ', '_')}.pt")


def compare(folder: str, layout: str) -> Result:
    """Run the layout in a world of its ranks and compare it with its reference; every rank returns the same.

    Names whose initial weights differ in any bit, and those that no rank has; relative errors of gradients
    and last weights by name, of losses and norms by step, and of the validation; what each rank sends in a
    step.
    """
    expected = torch.load(recording(folder, meshes.reference(layout)))
    found = run(folder, layout)
    initial, gradients, final = (dict(expected[part]) for part in ("initial", "gradients", "final"))
    mine = {
        "names": [name for name, _ in found["initial"]],
        "other": [name for name, tensor in found["initial"] if not torch.equal(tensor, initial[name])],
        "gradients": _errors(found["gradients"], gradients),
        "parameters": _errors(found["final"], final),
        "sent": found["sent"],
    }
    mine |= {what: dict(enumerate(differences(found[what], expected[what]))) for what in SERIES}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    names = {name for rank in ranks for name in rank["names"]}
    return {
        "other": sorted({name for rank in ranks for name in rank["other"]}),
        "missing": sorted(initial.keys() ^ names),
        "sent": [rank["sent"] for rank in ranks],
        **{what: _worst(rank[what] for rank in ranks) for what in ("gradients", "parameters")},
        **{what: list(_worst(rank[what] for rank in ranks).values()) for what in SERIES},
    }


def _errors(found: Iterable[tuple[str, Tensor]], expected: dict[str, Tensor]) -> dict[str, float]:
    return _worst({name: error(tensor, expected[name])} for name, tensor in found)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number expected, if that is not 0; NaN where either has
    one."""
    largest_expected = expected.abs().max()
    return ((found - expected).abs().max() / torch.where(largest_expected == 0, 1, largest_expected)).item()


def _worst(many: Iterable[dict[Any, float]]) -> dict[Any, float]:
    """The largest value of each key; NaN is larger than all."""
    worst: dict[Any, float] = {}
    for errors in many:
        for key, value in errors.items():
            worst[key] = largest([value, worst.get(key, 0.0)])
    return worst


def largest(values: Iterable[float]) -> float:
    """The largest, NaN where there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


def problems(layout: str, result: Result) -> list[str]:
    """Problems of a result; none where the layout gives the run of one process."""
    first, later = LIMITS[meshes.precision(layout)]
    said = [f"{name}: other initial weights" for name in result["other"]]
    said += [f"{name}: on one side only" for name in result["missing"]]
    measured = [(f"gradient of {name}", value, first) for name, value in result["gradients"].items()]
    measured += [(f"{name} at the end", value, later) for name, value in result["parameters"].items()]
    for what in ("losses", "norms"):
        measured += [
            (f"{what}, step {step + 1}", value, later if step else first)
            for step, value in enumerate(result[what])
        ]
    measured += [(what, value, later) for what in ("validation", "rewards") for value in result[what]]
    return said + [f"{what}: {value:.1e}" for what, value, limit in measured if not value <= limit]


def compare_all(folder: str, layouts: Sequence[str]) -> list[Result]:
    """One layout after the other, all of as many ranks as the world has; one that fails is named."""
    results = []
    for layout in layouts:
        with in_layout(layout):
            results.append(compare(folder, layout))
    return results
