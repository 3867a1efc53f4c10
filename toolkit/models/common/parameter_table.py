"""The parameter table of a model: one row per parameter and buffer. Imports no torch.

The rows are the only description of a block's structure. Shapes, initialization, tensor parallelism, FSDP
units, names in files, adapters, FLOPs and the planner all derive from them.
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
"""Name in ``reads`` for a block's input hidden states."""


@dataclass(frozen=True)
class Init:
    """A normal distribution truncated at ``cut`` standard deviations; ``std`` 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


ONES = Init(mean=1.0)


@dataclass(frozen=True)
class Fused:
    """Layout of a Hugging Face tensor that contains ``count`` parameters of all experts side by side in the
    last dimension, transposed. This parameter has the block of columns with the index ``first`` or, if
    ``interleaved``, every ``count``-th column from ``first`` on. ``peft_swaps`` tells whether PEFT takes the
    inputs for outputs, because transformers does not mark the tensor as transposed."""

    first: int = 0
    count: int = 1
    interleaved: bool = False
    peft_swaps: bool = False

    def columns(self, size: int, rows: slice | None = None) -> slice:
        """Return the columns that store ``rows`` of the parameter, by default all ``size`` of them."""
        rows = rows or slice(0, size)
        if self.interleaved:
            return slice(rows.start * self.count + self.first, rows.stop * self.count, self.count)
        return slice(self.first * size + rows.start, self.first * size + rows.stop)


@dataclass(frozen=True)
class ParameterRow:
    """A parameter or a buffer.

    Within a block, ``name``, ``hf`` and ``reads`` are relative to the block.

    Attributes:
        name: such as attention.wq.weight, or layers.0.attention.wq.weight in a table.
        shape: shape of the full tensor.
        init: distribution of the initial values.
        hf: name in Hugging Face checkpoints.
        tensor_parallel: tensor-parallel style of its module, a key of
            :data:`toolkit.parallel.tensor_parallel.STYLES`; None leaves it to the parent module.
        linear: weight of a linear layer, to which LoRA, float8, NF4 and Muon may apply.
        router: weight of a router, to which LoRA applies only if it is named.
        outer: weight of an untied embedding or LM head, to which LoRA applies only if it is named.
        rotary: head dim, if Hugging Face stores the rows of each head in another order
            (:func:`hf_row_order`); 0 if the order is the same.
        reads: modules whose outputs its module reads, or :data:`INPUT` for the block's input; None means
            everything before it. Decides where backward ends if part of the model is frozen.
        buffer: a persistent buffer, equal on all ranks: saved, exported and never trained, in at least
            fp32.
        unit: modules of its FSDP unit, all-gathered together; None is the block, and () the root.
        part: part of the model that it belongs to.
        block: index of the block.
        experts: number of experts that are stacked in the first dimension; 0 if it belongs to none. ``hf`` is
            then the name of one expert's matrix, with {} for its index, unless it is ``fused``.
        fused: layout in Hugging Face checkpoints, if a tensor contains all experts.
        chosen: number of the experts that compute a token.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    hf: str
    tensor_parallel: str | None = "whole"
    linear: bool = False
    router: bool = False
    outer: bool = False
    rotary: int = 0
    reads: tuple[str, ...] | None = None
    buffer: bool = False
    unit: tuple[str, ...] | None = None
    part: Literal["embedding", "block", "norm", "head"] = "block"
    block: int | None = None
    experts: int = 0
    chosen: int = 0
    fused: Fused | None = None

    @property
    def module(self) -> str:
        """Name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert_matrix(self) -> bool:
        """True if a matrix of each expert is stacked in it."""
        return self.experts > 0 and len(self.shape) == 3

    @property
    def is_block_matrix(self) -> bool:
        """True if it is the weight of a block's linear layer or experts, but not of a router."""
        return self.linear or self.is_expert_matrix

    @property
    def hf_names(self) -> list[str]:
        """Names in Hugging Face checkpoints: one, or one per expert."""
        each = self.experts and self.fused is None
        return [self.hf.format(expert) for expert in range(self.experts)] if each else [self.hf]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape in Hugging Face checkpoints: the parameter's, or that of one expert's matrix or of the fused
        tensor."""
        if self.fused is not None:
            experts, rows, *columns = self.shape
            return (experts, *columns, rows * self.fused.count)
        return self.shape[1:] if self.experts else self.shape

    @property
    def active_size(self) -> int:
        """Number of elements used to compute one token."""
        return self.size // self.experts * self.chosen if self.experts else self.size


def block_rows(args: ModelArgs, layer: int) -> list[ParameterRow]:
    """Return the rows of block ``layer``: grouped-query or latent attention, and SwiGLU or experts."""
    attention = latent_attention_rows(args, layer) if args.mla else attention_rows(args, layer)
    if args.moe and args.moe.has_experts(layer):
        return [*attention, *moe_rows(args, layer)]
    return [*attention, *feed_forward_rows(args, layer, args.ffn_dim)]


def _inits(layer: int) -> tuple[Init, Init]:
    """Return torchtitan's initialization for Llama 3: that of most projections, and that of projections into
    the residual stream, which shrinks with depth."""
    return Init(std=0.02), Init(std=0.02 / math.sqrt(2 * (layer + 1)))


def attention_rows(args: ModelArgs, layer: int) -> list[ParameterRow]:
    """Return the rows of a block's norms and grouped-query attention."""
    dim = args.dim
    queries, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    drawn, into_residual = _inits(layer)
    rows = [ParameterRow("attention_norm.weight", (dim,), ONES, "input_layernorm.weight", reads=(INPUT,))]
    for ours, theirs, size in (("wq", "q_proj", queries), ("wk", "k_proj", keys), ("wv", "v_proj", keys)):
        weight = ParameterRow(
            f"attention.{ours}.weight", (size, dim), drawn, f"self_attn.{theirs}.weight", "column",
            linear=True, rotary=0 if ours == "wv" else args.head_dim, reads=("attention_norm",),
        )  # fmt: skip
        rows.append(weight)
        if args.qkv_bias:
            rows.append(
                replace(weight, name=f"attention.{ours}.bias", shape=(size,), init=Init(),
                        hf=f"self_attn.{theirs}.bias", linear=False)
            )  # fmt: skip
    attended: tuple[str, ...] = ("attention.wq", "attention.wk", "attention.wv")
    if args.qk_norm:
        attended = ("attention.q_norm", "attention.k_norm", "attention.wv")
    if args.sinks:
        attended += ("attention.sinks",)
    out = ParameterRow(
        "attention.wo.weight", (dim, queries), into_residual, "self_attn.o_proj.weight", "row",
        linear=True, reads=attended,
    )  # fmt: skip
    rows.append(out)
    if args.out_bias:
        rows.append(
            replace(out, name="attention.wo.bias", shape=(dim,), init=Init(), hf="self_attn.o_proj.bias",
                    linear=False)
        )  # fmt: skip
    for part in "qk" if args.qk_norm else "":
        rows.append(
            ParameterRow(f"attention.{part}_norm.weight", (args.head_dim,), ONES,
                f"self_attn.{part}_norm.weight", rotary=args.head_dim, reads=(f"attention.w{part}",))
        )  # fmt: skip
    if args.sinks:
        rows.append(
            ParameterRow("attention.sinks.weight", (args.n_heads,), drawn, "self_attn.sinks", "column",
                reads=("attention_norm",))
        )  # fmt: skip
    rows.append(
        ParameterRow(
            "ffn_norm.weight", (dim,), ONES, "post_attention_layernorm.weight", reads=(INPUT, "attention.wo")
        )
    )
    return rows


