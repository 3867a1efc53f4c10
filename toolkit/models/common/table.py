"""The table of a model: a row for each parameter and buffer, with all that the toolkit knows of it.

Shapes, initial values, tensor parallelism, FSDP units, names in files, adapters, FLOPs and the planner derive
from the rows of a family; nothing else says what a block is made of. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from toolkit.models.common.args import ModelArgs

EMBEDDING, NORM, HEAD = "tok_embeddings.weight", "norm.weight", "output.weight"
INPUT = ""
"""The hidden states that a block is given, among what a row reads."""


@dataclass(frozen=True)
class Init:
    """A normal distribution, redrawn beyond ``cut`` standard deviations; ``std`` 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


ONES = Init(mean=1.0)


@dataclass(frozen=True)
class Row:
    """A parameter or a buffer.

    Within a block, ``name``, ``hf`` and ``reads`` are relative to it.

    Attributes:
        name: such as attention.wq.weight, or layers.0.attention.wq.weight in a table.
        shape: of the whole tensor.
        init: how it starts.
        hf: Hugging Face's name.
        tensor_parallel: style of its module, a key of :data:`toolkit.parallel.tensor_parallel.STYLES`; None
            leaves it to the module above.
        linear: it is the weight of a linear layer that LoRA, float8, NF4 and Muon may take.
        rotary: dim of the heads whose rows Hugging Face stores in another order (:func:`hf_row_order`); 0 is
            the same order.
        reads: modules whose outputs its module reads, :data:`INPUT` for the block's input; None is all that
            stands before it. Decides where gradients end when a part of the model is frozen.
        buffer: a persistent buffer, equal on all ranks: saved, exported and never trained.
        unit: modules that FSDP gathers together with its own; the block, unless it says otherwise. Without
            any it stays in the root.
        part: where in the model it is.
        block: number of the block.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    hf: str
    tensor_parallel: str | None = "whole"
    linear: bool = False
    rotary: int = 0
    reads: tuple[str, ...] | None = None
    buffer: bool = False
    unit: tuple[str, ...] | None = None
    part: Literal["embedding", "block", "norm", "head"] = "block"
    block: int | None = None

    @property
    def module(self) -> str:
        """Name of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def dense_block(args: ModelArgs, layer: int) -> list[Row]:
    """Rows of a block of Llama and its relatives: grouped-query attention and SwiGLU.

    Initial values are torchtitan's for Llama 3: projections into the residual stream shrink with depth.
    """
    dim, ffn = args.dim, args.ffn_dim
    queries, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    drawn, into_residual = Init(std=0.02), Init(std=0.02 / math.sqrt(2 * (layer + 1)))
    rows = [Row("attention_norm.weight", (dim,), ONES, "input_layernorm.weight", reads=(INPUT,))]
    for ours, theirs, size in (("wq", "q_proj", queries), ("wk", "k_proj", keys), ("wv", "v_proj", keys)):
        weight = Row(
            f"attention.{ours}.weight", (size, dim), drawn, f"self_attn.{theirs}.weight", "column",
            linear=True, rotary=0 if ours == "wv" else args.head_dim, reads=("attention_norm",),
        )  # fmt: skip
        rows.append(weight)
        if args.qkv_bias:
            rows.append(
                replace(weight, name=f"attention.{ours}.bias", shape=(size,), init=Init(),
                        hf=f"self_attn.{theirs}.bias", linear=False)
            )  # fmt: skip
    attended = ("attention.wq", "attention.wk", "attention.wv")
    if args.qk_norm:
        attended = ("attention.q_norm", "attention.k_norm", "attention.wv")
    rows.append(
        Row("attention.wo.weight", (dim, queries), into_residual, "self_attn.o_proj.weight", "row",
            linear=True, reads=attended)
    )  # fmt: skip
    for part in "qk" if args.qk_norm else "":
        rows.append(
            Row(f"attention.{part}_norm.weight", (args.head_dim,), ONES, f"self_attn.{part}_norm.weight",
                rotary=args.head_dim, reads=(f"attention.w{part}",))
        )  # fmt: skip
    rows.append(
        Row("ffn_norm.weight", (dim,), ONES, "post_attention_layernorm.weight", reads=(INPUT, "attention.wo"))
    )
    up = Row(
        "feed_forward.w1.weight", (ffn, dim), drawn, "mlp.gate_proj.weight", "column", linear=True,
        reads=("ffn_norm",),
    )  # fmt: skip
    down = Row(
        "feed_forward.w2.weight", (dim, ffn), into_residual, "mlp.down_proj.weight", "row", linear=True,
        reads=("feed_forward.w1", "feed_forward.w3"),
    )  # fmt: skip
    beside = replace(up, name="feed_forward.w3.weight", init=into_residual, hf="mlp.up_proj.weight")
    return [*rows, up, down, beside]


