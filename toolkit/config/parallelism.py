"""Tables about how a model is spread over devices and made to fit and run fast on them."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Interval

from toolkit.config.types import (
    FLOAT8,
    MAX_LAYERS,
    ActsWith,
    AutoOrDegree,
    BatchSize,
    Degree,
    Fraction,
    LocalPath,
    Needs,
    NonNegative,
    Positive,
    Table,
)

_TP = ActsWith("parallelism.tensor_parallel_degree", above=1)
_PP = ActsWith("parallelism.pipeline_parallel_degree", above=1)
_CP = ActsWith("parallelism.context_parallel_degree", above=1)
_SHARDED = Needs("parameters sharded over several ranks")
_AHEAD = Needs("one stage a rank, or resharding")
_BY_COUNT = Needs("stages cut by counts of layers")
_AGAIN = ActsWith("activation_checkpoint.mode", ("selective", "full"), refused=True)
_BUDGET = ActsWith("activation_checkpoint.mode", ("memory_budget",), refused=True)


class Parallelism(Table):
    """The mesh: dp_replicate x dp_shard x cp x tp x pp is the world size."""

    data_parallel_replicate_degree: Degree = 1
    """Replicas of the sharded model (HSDP when there are more than one)."""
    data_parallel_shard_degree: AutoOrDegree = -1
    """Ranks over which FSDP shards parameters, gradients and optimizer state; -1 is all that are left."""
    sharding_strategy: (
        Literal[
            "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5
        ]
        | None
    ) = None
    """FSDP1's and accelerate's name or number for a choice of the degrees and fsdp_reshard_after_forward."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Ge(2)] = "default"
    """Free a unit's parameters between forward and backward. default: all but the last unit's, which backward
    needs at once, and with a pipeline none, whose micro-batches would gather them each time. A number keeps
    them sharded over that many ranks, a divisor of dp_shard x cp, where pp and tp are 1."""
    fsdp_wrap_policy: Literal["block", "class", "size"] = "block"
    """Modules gathered and freed together. block: the embedding, each block, the head; class: each module of
    fsdp_wrap_classes; size: each module with fsdp_min_num_params that are in no smaller unit."""
    fsdp_wrap_classes: Annotated[
        list[str], ActsWith("parallelism.fsdp_wrap_policy", ("class",), refused=True)
    ] = ["TransformerBlock"]
    """For class: any of TransformerBlock, Attention, FeedForward, Linear, RMSNorm, Embedding, OutputHead."""
    fsdp_min_num_params: Annotated[
        Positive, ActsWith("parallelism.fsdp_wrap_policy", ("size",), refused=True)
    ] = 100_000_000
    """For size: parameters of the smallest unit."""
    fsdp_forward_prefetch: Annotated[NonNegative, _SHARDED, _AHEAD] = 1
    """Units to ask for while another computes its forward; 0: when its turn comes, which overlaps on CUDA."""
    fsdp_backward_prefetch: Annotated[Positive, _SHARDED, _AHEAD] = 1
    """Units to ask for while another computes its backward."""
    fsdp_sync_each_batch: Annotated[
        bool, ActsWith("parallelism.pipeline_parallel_degree", (1,)), Needs("several micro-batches a step")
    ] = True
    """Reduce gradients after each micro-batch. false: once a step, whole until then; so does a pipeline."""
    fsdp_skip_on_one_rank: Annotated[bool, Needs("a GPU"), Needs("a single rank")] = True
    """On one GPU, without model.converters, leave parameters that are stored in the compute precision out of
    FSDP, which would copy them twice a step."""
    fsdp_shared_memory: Annotated[bool, Needs("a CPU"), _SHARDED, Needs("gathers among all shards")] = True
    """Gather and reduce on CPUs through memory that ranks of one machine share; false: by gloo's sockets."""
    tensor_parallel_degree: Degree = 1
    """Ranks over which matrices are split, and the sequence between blocks. Divides them and all heads."""
    tensor_parallel_recompute_allgather: Annotated[bool, _TP] = True
    """Keep of what attention and feed-forward gather this rank's piece, and gather it again in backward, as a
    block that is checkpointed does in any case. false keeps the whole: nothing more is sent."""
    disable_loss_parallel: Annotated[bool, _TP] = False
    """Gather the logits of a tensor-parallel head before the loss."""
    enable_async_tensor_parallel: Annotated[bool, _TP] = False
    """Overlap its communication with matmuls. Needs compile and GPUs of capability 9.0 or more, NVLink."""
    pipeline_parallel_degree: Degree = 1
    """Ranks over which the blocks are spread in order."""
    module_fqns_per_model_part: Annotated[list[list[str]] | None, _PP] = None
    """Names of the modules of each stage of the schedule: tok_embeddings, layers.0 and on, norm, output."""
    pipeline_parallel_first_stage_less_layers: Annotated[
        int, Interval(ge=0, le=MAX_LAYERS), _PP, _BY_COUNT
    ] = 1
    """Blocks that the embedding counts as: the first stage has so many less, and none where that is all."""
    pipeline_parallel_last_stage_less_layers: Annotated[
        int, Interval(ge=0, le=MAX_LAYERS), _PP, _BY_COUNT
    ] = 1
    """Blocks that the head counts as: the last stage has so many less, and none where that is all."""
    pipeline_parallel_layers_per_stage: Annotated[Positive | None, _PP, _BY_COUNT] = None
    """Blocks of a stage, embedding and head counted; without it ranks have one stage or two, by schedule."""
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
    """Schedule, by torch's name. GPipe and 1F1B have one stage a rank, ZBVZeroBubble and DualPipeV two, the
    others two or more. 1F1B and DualPipeV need a micro-batch for each stage. Those with a split backward
    (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) need parameters that stay gathered.
    PipelineScheduleSingle (one stage a rank) and PipelineScheduleMulti (two or more) are for a file."""
    pipeline_parallel_schedule_csv: Annotated[str | None, _PP, LocalPath()] = ""
    """File of a schedule of one's own, a line of actions such as 0F0,0F1,0B0,0B1 for each rank, by which
    torch runs in place of the named one. That one still says how stages are placed, as does
    PipelineScheduleMulti: stage 0 on rank 0, 1 on rank 1, and around."""
    pipeline_parallel_microbatch_size: Annotated[BatchSize, _PP] = 1
    """Samples of a pipeline micro-batch; all of a rank in a step go through it, accumulated ones too."""
    context_parallel_degree: Degree = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Annotated[Literal["headtail"] | None, _CP] = "headtail"
    """Give each rank a piece of each sequence's head and tail, so that causal attention costs all alike."""
    context_parallel_rotate_method: Annotated[Literal["allgather", "alltoall"], _CP] = "allgather"
    """How keys and values reach the other ranks: gathered, or in a ring, from rank to rank, which keeps less
    and sends more; on CUDA with document masks they are gathered."""

    elastic_meshes: Annotated[list[str], Needs("NNODES=MIN:MAX, MIN below MAX")] = []
    """Meshes that a launch of NNODES = MIN:MAX may take, such as "dp_shard=3 tp=2": the first that all ranks
    fill. Empty: the degrees above, where they fit."""


