"""Build a sharded, initialized model from a configuration and a mesh.

The model is created and sharded on the meta device and allocated afterwards, so a rank never stores more than
its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit import cpu, fused
from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.config.training import Loss
from toolkit.cpu.linear import is_faster, replace_linears
from toolkit.distributed.process_group import DTYPES, native_dtype
from toolkit.hardware import device_type
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.from_config import attention_name
from toolkit.models.meta_decoder import meta_decoder
from toolkit.models.parameters import init_rule, is_classifier_head
from toolkit.models.teacher import teacher_args, teacher_config
from toolkit.parallel.dims import uses_ring
from toolkit.parallel.fsdp import mixed_precision
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.model_parts import ModelParts, SingleModel
from toolkit.parallel.objective import Objective, WeightedObjective
from toolkit.parallel.parallelize import parallelize
from toolkit.parallel.pipeline_schedules import Stages, may_split_backward, pipeline_stages

if TYPE_CHECKING:
    from toolkit.parallel.sequence_shards import SequenceShards


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward; "auto" means bfloat16 if the device supports it natively."""
    name = config.training.mixed_precision_param
    return native_dtype(device) if name == "auto" else DTYPES[name]


def compiles(config: Config, device: torch.device, args: ModelArgs) -> bool:
    """Report whether anything is compiled: the model or, on CUDA, FlexAttention or fused parts."""
    if config.compile.enable or device.type != "cuda":
        return config.compile.enable
    return bool(config.training.fused_parts) or attention_name(config, device.type, args) == "flex"


