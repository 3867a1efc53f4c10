"""Tables for fine-tuning: adapters on a frozen model, and the choice of trainable parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval, Len, Lt

from toolkit.config.types import (
    MAX_CLASSES,
    LocalPath,
    NonNegative,
    NonNegativeFloat,
    OnlyWith,
    Positive,
    PositiveFloat,
    Size,
    Table,
)

_WITH_ADAPTER = OnlyWith("finetune.adapter", ("lora", "prefix_tuning", "llama_adapter"), rejected=True)
_BLOCK_LINEARS = ["wq", "wv"]


class LoRA(Table):
    """Low-rank updates of linear layers (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Positive = 8
    """Rank of the update matrices."""
    alpha: PositiveFloat = 16.0
    """Scaling: updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Interval(ge=0), Lt(1)] = 0.0
    """Dropout probability of the inputs of an update. Above 0 the training curve depends on the mesh."""
    target_modules: list[str] = _BLOCK_LINEARS
    """Linear layers to adapt: names (wq, wk, wv, wo, w1, w2, w3, or q_proj and so on), patterns of full names
    such as layers.3.*, or all-linear for all of them. w1, w2, w3 and all-linear include experts, each with an
    update of its own; experts means all routed experts, and gate the router, which is not in all-linear.
    Neither are tok_embeddings and output (embed_tokens, lm_head), of a model that does not tie them."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""
    quantize_base: Literal["none", "nf4"] = "none"
    """nf4: store the weights of the blocks' linear layers and experts, adapted or not, in 4 bits and
    dequantize each layer when it is computed (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""
    use_dora: bool = False
    """Also train the magnitudes of the adapted weights' rows (Liu et al. 2024, arXiv:2402.09353); not of
    experts, embedding and head."""

    @property
    def scale(self) -> float:
        """Factor that scales an update."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class PrefixTuning(Table):
    """Learned keys and values in every block, visible to every token (Li, Liang 2021, arXiv:2101.00190)."""

    num_virtual_tokens: Positive = 30
    """Learned tokens before each document."""


class LlamaAdapter(Table):
    """Learned prompts in the last blocks, whose attention is added through a gate initialized to zero
    (Zhang et al. 2023, arXiv:2303.16199)."""

    adapter_len: Positive = 10
    """Learned tokens per block."""
    adapter_layers: Positive = 30
    """Number of blocks with prompts, counted from the last. The default covers all blocks of a smaller
    model."""
    gate: Literal["head", "layer"] = "head"
    """head: tanh of one scalar per head, as in the paper; layer: one plain scalar per layer, as in PEFT."""


_CLASSES = OnlyWith("finetune.classification.num_labels", above=1, rejected=True)


class Classification(Table):
    """A sequence classification head instead of the language model head, trained on labeled text."""

    num_labels: Annotated[int, Interval(ge=0, le=MAX_CLASSES)] = 0
    """Number of classes, two or more; 0 trains a language model."""
    hidden_sizes: Annotated[list[Size], Len(max_length=8), _CLASSES] = []
    """Sizes of fully connected layers before the scores, each followed by SiLU. Hugging Face has none."""
    label_names: Annotated[list[str], _CLASSES] = []
    """Class names, in order. Exported to config.json (id2label), and accepted as labels instead of numbers.
    Empty: LABEL_0, LABEL_1 and so on."""
    label_column: Annotated[str, _CLASSES] = "label"
    """Column with the class, as a number from 0 or a name; the text is in data.text_column."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all classes, in order."""
        return tuple(self.label_names) or tuple(f"LABEL_{index}" for index in range(self.num_labels))


class DPO(Table):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: PositiveFloat = 0.1
    """Strength of the penalty for deviating from the reference model."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss per pair, named as in trl: sigmoid (original DPO), hinge (SLiC) or ipo (Azar et al. 2023,
    arXiv:2310.12036), which averages over the tokens of an answer."""
    label_smoothing: Annotated[
        float, Interval(ge=0, le=0.5), OnlyWith(".loss_type", ("sigmoid",), rejected=True)
    ] = 0.0
    """Assumed fraction of pairs with flipped preference (conservative DPO), for loss_type sigmoid."""


class KTO(Table):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    beta: PositiveFloat = 0.1
    """Strength of the penalty for deviating from the reference model."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of the losses of desirable answers, to balance unequal numbers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of the losses of undesirable answers."""


class Reward(Table):
    """Reward models: the probability that an answer is preferred (Bradley, Terry 1952), by one score each."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244); 0.01 is
    common."""


class CPO(Table):
    """Contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417)."""

    beta: PositiveFloat = 0.1
    """Factor of the log-probabilities of answers that are compared."""
    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    """Loss of the comparison, named as in trl."""
    label_smoothing: Annotated[
        float, Interval(ge=0, le=0.5), OnlyWith(".loss_type", ("sigmoid",), rejected=True)
    ] = 0.0
    """Assumed fraction of pairs with flipped preference, for loss_type sigmoid."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the chosen answer's mean token loss."""


class SimPO(Table):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734)."""

    beta: PositiveFloat = 2.0
    """Factor of the mean log-probabilities of tokens that are compared."""
    gamma: NonNegativeFloat = 1.0
    """Margin by which the chosen answer's reward should exceed the rejected one's."""
    label_smoothing: Annotated[float, Interval(ge=0, le=0.5)] = 0.0
    """Assumed fraction of pairs with flipped preference."""


class ORPO(Table):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691)."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio next to the chosen answer's mean token loss (lambda in the paper)."""