class ActivationCheckpoint(Table):
    """Keep fewer activations and compute them again in backward."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """none keeps all, full only the inputs of blocks, selective chooses blocks or operations;
    memory_budget lets torch.compile choose, and needs it."""
    selective_ac_option: Annotated[str, ActsWith("activation_checkpoint.mode", ("selective",))] = "2"
    """For selective: an integer n recomputes every n-th block; op recomputes what is cheap for its size."""
    early_stop: Annotated[bool, _AGAIN] = False
    """Stop computing again as soon as all that is needed is there."""
    memory_budget: Annotated[Fraction, _BUDGET] = 0.5
    """For memory_budget: part of the activations to keep."""
    visualize_memory_budget_pareto: Annotated[bool, _BUDGET] = False
    """For memory_budget: draw what each budget would cost in time into the run's folder memory_budget. Needs
    the extra plot, and some seconds a graph."""
    preserve_rng_state: Annotated[bool, _AGAIN] = True
    """Compute again with the random numbers of the forward; needed only for dropout."""
    determinism_check: Annotated[Literal["default", "none"], _AGAIN] = "default"
    """default compares shapes and types of what was computed again with the forward; none does not."""
    debug: Annotated[bool, _AGAIN] = False
    """Say which operation differed when they do not match; slow."""
    enable_activation_offloading: Annotated[bool, _AGAIN, Needs("a GPU", refused=True)] = False
    """Keep the inputs of blocks that are computed again in CPU memory until then."""
    offload_prefetch: Annotated[
        bool, ActsWith("activation_checkpoint.enable_activation_offloading"), Needs("a GPU")
    ] = True
    """Copy the input of a block back to the GPU while the block after it computes its backward."""

    @property
    def by_operator(self) -> bool:
        """Say if it chooses operators."""
        return self.mode == "selective" and self.selective_ac_option == "op"


class Compile(Table):
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """Parts to compile: any of model (block by block) and loss."""
    backend: str = "inductor"
    """Back end of torch.compile."""
    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "default"
    """The aim of inductor. reduce-overhead: few launches, by CUDA graphs; max-autotune-no-cudagraphs: the
    fastest of several kernels for each matmul, which it times in the first step."""
    fullgraph: bool = True
    """A block that cannot be compiled whole is an error; false falls back to eager at graph breaks."""
    cache_folder: Annotated[str, ActsWith("model.attention", ("auto", "flex")), LocalPath()] = (
        "~/.cache/llama-toolkit/compile"
    )
    """Folder of compiled code, which makes the second start fast. TORCHINDUCTOR_CACHE_DIR, if set, is used
    in its place."""

    @property
    def blocks(self) -> bool:
        """Say if blocks are compiled."""
        return self.enable and "model" in self.components


class Float8Linear(Table):
    """Linear layers of the blocks that multiply in float8."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather the weights of these layers in float8."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, ActsWith(".enable_fsdp_float8_all_gather", refused=True)
    ] = False
    """Find the scales of what is gathered so at once, after each step."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """tensorwise, the default: a scale a matrix; rowwise: one a row of it; rowwise_with_gw_hp: that, and
    gradients of weights in higher precision."""
    filter_fqns: list[str] = []
    """Layers to leave alone, by parts of their names; embedding and output are in any case."""
    emulate: bool = False
    """Compute the same in higher precision, on any device; slow."""


class QuantizeLinear(Table):
    """Linear layers."""

    float8: Annotated[Float8Linear, ActsWith("model.converters", FLOAT8)] = Float8Linear()


class Quantize(Table):
    """Low-precision matmuls."""

    linear: QuantizeLinear = QuantizeLinear()
