"""Weights of tokens in the loss, beside a plain computation of one conversation after the other in fp64."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.curves import write_tokenizer
from tests.helpers import run_world
from tests.meshes import PAIR_TEMPLATE
from tests.training import small_config, small_trainer
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
from toolkit.data.chat.shapes import Shape
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.models.common.decoder import Decoder

Row = dict[str, Any]
EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}


def _row(*turns: tuple[str, str, float | None], weight: float | None = None) -> Row:
    """A question, an answer and its weight, for each turn."""
    messages: list[Row] = []
    for question, answer, of_answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages[-1] |= {} if of_answer is None else {"weight": of_answer}
    return {"messages": messages} | ({} if weight is None else {"weight": weight})


WEIGHTED = [
    _row(("ab", "cdefgh", None), weight=2),
    _row(("a", "bbbh", 0.3), ("cc", "da", None), weight=0.7),
    _row(("abc", "fgh", 0), ("bad", "cab", 5)),
    _row(("gab", "hhh", None)),
    _row(("e", "gggggg", None), weight=0),
]


def _run(folder: str, rows: Sequence[Row], *, held_out: Sequence[Row] = (), **data: Any) -> Row:
    """One step over all ``rows``: its loss and gradients, and the weights before it, gathered."""
    place = Path(folder, f"{abs(hash(json.dumps([rows, held_out, data])))}")
    place.mkdir(exist_ok=True)
    files = {"train": rows, "held_out": held_out or rows}
    for name, held in files.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    chat = {"format": "messages", "chat_template": PAIR_TEMPLATE, "empty_mask": "drop"}
    packing = data.get("packing", False)
    n = 1 if packing else sum(row.get("weight") != 0 for row in rows)
    trainer = small_trainer(
        small_config(
            place / "run",
            model={"dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
            | {"vocab_size": 516, "hf_assets_path": str(write_tokenizer(place / "tokenizer"))},
            data={**chat, **data, "packing": packing},
            training={"dataset_path": str(place / "train.jsonl"), "steps": 1, "seq_len": 96, **EXACT}
            | {"global_batch_size": n, "local_batch_size": 1, "loss_chunk_tokens": 40},
            validation={"enable": True, "dataset_path": str(place / "held_out.jsonl"), "seq_len": 96},
            optimizer={"lr": 0.0},
        )
    )
    parts, found = trainer.model_parts, Row()
    found["model"] = {name: _whole(it.detach()).clone() for name, it in parts.named_parameters()}
    backward = parts.backward

    def watched(*args: Any) -> Tensor:
        total = backward(*args)
        found["gradients"] = {name: _whole(it.grad).clone() for name, it in parts.named_parameters()}
        return total

    parts.backward = watched  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert trainer.loader.epoch_samples == n
    found["loss"], found["validation"] = (
        next(record[name] for record in trainer.history if name in record)
        for name in ("loss", "validation_loss")
    )
    found["args"] = trainer.args
    return found


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _plain(folder: str, rows: Sequence[Row], found: Row) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one conversation after the other, each by itself, from its logits."""
    tokenizer = load_tokenizer(write_tokenizer(Path(folder, "tokenizer")))
    encoder = ConversationEncoder(tokenizer, Shape("messages"), ChatOptions(template=PAIR_TEMPLATE), "int64")
    model = Decoder(found["args"]).double()
    model.load_state_dict(found["model"])
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        messages = [{key: message[key] for key in ("role", "content")} for message in row["messages"]]
        ids, mask = encoder.encode(Shape("messages").conversation({"messages": messages}, ""), "")
        logits = model(torch.from_numpy(ids)[None, :-1])[0]
        losses = F.cross_entropy(logits, torch.from_numpy(ids)[1:], reduction="none")
        answers = iter(message for message in row["messages"] if message["role"] == "assistant")
        learning, weight = False, 0.0
        for loss, learnt in zip(losses, mask[1:], strict=True):
            if learnt and not learning:  # a user's turn is before each of the assistant's
                weight = row.get("weight", 1) * next(answers).get("weight", 1)
            learning = bool(learnt)
            total, weights = total + learnt * weight * loss, weights + learnt * weight
    mean = total / weights
    mean.backward()
    return mean.item(), {name: it.grad for name, it in model.named_parameters() if it.grad is not None}


def _compared(folder: str) -> Row:
    packed = _run(folder, WEIGHTED, packing=True)
    return {
        "plain": _plain(folder, WEIGHTED, packed),
        "packed": packed,
        "padded": _run(folder, WEIGHTED),
        "twice": _run(
            folder, [WEIGHTED[0] | {"weight": 1}, *[WEIGHTED[0] | {"weight": None}], *WEIGHTED[1:]]
        ),
        "once": _run(folder, WEIGHTED[:4]),
        "small": _run(folder, [row | {"weight": 0.001 * row.get("weight", 1)} for row in WEIGHTED]),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Row:
    return run_world(_compared, 1, str(tmp_path_factory.mktemp("weights")))[0]


@pytest.mark.parametrize("name", ["packed", "padded", "twice", "once", "small"])
def test_loss_and_gradients_are_sums_by_weight_over_the_sum_of_weights(found: Row, name: str) -> None:
    """Packed; one row each, accumulated; a row of weight 2 twice; one of weight 0 left out; and with weights
    that add up to less than 1."""
    loss, gradients = found["plain"]
    rounded = 1e-7  # of weights, which are in fp32
    assert found[name]["loss"] == pytest.approx(loss, rel=rounded)
    assert found[name]["validation"] == pytest.approx(loss, rel=rounded)
    assert found[name]["gradients"].keys() == gradients.keys()
    for parameter, gradient in found[name]["gradients"].items():
        difference = (gradient - gradients[parameter]).abs().max() / gradients[parameter].abs().max()
        assert difference < 1e-6, parameter


def test_a_row_of_weight_two_is_the_row_twice(found: Row) -> None:
    once, twice = found["padded"], found["twice"]
    assert twice["loss"] == pytest.approx(once["loss"], rel=1e-14)
    for name, gradient in once["gradients"].items():
        assert torch.allclose(twice["gradients"][name], gradient, rtol=1e-11, atol=1e-14), name


def _beside_validation(folder: str) -> list[tuple[float, float]]:
    plain = [_row(("ab", "cdefgh", None)), _row(("gab", "hhh", None)), _row(("abc", "fgh", None))]
    runs = [
        _run(folder, plain),
        _run(folder, plain, held_out=WEIGHTED),
        _run(folder, WEIGHTED, held_out=plain),
    ]
    return [(run["loss"], run["validation"]) for run in runs]


def test_weights_of_the_validation_alone_leave_the_training_as_it_is(tmp_path: Path, found: Row) -> None:
    plain, validated, trained = run_world(_beside_validation, 1, str(tmp_path))[0]
    assert validated[0] == plain[0] and trained[1] == plain[1]
    assert validated[1] == pytest.approx(found["plain"][0], rel=1e-7)
    assert trained[0] == pytest.approx(found["plain"][0], rel=1e-7)
