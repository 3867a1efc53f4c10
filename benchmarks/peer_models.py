"""The same training step twice: this toolkit's, and that of transformers' LlamaForCausalLM, or of its
Qwen3MoeForCausalLM, with an adapter of PEFT's where there is one, each layer under torch's ``fully_shard``.

Both begin from the same weights, which are drawn by the names that they have here, and take the same tokens.
Both compute in the dtype of the case: bfloat16 is FSDP's mixed precision over trained parameters in fp32, and
frozen ones stored in it. Both clip by the global norm and update by torch's fused AdamW.
Where a case is compiled, it is the blocks of both, and the loss here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from toolkit.build import build_model
from toolkit.config import Config
from toolkit.cpu.memory import keep_freed_memory
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.distributed.process_group import DTYPES
from toolkit.finetune.parameters import added_shapes, is_added
from toolkit.models.common.args import ModelArgs, MoEArgs, RopeScaling
from toolkit.models.common.parameter_table import Init
from toolkit.models.parameters import init_rule, parameter_shapes, table
from toolkit.models.registry import resolve
from toolkit.optim.optimizer import build_optimizer
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.mesh import build_mesh
from toolkit.train_step import TrainStep

SHAPES: dict[str, dict[str, int]] = {
    "5.2M": {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 768, "vocab_size": 4096},
    "33.6M": {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192},
    "125M": {
        "dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048, "vocab_size": 32000
    },
    "experts-109M": {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 8192},
}  # fmt: skip
EXPERTS = {"experts-109M": MoEArgs(num_experts=8, top_k=2, ffn_dim=896, route_norm=True)}
"""Models of Qwen3 with experts, by name in :data:`SHAPES`."""
RANK, ALPHA = 16, 32
ATTENTION, EXPERTS_OUT = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}, "w2"
"""Targets of LoRA in a model with experts, by PEFT's names. For gate and up PEFT has one A, so that steps
differ from those here."""
LEARNING_RATE, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 0

Step = Callable[[Tensor, Tensor], tuple[float, float]]
"""From tokens and shifted labels (B, S) of this rank to the mean loss of all and the gradient's norm."""


@dataclass(frozen=True)
class Case:
    """``rows`` of ``length`` tokens a rank and step, on ``ranks`` processes of ``threads`` threads each."""

    shape: str
    ranks: int
    threads: int
    dtype: str
    rows: int
    length: int
    lora: bool = False
    compiled: bool = False

    @property
    def args(self) -> ModelArgs:
        if self.shape not in EXPERTS:
            return resolve("llama3", "debugmodel", **SHAPES[self.shape])
        args = resolve("qwen3_moe", "debugmodel", **SHAPES[self.shape])
        return replace(args, moe=EXPERTS[self.shape], tie_embeddings=False)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.ranks * self.rows * self.length


def missing(lora: bool) -> str | None:
    """Name the library that a comparison lacks here."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "transformers"
    if lora:
        try:
            import peft  # noqa: F401
        except ImportError:
            return "peft"
    return None


def batches(case: Case, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens and labels of this rank: speed does not depend on them."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        shape = (case.rows, case.length + 1)
        tokens = torch.randint(SHAPES[case.shape]["vocab_size"], shape, generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# This toolkit


def configuration(case: Case) -> Config:
    """The config of a case: all at its default that the peer has alike, else off."""
    tables: dict[str, Any] = {
        "training": {
            "seq_len": case.length,
            "local_batch_size": case.rows,
            "global_batch_size": case.rows * case.ranks,
            "mixed_precision_param": case.dtype,
            "max_norm": MAX_NORM,
        },
        "optimizer": {"lr": LEARNING_RATE, "weight_decay": DECAY},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enable": case.compiled},
    }
    if case.lora:
        targets = [*ATTENTION, EXPERTS_OUT] if case.shape in EXPERTS else ["all-linear"]
        lora = {"rank": RANK, "alpha": ALPHA, "target_modules": targets}
        tables["finetune"] = {"adapter": "lora", "lora": lora}
    return Config.model_validate(tables)


def ours(case: Case, config: Config | None = None) -> Step:
    """The step of this toolkit's trainer, by the config of the case or another one."""
    config, device = config or configuration(case), torch.device("cpu")
    mesh = build_mesh(device, dp_shard=dist.get_world_size())
    param_dtype = DTYPES[case.dtype]
    parts = build_model(config, case.args, mesh, device, param_dtype=param_dtype, seed=SEED, pretrained=True)
    initialize(parts.named_parameters(), SEED, lambda name: _rule(name, case.args))
    optimizer = build_optimizer(parts.named_parameters(), config)
    train_step = TrainStep(parts, optimizer, max_norm=MAX_NORM, device=device)
    keep_freed_memory()  # as the trainer does

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        batch = {"tokens": tokens, "labels": labels, "positions": None, "documents": None}
        result = train_step([batch], learning_rate=LEARNING_RATE)
        return result.loss, result.grad_norm

    return step