def latent_attention_rows(args: ModelArgs, layer: int) -> list[ParameterRow]:
    """Return the rows of a block's norms and latent attention. The projections to latent vectors are
    replicated over a tp group; those from them are split by heads."""
    mla, dim = args.mla, args.dim
    assert mla is not None
    drawn, into_residual = _inits(layer)
    queries = args.n_heads * args.head_dim
    made = args.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    latent, rope = mla.kv_lora_rank, mla.qk_rope_head_dim

    def linear(name: str, shape: tuple[int, int], hf: str, style: str, reads: str) -> ParameterRow:
        return ParameterRow(
            f"attention.{name}.weight", shape, drawn, f"self_attn.{hf}.weight", style, linear=True,
            reads=(reads,),
        )  # fmt: skip

    def norm(name: str, size: int, hf: str, reads: str) -> ParameterRow:
        return ParameterRow(
            f"attention.{name}.weight", (size,), ONES, f"self_attn.{hf}.weight", reads=(reads,)
        )

    rows = [ParameterRow("attention_norm.weight", (dim,), ONES, "input_layernorm.weight", reads=(INPUT,))]
    if rank := mla.q_lora_rank:
        rows += [
            linear("wq_a", (rank, dim), "q_a_proj", "whole", "attention_norm"),
            norm("q_norm", rank, "q_a_layernorm", "attention.wq_a"),
            linear("wq_b", (queries, rank), "q_b_proj", "column", "attention.q_norm"),
        ]
    else:
        rows.append(linear("wq", (queries, dim), "q_proj", "column", "attention_norm"))
    rows += [
        linear("wkv_a", (latent + rope, dim), "kv_a_proj_with_mqa", "whole", "attention_norm"),
        norm("kv_norm", latent, "kv_a_layernorm", "attention.wkv_a"),
        linear("wkv_b", (made, latent), "kv_b_proj", "column", "attention.kv_norm"),
    ]
    attended = ("attention.wq_b" if mla.q_lora_rank else "attention.wq", "attention.wkv_a", "attention.wkv_b")
    out = linear("wo", (dim, args.n_heads * mla.v_head_dim), "o_proj", "row", "")
    rows.append(replace(out, init=into_residual, reads=attended))
    rows.append(
        ParameterRow(
            "ffn_norm.weight", (dim,), ONES, "post_attention_layernorm.weight", reads=(INPUT, "attention.wo")
        )
    )
    return rows