class Finetune(Table):
    """Choice of the trained parameters; all, by default."""

    adapter: Literal["none", "lora", "prefix_tuning", "llama_adapter"] = "none"
    """Adapter to add. Only its parameters are trained; configure it in finetune.lora and so on."""
    adapter_path: Annotated[str | None, LocalPath(), _WITH_ADAPTER] = None
    """Adapter of the same kind to start from: a PEFT folder, or a step-N checkpoint of this toolkit."""
    merge_on_export: Annotated[bool, _WITH_ADAPTER] = False
    """Merge LoRA updates into the model that checkpoint.last_save_in_hf and hf_export_interval export,
    instead of exporting a PEFT folder."""
    objective: Literal["sft", "dpo", "kto", "cpo", "simpo", "orpo", "reward"] = "sft"
    """sft: next-token prediction. The others prefer chosen over rejected answers, on data of format
    preference: dpo and kto relative to the initial model; cpo, simpo and orpo without a reference. kto also
    reads unpaired_preference. reward: a score of answers instead of a language model."""
    neftune_noise_alpha: Annotated[
        PositiveFloat | None, OnlyWith("finetune.objective", ("sft",), rejected=True)
    ] = None
    """NEFTune: noise on embeddings in training, uniform up to alpha / √(tokens of the document · model.dim)
    (Jain et al. 2023, arXiv:2310.05914); 5 is common. None: no noise."""
    trainable: list[str] = []
    """Name patterns of parameters to train, such as *norm.weight or tok_embeddings.*; empty trains all."""
    frozen: list[str] = []
    """Name patterns of parameters to freeze."""
    trainable_token_indices: Annotated[
        list[NonNegative], OnlyWith("finetune.adapter", ("lora",), rejected=True)
    ] = []
    """Tokens, such as new ones, whose rows of the embedding, and of a tied head, are trained next to LoRA.
    Other rows stay frozen."""
    freeze_first_layers: NonNegative = 0
    """Number of blocks to freeze, counted from the first; the embedding is frozen with them."""
    freeze_last_layers: NonNegative = 0
    """Number of blocks to freeze, counted from the last."""
    lora: Annotated[LoRA, OnlyWith("finetune.adapter", ("lora",))] = LoRA()
    prefix_tuning: Annotated[PrefixTuning, OnlyWith("finetune.adapter", ("prefix_tuning",))] = PrefixTuning()
    llama_adapter: Annotated[LlamaAdapter, OnlyWith("finetune.adapter", ("llama_adapter",))] = LlamaAdapter()
    classification: Classification = Classification()

    dpo: Annotated[DPO, OnlyWith("finetune.objective", ("dpo",))] = DPO()
    kto: Annotated[KTO, OnlyWith("finetune.objective", ("kto",))] = KTO()
    reward: Annotated[Reward, OnlyWith("finetune.objective", ("reward",))] = Reward()
    cpo: Annotated[CPO, OnlyWith("finetune.objective", ("cpo",))] = CPO()
    simpo: Annotated[SimPO, OnlyWith("finetune.objective", ("simpo",))] = SimPO()
    orpo: Annotated[ORPO, OnlyWith("finetune.objective", ("orpo",))] = ORPO()

    @property
    def compares(self) -> bool:
        """Return whether the objective learns from preferences."""
        return self.objective != "sft"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the scores of a classifier or a reward model; none of a language model."""
        return self.classification.names or ("LABEL_0",) * (self.objective == "reward")

    @property
    def refers(self) -> bool:
        """Return whether the objective compares the model with a reference."""
        return self.objective in ("dpo", "kto")

    @property
    def stores_reference(self) -> bool:
        """Return whether the reference's log-probabilities are computed before training. This is necessary if
        the model without its adapter would not be the reference."""
        return self.refers and (not self.adds or bool(self.trainable or self.adapter_path))

    @property
    def extra_forwards(self) -> int:
        """Return the number of forward passes per step without gradients, for the reference and for
        mismatched answers."""
        references = 0 if self.stores_reference or not self.refers else 1
        return 2 * references + 1 if self.unpaired else references

    @property
    def unpaired(self) -> bool:
        """Return whether the objective learns from answers one by one, instead of pairs."""
        return self.objective == "kto"

    @property
    def adds(self) -> bool:
        """Return whether adapter parameters are added and the model itself is frozen."""
        return self.adapter != "none"

    @property
    def quantizes(self) -> bool:
        """Return whether the frozen linear layers are stored in 4 bits."""
        return self.adapter == "lora" and self.lora.quantize_base == "nf4"

    @property
    def chooses(self) -> bool:
        """Return whether the run trains anything other than all parameters of the unmodified model."""
        patterns = bool(self.trainable or self.frozen)
        return self.adds or patterns or self.freeze_first_layers > 0 or self.freeze_last_layers > 0
