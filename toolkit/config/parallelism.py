"""Tables for parallelism, memory savings and compilation."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Interval

from toolkit.config.types import (
    EXPERTS,
    FLOAT8,
    MAX_LAYERS,
    AutoOrDegree,
    BatchSize,
    Degree,
    Fraction,
    LocalPath,
    Needs,
    NonNegative,
    OnlyWith,
    Positive,
    Table,
)

_TP = OnlyWith("parallelism.tensor_parallel_degree", above=1)
_PP = OnlyWith("parallelism.pipeline_parallel_degree", above=1)
_CP = OnlyWith("parallelism.context_parallel_degree", above=1)
_SHARDED = Needs("parameters sharded over several ranks")
_AHEAD = Needs("one stage per rank, or resharding")
_BY_COUNT = Needs("stages cut by counts of layers")
_AGAIN = OnlyWith("activation_checkpoint.mode", ("selective", "full"), rejected=True)
_BUDGET = OnlyWith("activation_checkpoint.mode", ("memory_budget",), rejected=True)


class Parallelism(Table):
    """The device mesh: dp_replicate x dp_shard x cp x tp x pp is the world size."""

    data_parallel_replicate_degree: Degree = 1
    """Replicas of the sharded model; above 1 this is HSDP."""
    data_parallel_shard_degree: AutoOrDegree = -1
    """Ranks over which FSDP shards parameters, gradients and optimizer state; -1 uses all remaining ranks."""
    sharding_strategy: (
        Literal[
            "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5
        ]
        | None
    ) = None
    """FSDP1's or accelerate's name or number for a choice of the degrees and fsdp_reshard_after_forward."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Ge(2)] = "default"
    """Reshard (free) a unit's gathered parameters between forward and backward. default: all units but the
    last, which backward needs at once; with a pipeline none, because each micro-batch would gather them
    again. A number keeps them sharded over that many ranks, a divisor of dp_shard x cp, where pp and tp are
    1."""
    fsdp_wrap_policy: Literal["block", "class", "size"] = "block"
    """Modules that form an FSDP unit. block: the embedding, each block and the head; class: each module of a
    class in fsdp_wrap_classes; size: each module with at least fsdp_min_num_params parameters outside
    smaller units."""
    fsdp_wrap_classes: Annotated[
        list[str], OnlyWith("parallelism.fsdp_wrap_policy", ("class",), rejected=True)
    ] = ["TransformerBlock"]
    """Classes for fsdp_wrap_policy class: any of TransformerBlock, Attention, FeedForward, Linear, RMSNorm,
    Embedding, OutputHead."""
    fsdp_min_num_params: Annotated[
        Positive, OnlyWith("parallelism.fsdp_wrap_policy", ("size",), rejected=True)
    ] = 100_000_000
    """Smallest number of parameters per unit for fsdp_wrap_policy size."""
    fsdp_forward_prefetch: Annotated[NonNegative, _SHARDED, _AHEAD] = 1
    """Units to gather in advance during forward; 0 gathers each unit when it is needed, which still overlaps
    on CUDA."""
    fsdp_backward_prefetch: Annotated[Positive, _SHARDED, _AHEAD] = 1
    """Units to gather in advance during backward."""
    fsdp_sync_each_batch: Annotated[
        bool, OnlyWith("parallelism.pipeline_parallel_degree", (1,)), Needs("several micro-batches per step")
    ] = True
    """Reduce gradients after each micro-batch. false reduces once per step and keeps them unsharded until
    then, as a pipeline always does."""
    fsdp_skip_on_one_rank: Annotated[bool, Needs("a GPU"), Needs("a single rank")] = True
    """On one GPU, leave parameters that are already stored in the compute dtype out of FSDP, which would copy
    them twice per step. Does not apply with model.converters."""
    tensor_parallel_degree: Degree = 1
    """Ranks over which matrices, and the sequence between blocks, are split. Must divide the matrices and all
    heads."""
    tensor_parallel_recompute_allgather: Annotated[bool, _TP] = True
    """Save only this rank's shard of the gathered inputs of attention and feed-forward, and gather them again
    in backward (checkpointed blocks always do). false saves the gathered inputs and sends nothing more."""
    disable_loss_parallel: Annotated[bool, _TP] = False
    """Gather the logits of a tensor-parallel head before computing the loss."""
    enable_async_tensor_parallel: Annotated[bool, _TP] = False
    """Overlap tensor-parallel communication with matmuls. Needs compile, NVLink and GPUs of compute
    capability 9.0 or above."""
    pipeline_parallel_degree: Degree = 1
    """Ranks over which the blocks are split into stages."""
    module_fqns_per_model_part: Annotated[list[list[str]] | None, _PP] = None
    """Module names of each pipeline stage: tok_embeddings, layers.0 and so on, norm, output."""
    pipeline_parallel_first_stage_less_layers: Annotated[
        int, Interval(ge=0, le=MAX_LAYERS), _PP, _BY_COUNT
    ] = 1
    """Blocks that the embedding counts as: the first stage has that many fewer, down to none."""
    pipeline_parallel_last_stage_less_layers: Annotated[
        int, Interval(ge=0, le=MAX_LAYERS), _PP, _BY_COUNT
    ] = 1
    """Blocks that the head counts as: the last stage has that many fewer, down to none."""
    pipeline_parallel_layers_per_stage: Annotated[Positive | None, _PP, _BY_COUNT] = None
    """Blocks per stage, counting embedding and head. None: one or two stages per rank, by schedule."""
    pipeline_parallel_schedule: Annotated[
        Literal[
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
            "PipelineScheduleSingle",
            "PipelineScheduleMulti",
        ],
        _PP,
    ] = "1F1B"
    """Pipeline schedule, by torch's name. GPipe and 1F1B have one stage per rank, ZBVZeroBubble and DualPipeV
    two, the others two or more. 1F1B and DualPipeV need at least one micro-batch per stage. Schedules with a
    split backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) need parameters that stay unsharded.
    PipelineScheduleSingle (one stage per rank) and PipelineScheduleMulti (two or more) run a schedule
    file."""
    pipeline_parallel_schedule_csv: Annotated[str | None, _PP, LocalPath()] = ""
    """File with a custom schedule for torch to run: one line of actions such as 0F0,0F1,0B0,0B1 per rank. The
    named schedule still determines which rank has which stages; PipelineScheduleMulti assigns them round
    robin."""
    pipeline_parallel_microbatch_size: Annotated[BatchSize, _PP] = 1
    """Samples per pipeline micro-batch. All samples of a rank in a step pass through the pipeline, including
    accumulated ones."""
    context_parallel_degree: Degree = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Annotated[Literal["headtail"] | None, _CP] = "headtail"
    """Give each rank one chunk from the head and one from the tail of each sequence, which balances causal
    attention."""
    context_parallel_rotate_method: Annotated[Literal["allgather", "alltoall"], _CP] = "allgather"
    """Exchange of keys and values: all-gathered, or passed around a ring, which uses less memory and sends
    more; on CUDA with document masks they are always gathered."""

    expert_parallel_degree: Annotated[Degree, EXPERTS] = 1
    """Ranks over which the experts of each layer are divided: groups of adjacent ranks among dp_shard x cp x
    tp, or dp_shard x cp if tp splits experts. Must divide the number of experts."""

    expert_tensor_parallel_degree: Annotated[Degree, EXPERTS] = 1
    """Ranks over which the width of each expert is split under expert parallelism: 1, or
    tensor_parallel_degree. Without it, tensor_parallel_degree always splits it."""

    elastic_meshes: Annotated[list[str], Needs("NNODES=MIN:MAX, MIN below MAX")] = []
    """Meshes that a job with NNODES=MIN:MAX may use, such as "dp_shard=3 tp=2"; the first that uses all ranks
    is taken. Empty: the degrees above, if they fit."""


