"""Tables about fine-tuning: adapters on a frozen model, and which parameters are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval, Len, Lt

from toolkit.config.types import (
    MAX_CLASSES,
    ActsWith,
    LocalPath,
    NonNegative,
    Positive,
    PositiveFloat,
    Size,
    Table,
)

_WITH_ADAPTER = ActsWith("finetune.adapter", ("lora", "prefix_tuning", "llama_adapter"), refused=True)
_BLOCK_LINEARS = ["wq", "wv"]


class LoRA(Table):
    """Low-rank updates of linear layers (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Positive = 8
    """Rank of an update."""
    alpha: PositiveFloat = 16.0
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Interval(ge=0), Lt(1)] = 0.0
    """Part of the inputs of an update that is zeroed in training. Above 0 the curve depends on the mesh."""
    target_modules: list[str] = _BLOCK_LINEARS
    """Linear layers to update: names (wq, wk, wv, wo, w1, w2, w3, or q_proj and the like), patterns of whole
    names such as layers.3.*, or all-linear, which is all of them. Head and embedding are not among them:
    finetune.trainable trains those whole."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""
    quantize_base: Literal["none", "nf4"] = "none"
    """nf4: keep the weights of the blocks' linear layers, updated or not, in 4 bits (QLoRA, Dettmers et al.
    2023, arXiv:2305.14314), of which each linear layer makes numbers when it computes."""
    use_dora: bool = False
    """Train the magnitudes of the rows of the updated weights as well (Liu et al. 2024, arXiv:2402.09353)."""

    @property
    def scale(self) -> float:
        """The factor of an update."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class PrefixTuning(Table):
    """Learned keys and values of every block, which every token sees (Li, Liang 2021, arXiv:2101.00190)."""

    num_virtual_tokens: Positive = 30
    """Learned tokens before each document."""


class LlamaAdapter(Table):
    """Learned prompts of the last blocks, whose attention is added through a gate that starts closed
    (Zhang et al. 2023, arXiv:2303.16199)."""

    adapter_len: Positive = 10
    """Learned tokens of a block."""
    adapter_layers: Positive = 30
    """Blocks that have them, counted from the last; at the default all of a model of fewer."""
    gate: Literal["head", "layer"] = "head"
    """head: tanh of a number for each head, as in the paper; layer: one plain number, as in PEFT."""


_CLASSES = ActsWith("finetune.classification.num_labels", above=1, refused=True)


class Classification(Table):
    """A head that says to which of some classes a text belongs, in place of the vocabulary's, and is trained
    on rows of a text and a label."""

    num_labels: Annotated[int, Interval(ge=0, le=MAX_CLASSES)] = 0
    """Classes, two or more; 0 is a language model."""
    hidden_sizes: Annotated[list[Size], Len(max_length=8), _CLASSES] = []
    """Sizes of fully connected layers before the scores, SiLU behind each. Hugging Face has none."""
    label_names: Annotated[list[str], _CLASSES] = []
    """Names of the classes, in order: what config.json tells (id2label), and what a row may say in place of
    the number. Empty is LABEL_0, LABEL_1 and so on."""
    label_column: Annotated[str, _CLASSES] = "label"
    """Column of the class, a number from 0 or a name; the text is in data.text_column."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all classes."""
        return tuple(self.label_names) or tuple(f"LABEL_{index}" for index in range(self.num_labels))


class DPO(Table):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: PositiveFloat = 0.1
    """How closely the model is kept to the reference: the larger, the closer."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of a pair, by trl's names: sigmoid, DPO's own; hinge (SLiC); ipo (Azar et al. 2023,
    arXiv:2310.12036), of means over the tokens of an answer."""
    label_smoothing: Annotated[
        float, Interval(ge=0, le=0.5), ActsWith(".loss_type", ("sigmoid",), refused=True)
    ] = 0.0
    """The part of the pairs whose order is taken to be wrong: conservative DPO, with loss_type sigmoid."""


class Finetune(Table):
    """The part of a model that is trained: all of it, unless a key says otherwise."""

    adapter: Literal["none", "lora", "prefix_tuning", "llama_adapter"] = "none"
    """Parameters to add, which alone are trained; their tables are finetune.lora and so on."""
    adapter_path: Annotated[str | None, LocalPath(), _WITH_ADAPTER] = None
    """An adapter of the same kind to start from: a folder of PEFT's, or a step-N of ours."""
    merge_on_export: Annotated[bool, _WITH_ADAPTER] = False
    """Merge a LoRA into the model that checkpoint.last_save_in_hf and hf_export_interval write, in place of
    writing a folder of PEFT's."""
    objective: Literal["sft", "dpo"] = "sft"
    """sft: the next token; dpo: that chosen answers become more probable than rejected ones, as seen from the
    model without its adapter, on data of the format preference."""
    trainable: list[str] = []
    """Patterns of names of parameters to train, such as *norm.weight or tok_embeddings.*; empty is all."""
    frozen: list[str] = []
    """Patterns of names of parameters not to train."""
    freeze_first_layers: NonNegative = 0
    """Blocks not to train, counted from the first; with them the embedding is frozen."""
    freeze_last_layers: NonNegative = 0
    """Blocks not to train, counted from the last."""
    lora: Annotated[LoRA, ActsWith("finetune.adapter", ("lora",))] = LoRA()
    prefix_tuning: Annotated[PrefixTuning, ActsWith("finetune.adapter", ("prefix_tuning",))] = PrefixTuning()
    llama_adapter: Annotated[LlamaAdapter, ActsWith("finetune.adapter", ("llama_adapter",))] = LlamaAdapter()
    classification: Classification = Classification()

    dpo: Annotated[DPO, ActsWith("finetune.objective", ("dpo",))] = DPO()

    @property
    def adds(self) -> bool:
        """Say if the model gets parameters of an adapter, and is itself frozen."""
        return self.adapter != "none"

    @property
    def quantizes(self) -> bool:
        """Say if the frozen linear layers are kept in 4 bits."""
        return self.adapter == "lora" and self.lora.quantize_base == "nf4"

    @property
    def chooses(self) -> bool:
        """Say if anything but all of a plain model is trained."""
        patterns = bool(self.trainable or self.frozen)
        return self.adds or patterns or self.freeze_first_layers > 0 or self.freeze_last_layers > 0