def _uses_onednn(config: Config, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers use oneDNN; a split backward would compute gradients twice."""
    on_cpu = device_type(device.type) == "cpu" and cpu.is_enabled()
    return on_cpu and dtype == torch.float32 and is_faster() and not may_split_backward(config.parallelism)


def _shards(config: Config, mesh: Mesh) -> SequenceShards | None:
    if mesh.cp is None:
        return None
    from toolkit.parallel.sequence_shards import SequenceShards

    balanced = config.parallelism.context_parallel_load_balancer is not None
    return SequenceShards(mesh.cp.get_local_rank(), mesh.cp.size(), balanced=balanced)


def build_model(
    config: Config,
    args: ModelArgs,
    mesh: Mesh,
    device: torch.device,
    *,
    param_dtype: torch.dtype,
    seed: int,
    pretrained: bool = False,
    weighted: bool = False,
    storage: bool = True,
) -> ModelParts:
    """Build a model sharded over ``mesh`` on ``device`` that computes in ``param_dtype``.

    Initial weights depend only on ``seed``. If ``pretrained``, only parameters added by fine-tuning are
    initialized here; the others are loaded later. ``weighted`` means that the loss weights its tokens.
    Without ``storage`` the model stays on the meta device.

    Raises:
        ConfigError: a custom decoder or converter changes the model's parameters.
    """
    fused.enable(config.training.fused_parts if device.type == "cuda" else ())
    cpu.enable(config.training.cpu_fast_paths)
    if compiles(config, device, args):
        from toolkit.parallel.compile import allow_split_backward, limit_recompilation, set_cache_folder

        set_cache_folder(expand_user(config.compile.cache_folder))
        limit_recompilation()
        allow_split_backward(may_split_backward(config.parallelism))
    shards, offload = _shards(config, mesh), config.training.enable_cpu_offload
    stages = _stages(config, args, mesh)
    converters = None
    if config.model.converters:
        from toolkit.parallel.converters import Converters

        converters = Converters(config)
    parallelism = config.parallelism
    if converters:  # they may rely on FSDP's hooks; float8 does for its all-gathers
        parallelism = parallelism.model_copy(update={"fsdp_skip_on_one_rank": False})
    bitwise = None
    if config.debug.bitwise_data_parallel:
        from toolkit.parallel.bitwise import BitwiseSums

        bitwise = BitwiseSums(mesh)
    models = []
    for modules in _modules_of_rank(stages, mesh):
        model = meta_decoder(
            args,
            attention=attention_name(config, device.type, args),
            loss_chunk_tokens=config.training.loss_chunk_tokens,
            dtype=DTYPES[config.training.dtype],
        )
        if modules:
            from toolkit.parallel.pipeline_parallel import keep_stage

            keep_stage(model, modules)
        if config.finetune.chooses:
            from toolkit.finetune.apply import apply_finetune

            apply_finetune(model, config.finetune, frozen_dtype=param_dtype)
        if config.distillation.enable and model.output is not None:
            from toolkit.finetune.distillation import distillation_losses

            model.output.training_losses = partial(distillation_losses, options=config.distillation)
        if config.loss != Loss() and model.output is not None:
            from toolkit.models.common.loss_terms import training_losses

            model.output.training_losses = training_losses(config)
        if converters:
            converters.convert(model)
        if _uses_onednn(config, device, param_dtype):
            replace_linears(model)
        parallelize(
            model,
            mesh,
            parallelism=parallelism,
            checkpointing=config.activation_checkpoint,
            compiling=config.compile,
            precision=mixed_precision(config.training, param_dtype),
            cpu_offload=offload,
            shards=shards,
            ring=uses_ring(config.parallelism, device=device.type, documents=config.data.document_mask),
            pareto_folder=expand_user(config.job.dump_folder) / "memory_budget",
            bitwise=bitwise,
        )
        models.append(model.to_empty(device="cpu" if offload else device) if storage else model)
    after_update = converters.connect(models, mesh) if converters else []
    objective = _objective(config, mesh, device, param_dtype, weighted=weighted, storage=storage)
    model_parts = _model_parts(config, models, stages, mesh, shards, objective, param_dtype, device)
    model_parts.after_update, model_parts.bitwise = after_update, bitwise
    model_parts.connect = partial(converters.connect, models, mesh) if converters else None
    if alpha := config.finetune.neftune_noise_alpha:
        from toolkit.parallel.embedding_noise import EmbeddingNoise

        model_parts.noise = EmbeddingNoise(alpha, mesh, shards, seed=seed, interleaved=bitwise is not None)
        for model in models:
            if model.tok_embeddings is not None:
                model.tok_embeddings.register_forward_hook(model_parts.noise)
    if args.moe and any(map(args.moe.has_experts, range(args.n_layers))):
        from toolkit.parallel.expert_load import ExpertLoad

        balanced = config.debug.moe_force_load_balance
        options = config.moe
        if config.finetune.adds:  # the biases belong to the frozen base
            options = options.model_copy(update={"load_balance_coeff": 0.0})
        model_parts.track_experts(ExpertLoad(models, mesh, options, balanced=balanced))
    if storage:
        _initialize(config, args, model_parts, seed, pretrained)
    return model_parts


def _initialize(
    config: Config, args: ModelArgs, model_parts: ModelParts, seed: int, pretrained: bool
) -> None:
    tensors: list[tuple[str, Tensor]] = [
        *model_parts.named_parameters(),
        *model_parts.named_buffers(),
        *model_parts.tied_copies(),
    ]
    if not config.finetune.adds:
        new = [it for it in tensors if is_classifier_head(it[0], args) or not pretrained]
        initialize(new, seed, lambda name: init_rule(name, args))
        return
    from toolkit.finetune.apply import added_init, init_from_weights
    from toolkit.finetune.parameters import added_shapes, is_added
    from toolkit.weights.pretrained import load_targets

    shapes = added_shapes(args, config.finetune)
    new = tensors
    if pretrained:
        new = [it for it in tensors if is_added(it[0]) or is_classifier_head(it[0], args)]
    initialize(
        load_targets(new),
        seed,
        lambda name: added_init(name, shapes[name]) if name in shapes else init_rule(name, args),
    )
    if not pretrained:
        init_from_weights(model_parts.models)


def _stages(config: Config, args: ModelArgs, mesh: Mesh) -> Stages | None:
    return None if mesh.pp is None else pipeline_stages(config.parallelism, args.n_layers)


def _modules_of_rank(stages: Stages | None, mesh: Mesh) -> Sequence[list[str] | None]:
    """Return the module names of each pipeline stage on this rank; None means the whole model."""
    if stages is None or mesh.pp is None:
        return [None]
    return [stages.modules[stage] for stage in stages.of_ranks[mesh.pp.get_local_rank()]]


def _model_parts(
    config: Config,
    models: list[Decoder],
    stages: Stages | None,
    mesh: Mesh,
    shards: SequenceShards | None,
    objective: Objective,
    param_dtype: torch.dtype,
    device: torch.device,
) -> ModelParts:
    if stages is None:
        return SingleModel(models[0], mesh, shards, config.parallelism, objective)
    from toolkit.parallel.pipeline_parallel import Pipeline

    options = config.parallelism
    csv = options.pipeline_parallel_schedule_csv
    return Pipeline(
        models,
        mesh,
        shards,
        objective,
        stages_of_ranks=stages.of_ranks,
        schedule=options.pipeline_parallel_schedule,
        csv=expand_user(csv) if csv else None,
        micro_batch=options.pipeline_parallel_microbatch_size,
        hidden_dtype=param_dtype,
        device=device,
    )


def _objective(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    param_dtype: torch.dtype,
    *,
    weighted: bool,
    storage: bool,
) -> Objective:
    if config.distillation.enable:
        from toolkit.finetune.distillation import DistillationObjective

        teacher = _teacher(config, mesh, device, param_dtype, storage=storage)
        return DistillationObjective(config.distillation, teacher)
    if config.finetune.objective == "sft":
        return WeightedObjective() if weighted else Objective()
    from toolkit.finetune.preferences import preference_objective

    return preference_objective(config.finetune, mesh.cp.get_group() if mesh.cp else None)


def _teacher(
    config: Config, mesh: Mesh, device: torch.device, param_dtype: torch.dtype, *, storage: bool
) -> ModelParts:
    """Build the frozen teacher in the compute dtype. Its weights are loaded later."""
    training = config.training.model_copy(update={"dtype": str(param_dtype).removeprefix("torch.")})
    teacher = build_model(
        teacher_config(config).model_copy(update={"training": training}),
        teacher_args(config),
        mesh,
        device,
        param_dtype=param_dtype,
        seed=0,
        pretrained=True,
        storage=storage,
    )
    for model in teacher.models:
        model.eval().requires_grad_(False)
        if model.output is not None:
            model.output.top_k = config.distillation.top_k
    return teacher