def feed_forward_rows(
    args: ModelArgs, layer: int, ffn_dim: int, module: str = "feed_forward", hf: str = "mlp"
) -> list[ParameterRow]:
    """Return the rows of a SwiGLU feed-forward."""
    drawn, into_residual = _inits(layer)
    up = ParameterRow(
        f"{module}.w1.weight", (ffn_dim, args.dim), drawn, f"{hf}.gate_proj.weight", "column", linear=True,
        reads=("ffn_norm",),
    )  # fmt: skip
    down = ParameterRow(
        f"{module}.w2.weight", (args.dim, ffn_dim), into_residual, f"{hf}.down_proj.weight", "row",
        linear=True, reads=(f"{module}.w1", f"{module}.w3"),
    )  # fmt: skip
    return [up, down, replace(up, name=f"{module}.w3.weight", init=into_residual, hf=f"{hf}.up_proj.weight")]


def moe_rows(args: ModelArgs, layer: int) -> list[ParameterRow]:
    """Return the rows of a router, its experts and shared experts."""
    moe = args.moe
    assert moe is not None
    drawn, into_residual = _inits(layer)
    experts, dim, ffn = moe.num_experts, args.dim, moe.ffn_dim
    rows = []
    if moe.expert_bias:
        rows.append(
            ParameterRow("moe.expert_bias", (experts,), Init(), "mlp.gate.e_score_correction_bias", None,
                buffer=True)
        )  # fmt: skip
    gate = ParameterRow(
        "moe.router.gate.weight", (experts, dim), into_residual, "mlp.gate.weight", router=True,
        reads=("ffn_norm",),
    )  # fmt: skip
    up = ParameterRow(
        "moe.experts.w1", (experts, ffn, dim), drawn, "mlp.experts.{}.gate_proj.weight", "experts",
        reads=("ffn_norm", "moe.router.gate"), experts=experts, chosen=moe.top_k,
    )  # fmt: skip
    down = replace(
        up, name="moe.experts.w2", shape=(experts, dim, ffn), init=into_residual,
        hf="mlp.experts.{}.down_proj.weight",
    )  # fmt: skip
    beside = replace(up, name="moe.experts.w3", init=into_residual, hf="mlp.experts.{}.up_proj.weight")
    rows.append(gate)
    if moe.bias:
        bias = replace(gate, name="moe.router.gate.bias", shape=(experts,), hf="mlp.gate.bias")
        rows.append(replace(bias, init=Init(), router=False))
    rows += [up, down, beside]
    if moe.bias:
        rows += [
            replace(row, name=f"{row.name}_bias", shape=row.shape[:2], init=Init(),
                    hf=row.hf.replace("weight", "bias"))
            for row in (up, down, beside)
        ]  # fmt: skip
    if shared := moe.num_shared_experts:
        rows += feed_forward_rows(args, layer, shared * ffn, "moe.shared_experts", "mlp.shared_experts")
    return rows