def _rule(name: str, args: ModelArgs) -> Init:
    """The start of a parameter: an adapter's changes what the model says from the first step on."""
    return Init(std=0.02) if is_added(name) else init_rule(name, args)


# The peer

_ADDED = {"lora_a": "lora_A.default.weight", "lora_b": "lora_B.default.weight"}


def theirs(case: Case) -> Step:
    """The step of a loop around transformers and PEFT, with gradients averaged by FSDP."""
    dtype = DTYPES[case.dtype]
    with torch.device("meta"):
        decoder = _decoder(case.args)
        model = _with_lora(decoder.to(dtype), case) if case.lora else decoder
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder.model.layers:
        if case.compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    rotary = decoder.model.rotary_emb
    decoder.model.rotary_emb = type(rotary)(rotary.config)
    _fill(model, case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    model.train()

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item(), norm.full_tensor().item()

    return step


def _decoder(args: ModelArgs) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": args.vocab_size, "hidden_size": args.dim, "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers, "num_attention_heads": args.n_heads, "head_dim": args.head_dim,
        "num_key_value_heads": args.n_kv_heads, "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps, "attn_implementation": "sdpa",
    }  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    # The base classes of configs take more than their types say.
    if args.moe:
        of_experts: Any = Qwen3MoeConfig
        experts = {
            "num_experts": args.moe.num_experts, "num_experts_per_tok": args.moe.top_k,
            "moe_intermediate_size": args.moe.ffn_dim, "norm_topk_prob": args.moe.route_norm,
            "tie_word_embeddings": False,
        }  # fmt: skip
        return Qwen3MoeForCausalLM(of_experts(**sizes, **experts, rope_parameters=rope))
    assert isinstance(args.rope_scaling, RopeScaling)
    rope |= {
        "rope_type": "llama3",
        "factor": args.rope_scaling.factor,
        "low_freq_factor": args.rope_scaling.low_freq_factor,
        "high_freq_factor": args.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
    }
    config: Any = LlamaConfig
    return LlamaForCausalLM(config(**sizes, rope_parameters=rope))


def _with_lora(decoder: Any, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if case.args.moe:
        targets = {"target_modules": list(ATTENTION.values()), "target_parameters": ["experts.down_proj"]}
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **targets)
    return get_peft_model(decoder, config)  # the adapter in fp32, whatever the model is in


@torch.no_grad()
def _fill(model: nn.Module, case: Case) -> None:
    """Give the sharded peer the weights that the model here starts from."""
    shapes = parameter_shapes(case.args)
    if case.lora:
        shapes |= added_shapes(case.args, configuration(case).finetune)
    parameters = dict(model.named_parameters())
    gates: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        whole = torch.empty(shape)
        initialize([(name, whole)], SEED, lambda name: _rule(name, case.args))
        if name.endswith(".experts.w1"):
            gates[name] = whole
            continue
        if name.endswith(".experts.w3"):
            whole = torch.cat([gates.pop(name.replace("w3", "w1")), whole], 1)
        theirs = parameters.pop(_their_name(name, shapes, case.args, lora=case.lora))
        part, (first, *_) = shard_and_offset(theirs)
        part.copy_(_their_rows(name, whole, case.args)[first : first + len(part)])
    assert not parameters, f"not filled: {', '.join(parameters)}"


def _their_name(name: str, shapes: dict[str, tuple[int, ...]], args: ModelArgs, *, lora: bool) -> str:
    path, _, last = name.rpartition(".")
    if path.endswith(".experts"):
        return _their_expert(path, last, lora=lora)
    theirs = table(args).to_hf(f"{path}.weight").removesuffix(".weight")
    if not lora:
        return f"{theirs}.{last}"
    base = ".base_layer" if last == "weight" and f"{path}.lora_a" in shapes else ""
    return f"base_model.model.{theirs}{base}.{_ADDED.get(last, last)}"


def _their_expert(path: str, last: str, *, lora: bool) -> str:
    theirs = f"model.{path.replace('.moe.', '.mlp.')}"
    weight, _, added = last.partition("_")
    name = {"w2": "down_proj", "w3": "gate_up_proj"}[weight]
    if not lora:
        return f"{theirs}.{name}"
    return f"base_model.model.{theirs}.{_ADDED[added] if added else f'base_layer.{name}'}"


def _their_rows(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    """Rows of q and k in the order of transformers' halves, where here neighbours are rotated together, and
    the updates of experts as PEFT stacks them."""
    path, _, last = name.rpartition(".")
    if path.endswith(".experts"):
        if last.endswith("lora_a"):
            return tensor.flatten(0, 1)
        return tensor.permute(1, 2, 0).flatten(1) if last.endswith("lora_b") else tensor
    if not path.endswith((".wq", ".wk", ".q_norm", ".k_norm")) or last == "lora_a":
        return tensor
    return tensor.unflatten(0, (-1, args.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