OPERATORS = ("op", "matmul")
"""Values of ``selective_ac_option`` that choose operators."""


class ActivationCheckpoint(Table):
    """Save fewer activations and recompute the rest in backward."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """none saves all activations, full only the inputs of blocks, selective chooses blocks or operators;
    memory_budget lets torch.compile choose, and needs it."""
    selective_ac_option: Annotated[str, OnlyWith("activation_checkpoint.mode", ("selective",))] = "2"
    """For mode selective: an integer n recomputes every n-th block; matmul recomputes all operators but
    matmuls and attention; op also the matmuls whose output is wider than their input."""
    early_stop: Annotated[bool, _AGAIN] = False
    """Stop recomputing as soon as all needed tensors are available."""
    memory_budget: Annotated[Fraction, _BUDGET] = 0.5
    """For mode memory_budget: fraction of the activations to save."""
    visualize_memory_budget_pareto: Annotated[bool, _BUDGET] = False
    """For mode memory_budget: plot the runtime cost of each budget into the folder memory_budget of the run.
    Needs the extra plot and takes some seconds per graph."""
    preserve_rng_state: Annotated[bool, _AGAIN] = True
    """Restore the random number generator's state for recomputation; needed only for dropout."""
    determinism_check: Annotated[Literal["default", "none"], _AGAIN] = "default"
    """default compares the shapes and dtypes of recomputed tensors with those of the forward; none does
    not."""
    debug: Annotated[bool, _AGAIN] = False
    """Report which operator differed when they do not match; slow."""
    enable_activation_offloading: Annotated[bool, _AGAIN, Needs("a GPU", rejected=True)] = False
    """Keep the inputs of recomputed blocks in CPU memory until backward."""
    offload_prefetch: Annotated[
        bool, OnlyWith("activation_checkpoint.enable_activation_offloading"), Needs("a GPU")
    ] = True
    """Copy a block's input back to the GPU while the block after it runs its backward."""

    @property
    def by_operator(self) -> bool:
        """Return whether operators, not blocks, are chosen for recomputation."""
        return self.mode == "selective" and self.selective_ac_option in OPERATORS


