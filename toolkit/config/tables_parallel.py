"""Tables about how a model is spread over devices and made to fit and run fast on them."""

from __future__ import annotations

from typing import Annotated, Literal

from toolkit.config.fields import (
    ActsWith,
    AutoOrPositive,
    DefaultOnly,
    Fraction,
    NonNegative,
    NotBuilt,
    Positive,
    Table,
)

_MOE = DefaultOnly("mixture-of-experts models are not supported")
_MX = DefaultOnly("MX formats are not supported")
_TP = ActsWith("parallelism.tensor_parallel_degree")
_PP = ActsWith("parallelism.pipeline_parallel_degree")
_CP = ActsWith("parallelism.context_parallel_degree")
_FLOAT8 = ActsWith("model.converters")


class Parallelism(Table):
    """The mesh: dp_replicate x dp_shard x cp x tp x pp is the world size."""

    data_parallel_replicate_degree: Positive = 1
    """Replicas of the sharded model (HSDP when there are more than one)."""
    data_parallel_shard_degree: AutoOrPositive = -1
    """Ranks over which FSDP shards parameters, gradients and optimizer state; -1 is all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a unit's parameters between forward and backward. default: always, but never with pipelines."""
    tensor_parallel_degree: Annotated[Positive, NotBuilt()] = 1
    """Ranks over which each matrix is split."""
    disable_loss_parallel: Annotated[bool, _TP] = False
    """Gather the logits of a tensor-parallel head before the loss."""
    enable_async_tensor_parallel: Annotated[bool, _TP] = False
    """Overlap the communication of tensor parallelism with its matmuls; needs compile."""
    pipeline_parallel_degree: Annotated[Positive, NotBuilt()] = 1
    """Ranks over which the blocks are spread in order."""
    module_fqns_per_model_part: Annotated[list[list[str]] | None, _PP] = None
    """Module names of each pipeline stage, to cut by hand."""
    pipeline_parallel_first_stage_less_layers: Annotated[NonNegative, _PP] = 1
    """Blocks that the first stage has less, for the embedding."""
    pipeline_parallel_last_stage_less_layers: Annotated[NonNegative, _PP] = 1
    """Blocks that the last stage has less, for the head."""
    pipeline_parallel_layers_per_stage: Annotated[Positive | None, _PP] = None
    """Blocks of one stage, which sets the number of stages."""
    pipeline_parallel_schedule: Annotated[str, _PP] = "1F1B"
    """Schedule, by torch's name."""
    pipeline_parallel_schedule_csv: Annotated[str | None, _PP] = ""
    """File of a schedule of one's own."""
    pipeline_parallel_microbatch_size: Annotated[Positive, _PP] = 1
    """Samples of a pipeline micro-batch."""
    pipeline_parallel_expert_parallel_overlap: Annotated[bool, _MOE] = True
    """Overlap of pipeline and expert communication."""
    context_parallel_degree: Annotated[Positive, NotBuilt()] = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Annotated[Literal["headtail"] | None, _CP] = "headtail"
    """Give each rank a piece from the head and one from the tail of a sequence, so that causal attention
    costs all the same."""
    context_parallel_rotate_method: Annotated[Literal["allgather", "alltoall"], _CP] = "allgather"
    """How keys and values reach the other ranks."""
    expert_parallel_degree: Annotated[int, _MOE] = 1
    """Ranks over which experts are spread."""
    expert_tensor_parallel_degree: Annotated[int, _MOE] = 1
    """Tensor parallelism within an expert."""
    expert_parallel_comm_backend: Annotated[Literal["standard", "deepep"], _MOE] = "standard"
    """Communication of expert parallelism."""


class ActivationCheckpoint(Table):
    """Keep fewer activations and compute them again in backward."""

    mode: Annotated[Literal["selective", "full", "memory_budget", "none"], NotBuilt(("memory_budget",))] = (
        "selective"
    )
    """none keeps all, full only the inputs of blocks, selective does so for some blocks."""
    selective_ac_option: str = "2"
    """For selective: an integer n recomputes every n-th block; op chooses by operation (not built yet)."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: Annotated[list[str], _MOE] = ["moe.router.gate"]
    """Matmuls that op always computes again."""
    early_stop: bool = False
    """Stop computing again as soon as all that is needed is there."""
    memory_budget: Annotated[Fraction, ActsWith("activation_checkpoint.mode")] = 0.5
    """For memory_budget: part of the activations to keep."""
    visualize_memory_budget_pareto: Annotated[bool, ActsWith("activation_checkpoint.mode")] = False
    """For memory_budget: write a picture of the choices."""
    preserve_rng_state: bool = True
    """Compute again with the random numbers of the forward; needed only for dropout."""
    determinism_check: Literal["default", "none"] = "default"
    """default compares shapes and types of what was computed again with the forward; none does not."""
    debug: bool = False
    """Say which operation differed when they do not match; slow."""


class Compile(Table):
    """torch.compile."""

    enable: Annotated[bool, NotBuilt()] = False
    """Compile the components."""
    components: Annotated[list[Literal["model", "loss"]], ActsWith("compile.enable")] = ["model", "loss"]
    """What to compile: any of model (block by block) and loss."""
    backend: Annotated[str, ActsWith("compile.enable")] = "inductor"
    """Back end of torch.compile."""


class Float8Linear(Table):
    """float8 matmuls; used when model.converters names float8."""

    enable_fsdp_float8_all_gather: Annotated[bool, _FLOAT8] = False
    """Gather FSDP's parameters in float8."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[bool, _FLOAT8] = False
    """Compute all scales of the parameters at once after each step."""
    recipe_name: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, _FLOAT8] = None
    """Granularity of the scales."""
    filter_fqns: Annotated[list[str], _FLOAT8] = []
    """Modules to leave alone, by parts of their names."""
    emulate: Annotated[bool, _FLOAT8] = False
    """Compute in higher precision what float8 would give, on devices without it."""


class MXLinear(Table):
    """torchtitan's MX formats."""

    mxfp8_dim1_cast_kernel_choice: Annotated[Literal["triton", "cuda", "torch"], _MX] = "triton"
    """Kernel of the cast."""
    recipe_name: Annotated[str, _MX] = "mxfp8_cublas"
    """Recipe."""
    filter_fqns: Annotated[list[str], _MX] = ["output"]
    """Modules to leave alone."""


class QuantizeLinear(Table):
    """Linear layers."""

    float8: Float8Linear = Float8Linear()
    mx: MXLinear = MXLinear()


class Float8GroupedMM(Table):
    """float8 for the experts of a mixture."""

    fqns: Annotated[list[str] | str, _MOE] = []
    """Modules to convert."""


class MXGroupedMM(Table):
    """MX formats for the experts of a mixture."""

    recipe_name: Annotated[Literal["mxfp8"], _MOE] = "mxfp8"
    """Recipe."""
    fqns: Annotated[list[str] | str, _MOE] = []
    """Modules to convert."""


class QuantizeGroupedMM(Table):
    """Grouped matmuls."""

    float8: Float8GroupedMM = Float8GroupedMM()
    mx: MXGroupedMM = MXGroupedMM()


class Quantize(Table):
    """Low-precision matmuls."""

    linear: QuantizeLinear = QuantizeLinear()
    grouped_mm: QuantizeGroupedMM = QuantizeGroupedMM()