def decoder_rows(args: ModelArgs, blocks: Iterable[Sequence[Row]]) -> list[Row]:
    """Rows of a decoder with ``blocks``, in the order of its parameters; a tied head has none of its own.

    A tied embedding cannot start with torchtitan's variance of one, under which each token would predict
    itself with logit √D·√D; 0.02 is what tied models use. It stays in FSDP's root, since both ends of the
    forward need it.
    """
    tied = args.tie_embeddings
    table = Row(
        EMBEDDING, (args.vocab_size, args.dim), Init(std=0.02 if tied else 1.0), "model.embed_tokens.weight",
        "embedding", part="embedding", unit=() if tied else ("tok_embeddings",),
    )  # fmt: skip
    rows = [table]
    for layer, block in enumerate(blocks):
        here = f"layers.{layer}"
        rows += [
            replace(row, name=f"{here}.{row.name}", hf=f"model.{here}.{row.hf}", block=layer,
                    unit=(here,) if row.unit is None else tuple(f"{here}.{it}" for it in row.unit))
            for row in block
        ]  # fmt: skip
    last = () if tied else ("norm", "output")
    rows.append(Row(NORM, (args.dim,), ONES, "model.norm.weight", part="norm", unit=last))
    if not tied:
        rows += [replace(row, unit=last) for row in head_rows(args)]
    return rows


def head_rows(args: ModelArgs) -> list[Row]:
    """Rows of the head, a tied one's too: of the vocabulary, or a classifier's.

    Logits start with a variance of about one, so that training starts near ln V. A classifier's scores start
    as transformers' do; a layer before them keeps the size of what goes through it.
    """
    if args.classifier is None:
        init = Init(std=args.dim**-0.5, cut=3.0)
        shape = (args.vocab_size, args.dim)
        return [Row(HEAD, shape, init, "lm_head.weight", "head", part="head")]
    sizes = (args.dim, *args.classifier.hidden_sizes)
    scores = (len(args.classifier.labels), sizes[-1])
    rows = [Row(HEAD, scores, Init(std=0.02), "score.weight", "classifier", part="head")]
    for at, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        name = f"output.hidden.{at}.weight"
        rows.append(Row(name, (out, into), Init(std=into**-0.5), name, None, part="head"))
    return rows


class Table(Mapping[str, Row]):
    """The rows of a model by name, in the order of its parameters."""

    def __init__(self, args: ModelArgs, rows: Iterable[Row]):
        self._rows = {row.name: row for row in rows}
        tied_head = head_rows(args) if args.tie_embeddings else []
        self._all = [*self._rows.values(), *tied_head]
        self._hf = {row.name: row.hf for row in self._all}
        self._ours = {theirs: ours for ours, theirs in self._hf.items()}

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of parameters and buffers by name."""
        return {name: row.shape for name, row in self.items()}

    @cached_property
    def linear(self) -> dict[str, tuple[int, ...]]:
        """Shapes (N, K) of the weights of linear layers by the layers' names."""
        return {row.module: row.shape for row in self.values() if row.linear}

    @property
    def parameters(self) -> int:
        """Number of distinct parameters; a tied head counts once."""
        return sum(row.size for row in self.values() if not row.buffer)

    @cached_property
    def blocks(self) -> list[list[Row]]:
        """The parameters of each block."""
        parameters = [row for row in self.values() if row.block is not None and not row.buffer]
        return [list(rows) for _, rows in groupby(parameters, lambda row: row.block)]

    @cached_property
    def block_sizes(self) -> list[int]:
        """Number of parameters of each block."""
        return [sum(row.size for row in rows) for rows in self.blocks]

    def units(self) -> list[tuple[str, ...]]:
        """The modules of each FSDP unit, in forward order."""
        return list(dict.fromkeys(row.unit for row in self.values() if row.unit))

    def tensor_plan(self) -> dict[str, str]:
        """Styles of tensor parallelism by module. A module of column-wise layers gathers their input."""
        plan = {row.module: row.tensor_parallel for row in self._all if row.tensor_parallel}
        above = (module.rpartition(".")[0] for module, style in plan.items() if style == "column")
        return plan | dict.fromkeys(above, "gather")

    def to_hf(self, name: str) -> str:
        """Hugging Face's name of ``name``, a tied head's too.

        Raises:
            KeyError: the model has no such parameter.
        """
        return self._hf[name]

    def from_hf(self, name: str) -> str | None:
        """Our name of Hugging Face's tensor ``name``; None for rotary frequencies, which are no weights.

        A name of no tensor of the model is marked, to be reported as one too many: it might be one of ours,
        as norm.weight is in a model saved without its head.
        """
        if name.endswith("rotary_emb.inv_freq"):
            return None
        return self._ours.get(name, f"{name} (not of this model)")


def hf_row_order(rows: Sequence[int], head_dim: int) -> list[int]:
    """For each of Hugging Face's ``rows`` of q_proj or k_proj, our row with the same values.

    RoPE turns pairs of rows of a head. Meta's (and our) pairs are neighbors, 2p and 2p + 1; Hugging Face's
    are half a head apart, p and p + E/2, E being the head dim. So the rows of each head are in another order
    in what makes queries and keys, or weighs them, and only there.
    """
    half = head_dim // 2
    return [row - row % head_dim + row % head_dim % half * 2 + row % head_dim // half for row in rows]