def decoder_rows(args: ModelArgs, blocks: Iterable[Sequence[ParameterRow]]) -> list[ParameterRow]:
    """Return the rows of a decoder with ``blocks``, in parameter order, without a tied head.

    A tied embedding cannot start with torchtitan's standard deviation of 1: each token would predict itself
    with a logit of D. A tied embedding therefore starts with 0.02, as is usual. The embedding stays in FSDP's
    root unit, because it is read at both ends of the forward.
    """
    tied = args.tie_embeddings
    embedding = ParameterRow(
        EMBEDDING, (args.vocab_size, args.dim), Init(std=0.02 if tied else 1.0), "model.embed_tokens.weight",
        "embedding", outer=not tied, part="embedding", unit=() if tied else ("tok_embeddings",),
    )  # fmt: skip
    rows = [embedding]
    for layer, block in enumerate(blocks):
        prefix = f"layers.{layer}"
        rows += [
            replace(row, name=f"{prefix}.{row.name}", hf=f"model.{prefix}.{row.hf}", block=layer,
                    unit=(prefix,) if row.unit is None else tuple(f"{prefix}.{it}" for it in row.unit))
            for row in block
        ]  # fmt: skip
    last = () if tied else ("norm", "output")
    rows.append(ParameterRow(NORM, (args.dim,), ONES, "model.norm.weight", part="norm", unit=last))
    if not tied:
        rows += [replace(row, unit=last) for row in head_rows(args)]
    return rows


