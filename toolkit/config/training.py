"""Tables for the model, data, batches, validation and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import Field as Constraint

from toolkit.config.local_paths import EMBEDDED_TOKENIZER
from toolkit.config.types import (
    EXPERTS,
    FLOAT8,
    AutoOrBatchSize,
    AutoOrPositive,
    BatchSize,
    Degree,
    Fraction,
    Layers,
    LocalPath,
    Name,
    Needs,
    NonNegative,
    NonNegativeFloat,
    OnlyWith,
    Positive,
    PositiveFloat,
    Size,
    Table,
    UnsupportedValues,
)
from toolkit.config.unsupported import NO_GROUPED, NO_MX

ConversationFormat = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "unpaired_preference"
]


class Model(Table):
    """The model. Keys left at None take their value from the preset or from config.json in hf_assets_path,
    which also selects the model if neither name nor flavor is set."""

    name: str | None = None
    """Model release: a name from toolkit/models/*/args.py, listed in docs/weights.md. None: the release that
    torchtitan's configs expect."""
    flavor: str | None = None
    """Size within the family, such as 8B. debugmodel takes its vocabulary size from the tokenizer. None:
    debugmodel."""
    hf_assets_path: Annotated[str, LocalPath()] = EMBEDDED_TOKENIZER
    """Folder with the tokenizer (tokenizer.model or tokenizer.json) and config.json, in Hugging Face
    layout; embedded: the tokenizer that is included, of 4,096 tokens."""
    tokenizer_path: Annotated[str | None, LocalPath()] = None
    """Tokenizer file or folder, if it is not in hf_assets_path."""
    add_bos_token: bool | None = None
    """Prepend BOS to each document. None: taken from tokenizer.json, else from add_bos_token in
    tokenizer_config.json, else true."""
    additional_special_tokens: list[str] = []
    """Special tokens to add to a copy of the tokenizer, such as those of data.chat_template. model.vocab_size
    must leave room for them. When weights are loaded, new rows are initialized to the mean of the others."""
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
        UnsupportedValues(("mx", "quantize.linear.mx"), NO_MX),
        UnsupportedValues(("quantize.grouped_mm.float8", "quantize.grouped_mm.mx"), NO_GROUPED),
    ] = []
    """Conversions applied to the model before sharding."""
    print_after_conversion: Annotated[bool, OnlyWith("model.converters", FLOAT8)] = False
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
    """Hidden dimension of the feed-forward layers."""
    head_dim: Size | None = None
    """Dimension of one head; must be even. None: dim / n_heads if either of those is set, else the
    preset's."""
    vocab_size: Size | None = None
    """Rows of the embedding; at least the size of the tokenizer's vocabulary."""
    max_seq_len: Size | None = None
    """Longest sequence that the model supports."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary embedding's frequencies."""
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None
    """Factor by which the low rotary frequencies are scaled to extend the context; 1 disables scaling."""
    tie_embeddings: bool | None = None
    """Share one matrix between the embedding and the output head."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash", "blockwise"] = "auto"
    """Attention backend. auto uses the one in the flavor's name (8B_flex), else the best for the device."""

    def overrides(self) -> dict[str, Any]:
        """Return the keys that override the preset's shape; None keeps the preset's value."""
        others = ("name", "flavor", "tokenizer_path", "add_bos_token")
        shape = [name for name, field in Model.model_fields.items() if field.default is None]
        return {name: getattr(self, name) for name in shape if name not in others}


_CROSS_ENTROPY = OnlyWith("loss.name", ("cross_entropy",), rejected=True)


class Loss(Table):
    """Training loss per token. Validation always reports plain cross-entropy."""

    name: Literal["cross_entropy"] = "cross_entropy"
    """cross_entropy, or a loss registered by job.custom_import."""
    label_smoothing: Annotated[Fraction, _CROSS_ENTROPY] = 0.0
    """Fraction of the label's probability that is spread evenly over the vocabulary."""
    z_loss: Annotated[NonNegativeFloat, _CROSS_ENTROPY] = 0.0
    """Weight of the squared log of the softmax denominator, which keeps logits small; 1e-4 in PaLM."""


_TEACHER = OnlyWith("distillation.enable", rejected=True)


class Distillation(Table):
    """Training on the distribution of a frozen teacher, in addition to the labels."""

    enable: bool = False
    """Distill a teacher, which is sharded like the model and runs before each micro-batch."""
    teacher_path: Annotated[str, _TEACHER, LocalPath()] = ""
    """Hugging Face folder of the teacher, which must have the model's vocabulary."""
    weight: Annotated[Fraction, _TEACHER] = 0.5
    """Weight of the divergence from the teacher; that of the cross-entropy is 1 minus it."""
    divergence: Annotated[Literal["forward_kl", "reverse_kl"], _TEACHER] = "forward_kl"
    """Kullback-Leibler divergence: forward_kl covers all of the teacher's probable tokens, reverse_kl
    concentrates on some of them."""
    temperature: Annotated[PositiveFloat, _TEACHER] = 1.0
    """Temperature of both distributions; above 1 it flattens them."""
    top_k: Annotated[Positive, _TEACHER] = 64
    """Number of the teacher's most probable tokens that are compared."""


class MoE(Table):
    """Balance of a mixture of experts."""

    load_balance_coeff: Annotated[
        NonNegativeFloat, Needs("a model whose experts have a bias", rejected=True)
    ] = 1e-3
    """Step by which each expert's bias changes after each update, up for experts with fewer tokens than the
    mean of the global batch and down for others, in models that have the bias; 0 keeps it."""
    aux_loss_coeff: Annotated[NonNegativeFloat, EXPERTS] = 0.0
    """Weight of the balancing loss: per layer, the sum over experts of the share of choices times the mean
    score, 1 if balanced."""
    aux_loss_scope: Annotated[
        Literal["global_batch", "sequence"], OnlyWith("moe.aux_loss_coeff", above=0, rejected=True)
    ] = "global_batch"
    """Tokens over which the share of choices is counted. global_batch: all of a step; with several
    micro-batches, a forward pass counts them before the step. sequence: those of each row."""
    z_loss_coeff: Annotated[NonNegativeFloat, EXPERTS] = 0.0
    """Weight of the squared log of the denominator of the router's softmax, which keeps its logits small;
    1e-3 in ST-MoE."""


_WORKERS = OnlyWith(".num_workers", above=0, rejected=True)


class DataLoader(Table):
    """Options of torch's DataLoader. They do not affect the order of the data."""

    num_workers: NonNegative = 0
    """Worker processes per rank."""
    persistent_workers: Annotated[bool, _WORKERS] = False
    """Keep the workers alive between epochs; needs num_workers."""
    pin_memory: Annotated[bool, Needs("a GPU")] = False
    """Copy batches into pinned memory."""
    prefetch_factor: Annotated[Positive | None, _WORKERS] = None
    """Batches that each worker loads in advance; needs num_workers."""


class Training(Table):
    """Batch sizes, sequence length and precision of training."""

    dataset: Annotated[str, LocalPath()] = "c4_test"
    """Name of a corpus: embedded (also called c4_test) or embedded_validation (c4_validation), which are
    included, or owner/name of a dataset on the Hugging Face Hub; c4 stands for en of allenai/c4. If
    dataset_path is set, the name is only a label."""
    dataset_path: Annotated[str | None, LocalPath(storage="read")] = None
    """Local text: a .txt, .jsonl, .json (also .gz, .bz2, .xz or .zst) or .parquet file, a folder of them or
    one written by save_to_disk of Hugging Face datasets, a glob, or a comma-separated list of these."""
    dataset_subset: str | None = None
    """Configuration of a dataset on the Hugging Face Hub, such as en of allenai/c4."""
    dataset_split: str = "train"
    """Split of a dataset on the Hugging Face Hub, or a slice of one such as train[:1%]. Also selects a split
    of a local folder that has several: a cloned dataset (by its file names) or a saved DatasetDict."""
    format: Literal["text"] | ConversationFormat | None = None
    """Overrides data.format."""
    columns: dict[str, str] | None = None
    """Overrides data.columns."""
    epochs: Positive | None = None
    """Length of training in passes over the corpus; replaces steps. One pass over a mixture has as many
    samples as its corpora have together."""
    local_batch_size: BatchSize = 8
    """Samples per micro-batch on each rank."""
    global_batch_size: AutoOrBatchSize = -1
    """Samples per optimizer step over all ranks, reached by accumulating micro-batches. -1 is
    local_batch_size x data-parallel degree, which makes the run depend on the mesh."""
    seq_len: Size = 2048
    """Tokens per sample."""
    max_norm: Annotated[float, Constraint(allow_inf_nan=True), Gt(0)] = 1.0
    """Clip the global gradient norm to this value; inf disables clipping."""
    steps: Positive = 10000
    """Optimizer steps."""
    enable_cpu_offload: Annotated[bool, Needs("a GPU", rejected=True)] = False
    """Keep parameters, gradients and optimizer state in CPU memory (FSDP's CPU offload)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: the GPUs that nvidia-smi lists, else the CPU. A rank that finds another
    device than the preflight did stops with an error."""
    cpu_fast_paths: Annotated[bool, Needs("a CPU")] = True
    """On CPUs, use the toolkit's own attention and RMSNorm, multiply fp32 by oneDNN where it is faster,
    exchange FSDP's shards through shared memory and keep freed memory; false uses torch's operators, gloo's
    sockets and malloc's defaults."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Data type of parameters and optimizer state."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Data type of the computation. auto is bfloat16 if the device has native bfloat16 matmuls, else float32
    (torchtitan's default is bfloat16)."""
    mixed_precision_reduce: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type in which gradients are reduced; bfloat16 halves the traffic but rounds every sum."""
    mixed_precision_output: Literal["auto", "float32"] = "auto"
    """Data type of the logits that the model returns; auto is that of the computation. The loss is always
    computed in at least float32."""
    gc_freq: Positive = 50
    """Steps between runs of Python's garbage collector, which runs on all ranks at the same step."""
    gc_debug: bool = False
    """Collect garbage at every step and, on CUDA, warn about reference cycles that keep tensors alive."""
    loss_chunk_tokens: NonNegative = 2048
    """Tokens per chunk of the output head and loss, so that the full logits are never materialized; 0
    computes them in one chunk."""
    fused_parts: Annotated[list[Literal["adamw_8bit", "loss", "nf4", "rotary", "swiglu"]], Needs("a GPU")] = [
        "adamw_8bit",
        "loss",
        "nf4",
        "rotary",
        "swiglu",
    ]
    """Elementwise operations that run as one generated kernel on a GPU, even without compile.enable; with an
    empty list they run as torch's own operators."""
    dataloader: DataLoader = DataLoader()


class MixtureCorpus(Table):
    """One corpus of a weighted mixture, under a name of your choice. The samples drawn depend on the names,
    not on the order of the tables."""

    weight: NonNegativeFloat = 1.0
    """Share of the samples; weights are normalized to sum to 1 and rounded to multiples of 1/10,000. With
    [phases], 0 keeps the corpus for a later phase."""
    dataset: Annotated[str, LocalPath()] = "c4_test"
    """Name of a corpus, as in training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Local text, as in training.dataset_path."""
    dataset_subset: str | None = None
    """See training.dataset_subset."""
    dataset_split: str = "train"
    """See training.dataset_split."""
    text_column: str | None = None
    """Overrides data.text_column."""
    format: Literal["text"] | ConversationFormat | None = None
    """Overrides data.format."""
    columns: dict[str, str] | None = None
    """Overrides data.columns."""


class Data(Table):
    """Conversion of text to samples."""

    text_column: str = "text"
    """Column with the text, or a template of columns such as "{question}\\n{answer}"; write {{ for a
    brace."""
    format: Literal["text"] | ConversationFormat = "text"
    """Format of the rows. text: plain text. Conversations: messages (role and content, as OpenAI's),
    sharegpt (from and value), alpaca (instruction, input, output) or prompt_completion (two texts or two
    lists of messages). preference: two answers to one prompt (prompt, chosen, rejected).
    unpaired_preference: an answer and whether it is desirable (prompt, completion, label). A conversation and
    each of its messages may carry a loss weight."""
    columns: dict[str, str] = {}
    """Names of your columns and message keys, where they differ from the format's, such as
    {conversations = "dialog", from = "speaker", weight = "importance"}."""
    chat_template: str | None = None
    """Template that renders a conversation as text: the name of a family's format, a jinja template or a file
    with one. None: the tokenizer's own template, else the format whose special tokens the tokenizer has."""
    chat_template_kwargs: dict[str, bool | str] = {}
    """Variables passed to the template, such as {date_string = "26 Jul 2024", enable_thinking = false}."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Messages that contribute to the loss: the assistant's, each with its end token, only the last of them,
    or all messages."""
    mask_empty_thinking: bool = False
    """Exclude from the loss the empty think block that a template inserts before an answer without
    reasoning, whether or not the generation prompt contains it. For templates with a variable
    enable_thinking."""
    empty_mask: Literal["error", "drop"] = "error"
    """Conversations without any token in the loss, originally or after truncation to seq_len: stop with an
    error, or drop them."""
    packing: bool = True
    """Pack documents end to end, or whole conversations by best fit. false: one document or conversation per
    row, truncated or padded."""
    document_mask: bool = True
    """Restrict attention to the same document and count positions from its start."""
    shuffle: bool = True
    """Shuffle the samples again in each epoch; false keeps the order of the files."""
    streaming: bool = False
    """Read and tokenize the training text during the run, in training.dataloader.num_workers processes per
    rank, without a token cache. Nothing is prepared or stored in advance; files are shuffled, not samples."""
    cache_folder: Annotated[str, LocalPath(storage=True)] = "~/.cache/llama-toolkit"
    """Folder for tokenized corpora, or a URL of object storage (s3://bucket/tokens) from which tokens are
    read as samples need them."""
    max_inline_gb: PositiveFloat = 10.0
    """Gigabytes of text that a run tokenizes by itself; prepare larger corpora with tools/prepare_data.py."""
    mixture: dict[Name, MixtureCorpus] = {}
    """Weighted mixture of corpora, one table [data.mixture.NAME] each; replaces training.dataset."""

    @property
    def weights(self) -> dict[str, float]:
        """Positive weights of the mixture's corpora, by ascending name."""
        return {name: it.weight for name, it in sorted(self.mixture.items()) if it.weight}


class Phase(Table):
    """A part of the run with other lengths, batches or mixture, under a name of your choice, until the next
    phase. A key at None keeps the run's value."""

    start_step: NonNegative = 0
    """Finished steps after which the phase begins, at least 1 and below training.steps."""
    seq_len: Size | None = None
    """training.seq_len in this phase."""
    global_batch_size: AutoOrBatchSize | None = None
    """training.global_batch_size in this phase."""
    local_batch_size: BatchSize | None = None
    """training.local_batch_size in this phase."""
    context_parallel_degree: Degree | None = None
    """parallelism.context_parallel_degree in this phase; needs data_parallel_shard_degree = -1."""
    rope_theta: PositiveFloat | None = None
    """model.rope_theta in this phase."""
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None
    """model.rope_scaling_factor in this phase."""
    weights: dict[str, NonNegativeFloat] = {}
    """Weights of corpora of [data.mixture] in this phase; 0 draws nothing from a corpus."""

    def values(self) -> dict[str, Any]:
        """Return the values that the phase sets, by the names of its keys."""
        given = {name: getattr(self, name) for name in Phase.model_fields if name != "start_step"}
        return {name: value for name, value in given.items() if value not in (None, {})}


_BASE = Needs("a base corpus", rejected=True)


class BaseCorpus(Table):
    """Plain text that the model knew before fine-tuning: its perplexity before the first and after the last
    step shows how much was forgotten. Uses validation's number of rows and sequence length."""

    dataset: Annotated[str | None, LocalPath()] = None
    """Name of a corpus, as in training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Local text, as in training.dataset_path."""
    dataset_subset: Annotated[str | None, _BASE] = None
    """See training.dataset_subset."""
    dataset_split: Annotated[str, _BASE] = "validation"
    """See training.dataset_split."""
    format: ClassVar[str] = "text"
    columns: ClassVar[dict[str, str]] = {}

    @property
    def named(self) -> bool:
        """Return whether a base corpus is configured."""
        return self.dataset is not None or self.dataset_path is not None


class Validation(Table):
    """Loss on held-out text, computed as in training."""

    enable: bool = False
    """Validate every freq steps and after the last step."""
    dataset: Annotated[str, LocalPath()] = "c4_validation"
    """Name of a corpus, as in training.dataset."""
    dataset_path: Annotated[str | None, LocalPath()] = None
    """Local text, as in training.dataset_path."""
    dataset_subset: str | None = None
    """See training.dataset_subset."""
    dataset_split: str = "validation"
    """See training.dataset_split."""
    format: Literal["text"] | ConversationFormat | None = None
    """Overrides data.format."""
    columns: dict[str, str] | None = None
    """Overrides data.columns."""
    local_batch_size: BatchSize = 8
    """Samples per micro-batch on each rank."""
    seq_len: Size = 2048
    """Tokens per sample."""
    freq: Positive = 10
    """Steps between validations."""
    steps: AutoOrPositive = -1
    """Batches per validation on each rank; -1 evaluates each sample of the corpus once."""
    samples: AutoOrPositive = -1
    """Samples per validation over all ranks, the same ones on any mesh; replaces steps."""
    dataloader: DataLoader = DataLoader()
    base_corpus: Annotated[BaseCorpus, OnlyWith("validation.enable", rejected=True)] = BaseCorpus()


_TASKS = Needs("evaluation.tasks")


class Evaluation(Table):
    """Scores on tasks of lm-eval during training, without an export."""

    tasks: list[str] | None = None
    """Names of tasks, groups and tags of lm-eval, or of task_folder, to run every freq steps and after the
    last step. Tasks that generate text are not supported."""
    task_folder: Annotated[str | None, _TASKS, LocalPath()] = None
    """Folder of YAML files with further tasks."""
    freq: Annotated[Positive, _TASKS] = 1000
    """Steps between evaluations."""
    few_shot: Annotated[NonNegative | None, _TASKS] = None
    """Examples in each prompt; by default the task's number."""
    limit: Annotated[Positive | None, _TASKS] = None
    """Maximum number of examples of each task; by default all."""
    batch_size: Annotated[BatchSize, _TASKS] = 8
    """Rows per forward on each data-parallel rank."""