class Compile(Table):
    """torch.compile."""

    enable: bool = False
    """Compile the listed components."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """Components to compile: any of model (block by block) and loss."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "default"
    """Mode of inductor. reduce-overhead: fewer kernel launches through CUDA graphs;
    max-autotune-no-cudagraphs: benchmark several kernels per matmul in the first step and use the fastest."""
    fullgraph: bool = True
    """Fail if a block cannot be compiled as one graph; false falls back to eager at graph breaks."""
    cache_folder: Annotated[str, OnlyWith("model.attention", ("auto", "flex")), LocalPath()] = (
        "~/.cache/llama-toolkit/compile"
    )
    """Folder of compiled code, which speeds up later starts. TORCHINDUCTOR_CACHE_DIR, if set, overrides
    it."""

    @property
    def blocks(self) -> bool:
        """Return whether blocks are compiled."""
        return self.enable and "model" in self.components


class Float8(Table):
    """Float8 matmuls in the blocks' linear layers."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather the weights of these layers in float8."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, OnlyWith(".enable_fsdp_float8_all_gather", rejected=True)
    ] = False
    """Compute the scales for the float8 all-gather of all weights at once, after each step."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Scaling. tensorwise (the default): one scale per matrix; rowwise: one per row; rowwise_with_gw_hp:
    rowwise, with weight gradients computed in higher precision."""
    filter_fqns: list[str] = []
    """Layers to skip, by parts of their names; embedding and output head are always skipped."""
    emulate: bool = False
    """Emulate float8 in higher precision on any device; slow."""


class QuantizeLinear(Table):
    """Quantization of linear layers."""

    float8: Annotated[Float8, OnlyWith("model.converters", FLOAT8)] = Float8()


class Quantize(Table):
    """Low-precision matmuls."""

    linear: QuantizeLinear = QuantizeLinear()