def head_rows(args: ModelArgs) -> list[ParameterRow]:
    """Return the rows of the LM head, even if it is tied, or of the classification head.

    Logits start with a variance of about one, so that the loss starts near ln V. A classifier's scores start
    as in transformers; its hidden layers preserve the scale of their input.
    """
    if args.classifier is None:
        init = Init(std=args.dim**-0.5, cut=3.0)
        shape = (args.vocab_size, args.dim)
        return [ParameterRow(HEAD, shape, init, "lm_head.weight", "head", outer=True, part="head")]
    sizes = (args.dim, *args.classifier.hidden_sizes)
    scores = (len(args.classifier.labels), sizes[-1])
    rows = [ParameterRow(HEAD, scores, Init(std=0.02), "score.weight", "classifier", part="head")]
    for index, (fan_in, fan_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        name = f"output.hidden.{index}.weight"
        rows.append(ParameterRow(name, (fan_out, fan_in), Init(std=fan_in**-0.5), name, None, part="head"))
    return rows


class ParameterTable(Mapping[str, ParameterRow]):
    """Rows of a model by name, in parameter order."""

    def __init__(self, args: ModelArgs, rows: Iterable[ParameterRow]):
        self._rows = {row.name: row for row in rows}
        tied_head = head_rows(args) if args.tie_embeddings else []
        self._all = [*self._rows.values(), *tied_head]
        self._hf = {row.name: row.hf for row in self._all}

    def __getitem__(self, name: str) -> ParameterRow:
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
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in a Hugging Face checkpoint by their names there, without a tied head."""
        return {name: row.hf_shape for row in self.values() for name in row.hf_names}

    @cached_property
    def linear(self) -> dict[str, tuple[int, ...]]:
        """Shapes (N, K) of the weights of linear layers, by layer name."""
        return {row.module: row.shape for row in self.values() if row.linear}

    @cached_property
    def adaptable(self) -> dict[str, ParameterRow]:
        """Weights that LoRA may update, by the name of their layer, or of the weight itself if experts are
        stacked in it."""
        rows = (row for row in self.values() if row.is_block_matrix or row.router or row.outer)
        return {row.name if row.experts else row.module: row for row in rows}

    @property
    def parameters(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(row.size for row in self.values() if not row.buffer)

    @cached_property
    def blocks(self) -> list[list[ParameterRow]]:
        """Parameters of each block."""
        parameters = [row for row in self.values() if row.block is not None and not row.buffer]
        return [list(rows) for _, rows in groupby(parameters, lambda row: row.block)]

    @cached_property
    def block_sizes(self) -> list[int]:
        """Number of parameters of each block."""
        return [sum(row.size for row in rows) for rows in self.blocks]

    @cached_property
    def active_in_blocks(self) -> int:
        """Number of the blocks' parameters used to compute one token."""
        return sum(row.active_size for rows in self.blocks for row in rows)

    def units(self) -> list[tuple[str, ...]]:
        """Return the modules of each FSDP unit, in forward order."""
        return list(dict.fromkeys(row.unit for row in self.values() if row.unit))

    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module. The parent of column-wise layers, or of experts,
        gathers their input."""
        plan = {row.module: row.tensor_parallel for row in self._all if row.tensor_parallel}
        above = {"column": "gather", "experts": "moe"}
        return plan | {
            module.rpartition(".")[0]: above[style] for module, style in plan.items() if style in above
        }

    def to_hf(self, name: str) -> str:
        """Return the Hugging Face name of ``name``, which may be that of a tied head. For stacked experts, {}
        stands for an expert's index; :attr:`ParameterRow.hf_names` has every name.

        Raises:
            KeyError: the model has no such parameter.
        """
        return self._hf[name]

    def from_hf(self, name: str) -> list[tuple[str, int]]:
        """Return our names of the parameters in the Hugging Face tensor ``name`` (several if it is fused),
        each with the index of its expert, or 0. Rotary frequencies have no name, because they are computed.

        An unknown name gets a suffix, so that it is reported as unexpected even if it equals one of our names
        (as norm.weight does in a model saved without its head).
        """
        if name.endswith("rotary_emb.inv_freq"):
            return []
        return self._ours.get(name, [(f"{name} (not of this model)", 0)])

    def row_of(self, hf_name: str) -> ParameterRow | None:
        """Return the row of the Hugging Face tensor ``hf_name``, the first if it is fused, or None."""
        return next((self.get(name) for name, _ in self.from_hf(hf_name)), None)

    @cached_property
    def _ours(self) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for row in self._all:
            for index, name in enumerate(row.hf_names):
                found.setdefault(name, []).append((row.name, index))
        return found


def hf_row_order(rows: Sequence[int], head_dim: int) -> list[int]:
    """Return, for each of Hugging Face's ``rows`` of q_proj or k_proj, the index of the same row of ours.

    RoPE rotates pairs of rows of a head. Meta's pairs, and ours, are adjacent, 2p and 2p + 1; Hugging Face's
    are half a head apart, p and p + E/2, where E is the head dim. Only the weights, biases and norms of
    queries and keys are permuted.
    """
    half = head_dim // 2
    return [row - row % head_dim + row % head_dim % half * 2 + row % head_dim // half for row in rows]
