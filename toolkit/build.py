"""From a configuration and a mesh to a sharded, initialised model.

The model is made on the meta device, sharded there, and only then given storage, so that no rank
ever holds more than its shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config import Config
from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import Filled
from toolkit.distributed.process_group import DTYPES, native_dtype
from toolkit.models.common.args import ModelArgs, is_classifier_head
from toolkit.models.common.attention_choice import attention_choice
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.init import init_rule
from toolkit.parallel.dims import takes_ring
from toolkit.parallel.fsdp import mixed_precision
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.model_parts import ModelParts, SingleModel
from toolkit.parallel.objective import Objective
from toolkit.parallel.parallelize import parallelize

if TYPE_CHECKING:
    from toolkit.parallel.context_parallel import SequenceShards
    from toolkit.parallel.pipeline_schedules import Stages
    from toolkit.weights.source import WeightSource

EXPORT_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The precision of forward and backward: "auto" is bfloat16 where the device multiplies it natively."""
    name = config.training.mixed_precision_param
    return native_dtype(device) if name == "auto" else DTYPES[name]


def compiles(config: Config, device: torch.device) -> bool:
    """Say if something will be compiled: the model, or FlexAttention by itself."""
    return config.compile.enable or (device.type == "cuda" and _attention(config, device) == "flex")


def _attention(config: Config, device: torch.device) -> str:
    model = config.model
    if config.finetune.adapter == "prefix_tuning":
        return "sdpa"  # the others take no prefix
    return attention_choice(
        model.attention, model.flavor or "", device=device.type, documents=config.data.document_mask
    )


def _shards(config: Config, mesh: Mesh) -> SequenceShards | None:
    if mesh.cp is None:
        return None
    from toolkit.parallel.context_parallel import SequenceShards

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
    storage: bool = True,
) -> ModelParts:
    """Build a model sharded over ``mesh`` on ``device``, which computes in ``param_dtype``.

    Its weights are a function of ``seed`` alone; ``pretrained`` ones, which will be loaded, are whatever was
    in memory, save for what fine-tuning adds to them. Without ``storage`` it stays on the meta device, to be
    looked at.
    """
    if compiles(config, device):
        from toolkit.parallel.compile import keep_for_two_backwards, use_cache
        from toolkit.parallel.pipeline_schedules import may_split_backward

        use_cache(Path(config.compile.cache_folder).expanduser())
        keep_for_two_backwards(may_split_backward(config.parallelism))
    shards, offload = _shards(config, mesh), config.training.enable_cpu_offload
    stages = _stages(config, args, mesh)
    models = []
    for modules in _modules_here(stages, mesh):
        with torch.device("meta"):
            model = Decoder(
                args,
                attention=_attention(config, device),
                loss_chunk_tokens=config.training.loss_chunk_tokens,
            )
        if modules:
            from toolkit.parallel.pipeline_parallel import cut

            cut(model, modules)
        model.to(DTYPES[config.training.dtype])
        if config.finetune.chooses:
            from toolkit.finetune.converters import apply_finetune

            apply_finetune(model, config.finetune, frozen_dtype=param_dtype)
        parallelize(
            model,
            mesh,
            parallelism=config.parallelism,
            checkpointing=config.activation_checkpoint,
            compiling=config.compile,
            precision=mixed_precision(config.training, param_dtype),
            cpu_offload=offload,
            shards=shards,
            ring=takes_ring(config.parallelism, device=device.type, documents=config.data.document_mask),
            pareto_folder=Path(config.job.dump_folder).expanduser() / "memory_budget",
        )
        models.append(model.to_empty(device="cpu" if offload else device) if storage else model)
    model_parts = _model_parts(config, models, stages, mesh, shards, param_dtype, device)
    if storage:
        _initialize(config, args, model_parts, seed, pretrained)
    return model_parts


def _initialize(
    config: Config, args: ModelArgs, model_parts: ModelParts, seed: int, pretrained: bool
) -> None:
    named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
    if not config.finetune.adds:
        drawn = [it for it in named if is_classifier_head(it[0], args) or not pretrained]
        initialize(drawn, seed, lambda name: init_rule(name, args))
        return
    from toolkit.finetune.converters import added_init, settle
    from toolkit.finetune.parameters import added_shapes, is_added

    shapes = added_shapes(args, config.finetune)
    new = [it for it in named if is_added(it[0]) or is_classifier_head(it[0], args)]
    drawn = new if pretrained else named
    initialize(
        _to_fill(drawn),
        seed,
        lambda name: added_init(name, shapes[name]) if name in shapes else init_rule(name, args),
    )
    if not pretrained:
        settle(model_parts.models)


