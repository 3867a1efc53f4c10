"""Tables about what is trained on what: model, data, batches, optimizer, schedule, validation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import Field as Constraint

from toolkit.config.refused import NO_EXPRESSION, NO_MOE, NO_MX
from toolkit.config.types import (
    FLOAT8,
    ActsWith,
    AutoOrBatchSize,
    AutoOrPositive,
    BatchSize,
    Fraction,
    Layers,
    LocalPath,
    Momentum,
    Name,
    Needs,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RefusedValues,
    Size,
    Table,
)

ConversationFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference"]


class Model(Table):
    """Which model. Where neither name nor flavor is set, config.json of hf_assets_path says it, if there is
    one. A key that is None takes the value of that file or of the preset."""

    name: str | None = None
    """Release, with its sizes: a name in toolkit/models/*/args.py (docs/weights.md lists them). None:
    that of torchtitan's files."""
    flavor: str | None = None
    """Size within the family, such as 8B. debugmodel takes its vocabulary from the tokenizer. None:
    debugmodel."""
    hf_assets_path: Annotated[str, LocalPath()] = "./tests/assets/tokenizer"
    """Folder of the tokenizer (tokenizer.model or tokenizer.json) and config.json, as Hugging Face lays a
    model out."""
    tokenizer_path: Annotated[str | None, LocalPath()] = None
    """Tokenizer file or folder, when it is not in hf_assets_path."""
    add_bos_token: bool | None = None
    """Begin each document with BOS. None: as tokenizer.json says, else add_bos_token of
    tokenizer_config.json, else true."""
    additional_special_tokens: list[str] = []
    """Special tokens to add to a copy of the tokenizer, such as those of data.chat_template. model.vocab_size
    makes room for them: in weights that are loaded, new rows are the mean of the others."""
    converters: Annotated[
        list[
            Literal[
                "float8",
                "mx",
                "quantize.linear.float8",
                "quantize.linear.mx",
                "quantize.grouped_mm.float8",
                "quantize.grouped_mm.mx",
            ]
        ],
        RefusedValues(("mx", "quantize.linear.mx"), NO_MX),
        RefusedValues(("quantize.grouped_mm.float8", "quantize.grouped_mm.mx"), NO_MOE),
    ] = []
    """Changes of the model before sharding."""
    print_after_conversion: Annotated[bool, ActsWith("model.converters", FLOAT8)] = False
    """Print the converted model."""
    dim: Size | None = None
    """Model dimension."""
    n_layers: Layers | None = None
    """Transformer blocks."""
    n_heads: Size | None = None
    """Query heads."""
    n_kv_heads: Size | None = None
    """Key and value heads; divides n_heads."""
    ffn_dim: Size | None = None
    """Inner dimension of the feed-forward."""
    head_dim: Size | None = None
    """Dimension of one head; even. None: dim / n_heads where either of those is set, else the preset's."""
    vocab_size: Size | None = None
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_seq_len: Size | None = None
    """Longest sequence that the model is made for."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None
    """Stretching of the slow rotary frequencies to a context longer by this factor; 1 is none."""
    tie_embeddings: bool | None = None
    """One matrix for the embedding and the output head."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash", "blockwise"] = "auto"
    """Attention back end. auto takes what the flavor names (8B_flex), else what is best for the device."""
    norm: Annotated[Literal["auto", "torch"], Needs("a CPU"), Needs("blocks that are not compiled")] = "auto"
    """RMSNorm. auto: on CPUs a piece of the tokens at a time, within a cache; torch: by torch's operators."""

    def overrides(self) -> dict[str, Any]:
        """Return the keys that change a preset's shape, None where the preset's value stays."""
        others = ("name", "flavor", "tokenizer_path", "add_bos_token")
        shape = [name for name, field in Model.model_fields.items() if field.default is None]
        return {name: getattr(self, name) for name in shape if name not in others}


class Muon(Table):
    """Muon of the weights of the blocks' linear layers, by torch.optim.Muon's names."""

    momentum: Momentum = 0.95
    """Decay of the mean of gradients."""
    nesterov: bool = True
    """Look a step of the momentum ahead."""
    ns_steps: Annotated[int, Interval(ge=1, le=99)] = 5
    """Newton-Schulz iterations of an update."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of an update: 0.2 a number, as AdamW's, for which optimizer.lr serves both; or rows of norm 1."""


_TORCHS = ActsWith("optimizer.name", ("AdamW", "Adam", "Muon"), refused=True)


class Optimizer(Table):
    """The optimizer."""

    name: Literal["AdamW", "Adam", "AdamW8bit", "Muon"] = "AdamW"
    """AdamW decays weights apart from the gradient, Adam through it; AdamW8bit has moments in 8 bits; Muon
    makes updates of matrices orthogonal, and has AdamW for the rest."""
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: Momentum = 0.9
    """Decay of the first moment."""
    beta2: Momentum = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Ge(1e-37)] = 1e-8
    """Added to the denominator of the update, which is 0 for a weight without a gradient yet."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay."""
    no_decay: Annotated[list[str], ActsWith("optimizer.weight_decay", above=0)] = []
    """Parameters without weight decay, by patterns of their names such as *norm.weight."""
    implementation: Annotated[Literal["for-loop", "foreach", "fused"], _TORCHS] = "fused"
    """How the update is computed; fused is the fastest."""
    muon: Annotated[Muon, ActsWith("optimizer.name", ("Muon",), refused=True)] = Muon()
    early_step_in_backward: bool = False
    """Step each parameter in backward, as soon as its gradient is ready, and free the gradient. Neither
    clips nor accumulates."""


_DECAYS = ActsWith("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), refused=True)
_IN_STEPS = ActsWith("lr_scheduler.decay_type", ("step",), refused=True)


class LRScheduler(Table):
    """Learning rate: linear warm-up, then constant, then decay."""

    warmup_steps: NonNegative = 200
    """Steps of linear warm-up."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a part of the schedule, rounded up to a step, in place of warmup_steps."""
    total_steps: Positive | None = None
    """Length of the schedule when it is not training.steps."""
    decay_ratio: Annotated[Fraction | None, _DECAYS] = None
    """Last part of the schedule in which the rate decays; None: all of it after the warm-up."""
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine", "constant", "step", "expression"],
        RefusedValues(("expression",), NO_EXPRESSION),
    ] = "linear"
    """Shape of the decay. constant does not decay; step multiplies by gamma every step_size steps."""
    step_size: Annotated[Positive | None, _IN_STEPS] = None
    """For step: steps from one multiplication to the next; None is an epoch."""
    gamma: Annotated[float, Interval(gt=0, le=1), _IN_STEPS] = 0.85
    """For step: the factor."""
    min_lr_factor: Annotated[Fraction, _DECAYS] = 0.0
    """Rate at the end as a part of optimizer.lr."""


_CROSS_ENTROPY = ActsWith("loss.name", ("cross_entropy",), refused=True)


class Loss(Table):
    """The loss of a token in training. A validation has the cross-entropy alone."""

    name: Literal["cross_entropy"] = "cross_entropy"
    """Cross-entropy, or a loss that job.custom_import registers."""
    label_smoothing: Annotated[Fraction, _CROSS_ENTROPY] = 0.0
    """Part of a label's probability that is spread evenly over the vocabulary."""
    z_loss: Annotated[NonNegativeFloat, _CROSS_ENTROPY] = 0.0
    """Weight of the squared logarithm of the softmax's denominator, to keep logits small; 1e-4 in PaLM."""


_WORKERS = ActsWith(".num_workers", above=0, refused=True)


class DataLoader(Table):
    """torch's DataLoader. The order of the data does not depend on these."""

    num_workers: NonNegative = 0
    """Worker processes of each rank."""
    persistent_workers: Annotated[bool, _WORKERS] = False
    """Keep the workers between epochs; needs num_workers."""
    pin_memory: Annotated[bool, Needs("a GPU")] = False
    """Copy batches into page-locked memory."""
    prefetch_factor: Annotated[Positive | None, _WORKERS] = None
    """Batches that each worker prepares ahead; needs num_workers."""


class Training(Table):
    """Batches, length and precision of the training."""

    dataset: Annotated[str, LocalPath()] = "c4_test"
    """Corpus by name: embedded (also called c4_test) or embedded_validation (c4_validation), which are
    shipped, or a dataset of the Hugging Face hub as owner/name; c4 is en of allenai/c4. With dataset_path the
    name is only a label."""
    dataset_path: Annotated[str | None, LocalPath(storage="read")] = None
    """Own text: a .txt, .jsonl, .json (also .gz, .bz2, .xz or .zst) or .parquet file, a folder of them or one
    that Hugging Face's save_to_disk wrote, a glob, or several of these with commas."""
    dataset_subset: str | None = None
    """Configuration of a dataset of the Hugging Face hub, such as en of allenai/c4."""
    dataset_split: str = "train"
    """Split of a dataset of the Hugging Face hub, or a part of it such as train[:1%]; or of a folder with
    several, by the names of its files (a cloned dataset) or as a DatasetDict that was saved."""
    format: Literal["text"] | ConversationFormat | None = None
    """As data.format, which it replaces."""
    columns: dict[str, str] | None = None
    """As data.columns, which they replace."""
    epochs: Positive | None = None
    """Length as passes over the corpus, in place of steps. A pass over a mixture is as many samples as its
    parts have together."""
    local_batch_size: BatchSize = 8
    """Samples that a rank takes through the model at once."""
    global_batch_size: AutoOrBatchSize = -1
    """Samples of one optimizer step over all ranks; micro-batches are accumulated to reach it. -1 is
    local_batch_size x data-parallel degree, which makes the run depend on the mesh."""
    seq_len: Size = 2048
    """Tokens of one sample."""
    max_norm: Annotated[float, Constraint(allow_inf_nan=True), Gt(0)] = 1.0
    """Clip the global gradient norm to this; inf does not clip."""
    steps: Positive = 10000
    """Optimizer steps."""
    enable_cpu_offload: Annotated[bool, Needs("a GPU", refused=True)] = False
    """Keep parameters, gradients and optimizer state in CPU memory."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train: on the GPUs that nvidia-smi shows, or else the CPU (auto); or one of the two, whatever
    there is. Ranks that find another device than the checks before them refuse to start."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Precision in which parameters and optimizer state are kept."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Precision of the computation. auto is bfloat16 where the device multiplies it natively, else float32
    (torchtitan's default is bfloat16)."""
    mixed_precision_reduce: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision in which gradients are reduced; bfloat16 halves the traffic and rounds every sum."""
    mixed_precision_output: Literal["auto", "float32"] = "auto"
    """Precision of the logits that the model hands out; auto is that of the computation. The loss is always
    computed in at least float32."""
    gc_freq: Positive = 50
    """Steps from one garbage collection of Python's to the next; all ranks collect together."""
    gc_debug: bool = False
    """Collect garbage at every step and, on CUDA, warn of reference cycles that hold tensors."""
    loss_chunk_tokens: NonNegative = 2048
    """Tokens for which head and loss are computed at once, so that all logits never exist; 0 is all."""
    fused_parts: Annotated[list[Literal["adamw_8bit", "loss", "nf4", "rotary", "swiglu"]], Needs("a GPU")] = [
        "adamw_8bit",
        "loss",
        "nf4",
        "rotary",
        "swiglu",
    ]
    """Elementwise parts of a step that one generated kernel computes on a GPU, also without compile.enable;
    an empty list computes them with torch's own operators."""
    dataloader: DataLoader = DataLoader()


class MixtureCorpus(Table):
    """One corpus of a weighted mixture, under a name of your choice. What is drawn depends on the names, and
    not on the order of the tables."""

    weight: PositiveFloat = 1.0
    """Share of the samples; weights are divided by their sum, and rounded to parts of 10,000."""
    dataset: Annotated[str, LocalPath()] = "c4_test"
    """Corpus by name, as training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Own text, as training.dataset_path."""
    dataset_subset: str | None = None
    """As training.dataset_subset."""
    dataset_split: str = "train"
    """As training.dataset_split."""
    text_column: str | None = None
    """As data.text_column, which it replaces."""
    format: Literal["text"] | ConversationFormat | None = None
    """As data.format, which it replaces."""
    columns: dict[str, str] | None = None
    """As data.columns, which they replace."""


class Data(Table):
    """How text becomes samples."""

    text_column: str = "text"
    """Column that holds the text, or a template of columns such as "{question}\\n{answer}"; {{ is a brace."""
    format: Literal["text"] | ConversationFormat = "text"
    """Form of a file's rows: a text, or a conversation as messages (role and content, as OpenAI's),
    sharegpt (from and value), alpaca (instruction, input, output) or prompt_completion (two texts or lists
    of messages); or two answers to a prompt, preference (prompt, chosen, rejected). A conversation
    and its messages may have a weight in the loss."""
    columns: dict[str, str] = {}
    """Other names for the columns of a conversation's format and the keys of its messages, such as
    {conversations = "dialog", from = "speaker", weight = "importance"}."""
    chat_template: str | None = None
    """How a conversation becomes text: the name of a family's format, a jinja template
    or its file. None: the template that comes with the tokenizer, else the format whose tokens it has."""
    chat_template_kwargs: dict[str, bool | str] = {}
    """Variables for the template, such as {date_string = "26 Jul 2024", enable_thinking = false}."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Parts of a conversation to learn: the assistant's turns with their ends, the last of them, or all."""
    mask_empty_thinking: bool = False
    """Do not learn the empty think block that a template writes before an answer without reasoning, whether
    or not the run's generation prompt writes it: for templates with a variable enable_thinking."""
    empty_mask: Literal["error", "drop"] = "error"
    """Conversations without a token to learn, by themselves or once they are cut at seq_len: refuse to
    train, or train without them."""
    packing: bool = True
    """Fill samples with documents end to end, or with whole conversations by best fit; false puts one
    document or conversation in a row, cut or padded."""
    document_mask: bool = True
    """Attend within a document only, positions counted from its start."""
    shuffle: bool = True
    """New order of the samples in each epoch; false keeps the order of the files."""
    streaming: bool = False
    """Read and tokenise the text of the training while it runs, by training.dataloader.num_workers processes
    a rank, in place of a token cache: nothing is prepared or kept, and files are shuffled, not samples."""
    cache_folder: Annotated[str, LocalPath(storage=True)] = "~/.cache/llama-toolkit"
    """Folder in which tokenised corpora are kept, or a URL of object storage (s3://bucket/tokens), from which
    a run reads the tokens of each sample as it comes to them."""
    max_inline_gb: PositiveFloat = 10.0
    """Gigabytes of text that a run tokenises itself; for more it asks for tools/prepare_data.py."""
    mixture: dict[Name, MixtureCorpus] = {}
    """Corpora to draw from by weight, in place of training.dataset: a table [data.mixture.NAME] for each."""


_BASE = Needs("a base corpus", refused=True)


class BaseCorpus(Table):
    """Plain text of what the model knew before a fine-tune: its perplexity before the first step and after
    the last shows what was forgotten. Rows and samples are as many and as long as those of the validation."""

    dataset: Annotated[str | None, LocalPath()] = None
    """Corpus by name, as training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Own text, as training.dataset_path."""
    dataset_subset: Annotated[str | None, _BASE] = None
    """As training.dataset_subset."""
    dataset_split: Annotated[str, _BASE] = "validation"
    """As training.dataset_split."""
    format: ClassVar[str] = "text"
    columns: ClassVar[dict[str, str]] = {}

    @property
    def named(self) -> bool:
        """Say if there is one."""
        return self.dataset is not None or self.dataset_path is not None


class Validation(Table):
    """Loss on held-out text, computed as in training."""

    enable: bool = False
    """Validate every freq steps and after the last."""
    dataset: Annotated[str, LocalPath()] = "c4_validation"
    """Corpus by name, as training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Own text, as training.dataset_path."""
    dataset_subset: str | None = None
    """As training.dataset_subset."""
    dataset_split: str = "validation"
    """As training.dataset_split."""
    format: Literal["text"] | ConversationFormat | None = None
    """As data.format, which it replaces."""
    columns: dict[str, str] | None = None
    """As data.columns, which they replace."""
    local_batch_size: BatchSize = 8
    """Samples that a rank takes through the model at once."""
    seq_len: Size = 2048
    """Tokens of one sample."""
    freq: Positive = 10
    """Steps from one validation to the next."""
    steps: AutoOrPositive = -1
    """Batches of one validation on each rank; -1 is the whole corpus, each sample once."""
    samples: AutoOrPositive = -1
    """In place of steps: samples of one validation on all ranks together, the same ones on any mesh."""
    dataloader: DataLoader = DataLoader()
    base_corpus: Annotated[BaseCorpus, ActsWith("validation.enable", refused=True)] = BaseCorpus()
