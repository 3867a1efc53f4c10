"""From a configuration and a mesh to a sharded, initialised model.

The model is made on the meta device, sharded there, and only then given storage, so that no rank
ever holds more than its shards.
"""

from __future__ import annotations

import torch

from toolkit import hardware
from toolkit.config import Config
from toolkit.models.llama.model import Llama, init_rule
from toolkit.models.llama.presets import LlamaArgs, resolve
from toolkit.parallel.activation_checkpoint import ActivationCheckpointing
from toolkit.parallel.initialize import initialize
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.parallelize import parallelize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_args(config: Config, *, tokenizer_vocab: int) -> LlamaArgs:
    """The preset that ``config.model`` names, changed field by field.

    Raises:
        ConfigError: the preset does not exist or its fields contradict one another.
    """
    model = config.model
    return resolve(model.name, model.flavor, tokenizer_vocab=tokenizer_vocab, **model.overrides())


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The precision of forward and backward: "auto" is bfloat16 where the device multiplies it natively."""
    name = config.training.mixed_precision_param
    if name == "auto":
        if device.type == "cuda":
            native = torch.cuda.get_device_capability(device) >= (8, 0)
        else:
            native = hardware.cpu_multiplies_bf16()
        name = "bfloat16" if native else "float32"
    return DTYPES[name]


def _checkpointing(config: Config) -> ActivationCheckpointing:
    options = config.activation_checkpoint
    return ActivationCheckpointing(
        mode=options.mode,
        every=int(options.selective_ac_option) if options.mode == "selective" else 1,
        early_stop=options.early_stop,
        preserve_rng_state=options.preserve_rng_state,
        determinism_check=options.determinism_check,
        debug=options.debug,
    )


def build_model(
    config: Config, args: LlamaArgs, mesh: Mesh, device: torch.device, *, param_dtype: torch.dtype, seed: int
) -> Llama:
    """A model sharded over ``mesh`` on ``device``, its weights a function of ``seed`` alone."""
    with torch.device("meta"):
        model = Llama(args, loss_chunk_tokens=config.training.loss_chunk_tokens)
    model = model.to(DTYPES[config.training.dtype])
    parallelize(
        model,
        mesh,
        checkpointing=_checkpointing(config),
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
    )
    model.to_empty(device=device)
    initialize(model, seed, lambda name: init_rule(name, args))
    return model