def _stages(config: Config, args: ModelArgs, mesh: Mesh) -> Stages | None:
    if mesh.pp is None:
        return None
    from toolkit.parallel.pipeline_schedules import pipeline_stages

    return pipeline_stages(config.parallelism, args.n_layers)


def _modules_here(stages: Stages | None, mesh: Mesh) -> Sequence[list[str] | None]:
    """Names of the modules of each stage of this rank; None is the whole model."""
    if stages is None or mesh.pp is None:
        return [None]
    return [stages.modules[stage] for stage in stages.of_ranks[mesh.pp.get_local_rank()]]


def _model_parts(
    config: Config,
    models: list[Decoder],
    stages: Stages | None,
    mesh: Mesh,
    shards: SequenceShards | None,
    param_dtype: torch.dtype,
    device: torch.device,
) -> ModelParts:
    objective = _objective(config, mesh)
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
        csv=Path(csv).expanduser() if csv else None,
        micro_batch=options.pipeline_parallel_microbatch_size,
        hidden_dtype=param_dtype,
        device=device,
    )


def _objective(config: Config, mesh: Mesh) -> Objective:
    if config.finetune.objective == "sft":
        return Objective()
    from toolkit.finetune.dpo import PreferenceObjective

    return PreferenceObjective(config.finetune.dpo, mesh.cp.get_group() if mesh.cp else None)


def load_hugging_face(
    model_parts: ModelParts,
    folder: Path,
    *,
    broadcast: bool,
    group: dist.ProcessGroup,
    vocab_size: int | None = None,
) -> None:
    """Fill the model with the weights of a Hugging Face folder, which with ``broadcast`` rank 0 alone sees.

    ``group`` has all ranks and carries CPU tensors. Where the embedding has fewer rows than ``vocab_size``,
    the others are their mean, and so are the head's.

    Raises:
        DataError: the folder is damaged or does not fit the model; alike on every rank.
    """
    from toolkit.weights.load import open_alike
    from toolkit.weights.safetensors import SafetensorsFolder
    from toolkit.weights.views import Resized

    def opened() -> WeightSource:
        source: WeightSource = SafetensorsFolder(folder)
        return Resized(source, vocab_size) if vocab_size and vocab_size > source.args.vocab_size else source

    source = open_alike(opened, on_rank_0_alone=broadcast, group=group)
    fill(model_parts, source, broadcast=broadcast, group=group)


def fill(
    model_parts: ModelParts, source: WeightSource | None, *, broadcast: bool = False, group: dist.ProcessGroup
) -> None:
    """Fill the model, save for what fine-tuning adds to it, from ``source``, which with ``broadcast`` rank 0
    alone has. Of a language model a classifier leaves the head.

    Raises:
        DataError: the weights are damaged or do not fit the model; alike on every rank.
    """
    from toolkit.finetune.parameters import is_added
    from toolkit.weights.load import load_weights
    from toolkit.weights.source import HEAD
    from toolkit.weights.views import Only

    args = model_parts.models[0].args
    headless = Ranks(group).on_rank_0(
        lambda: source is not None and bool(args.classifier) and not source.args.classifier
    )
    if headless and source is not None:
        source = Only(source, source.tensors.keys() - {HEAD})
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model_parts.named_parameters()
        if not is_added(name) and not (headless and is_classifier_head(name, args))
    }
    load_weights(source, dict(_to_fill(tensors.items())), broadcast_from_rank_0=broadcast, group=group)
    model_parts.refresh_tied_copies(tensors, dict(model_parts.tied_copies()))


def _to_fill(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Filled]]:
    """Tensors as they are filled: weights in 4 bits by the numbers that they are made from."""
    for name, tensor in named:
        if tensor.dtype == torch.uint8:
            from toolkit.finetune.nf4 import Packed

            yield name, Packed(tensor)
        else:
            yield name, tensor
