"""The keys of accelerate's ``fsdp_config`` and ``parallelism_config``, of both versions and of a Trainer."""

from __future__ import annotations

import re
from typing import Any

from toolkit.commands.accelerate.meaning import (
    Meaning,
    Refused,
    Rule,
    Values,
    gone,
    is_on,
    number,
    off,
    switch,
    tpu,
    word,
)
from toolkit.models.common.args import WRAP_CLASSES
from toolkit.parallel.dims import STRATEGIES
from toolkit.preflight.rules.fsdp import right_class

_NO_UNIT = 10**15
"""More parameters than a model has."""
_PLAIN = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
_KEEPS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
_HOLDS = {
    "FULL_SHARD": "each rank stores its part, and gathers unit by unit",
    "SHARD_GRAD_OP": "each rank stores its part, and keeps what it gathers until backward",
    "NO_SHARD": "each rank stores all of the model",
}


def strategy_name(value: Any) -> str:
    """Return the sharding strategy of a number from 1 to 5, or of a name.

    Raises:
        Refused: it stands for none.
    """
    if isinstance(value, int) and not isinstance(value, bool) or str(value).strip().isdecimal():
        if not 1 <= int(value) <= len(STRATEGIES):
            said = ", ".join(f"{place} {name}" for place, name in enumerate(STRATEGIES, 1))
            raise Refused(f"strategies are {said}", "write one of these")
        return STRATEGIES[int(value) - 1]
    return word(value, STRATEGIES)


def _strategy(value: Any, values: Values) -> Meaning:
    name = strategy_name(value)
    meant: dict[str, Any] = {"parallelism.sharding_strategy": name}
    replicas = values["replicas"] or values["machines"]
    if name not in _PLAIN:
        if values["replicas"] > 1:
            rule = f"{name} has no replicas of sharded models, and {values['replicas']} are asked for"
            raise Refused(rule, "write HYBRID_SHARD, or do not ask for them")
        return Meaning(f"the same on FSDP2: {_HOLDS[name]}", meant)
    if replicas == 1:
        return Meaning(
            f"{name} shards within a machine and copies between machines: on one machine that is "
            f"{_PLAIN[name]}, as in torch; --replicas N makes N copies within it",
            {"parallelism.sharding_strategy": _PLAIN[name]},
        )
    meant["parallelism.data_parallel_replicate_degree"] = replicas
    each = "as asked for" if values["replicas"] else "one a machine"
    return Meaning(f"replicas, {each}, of a model that is sharded as by {_PLAIN[name]}", meant)


def _strategy_beside(values: Values) -> str | None:
    """Return the strategy in ``fsdp_sharding_strategy``, or None if it is not valid."""
    try:
        return strategy_name(values.get("fsdp_sharding_strategy"))
    except Refused:  # which that key tells
        return None


def _reshard(value: Any, values: Values) -> Meaning:
    name = _strategy_beside(values)
    if str(value).strip().lower() not in ("true", "false"):  # in version 1 it has the strategy
        if name is None:
            return _strategy(value, values)
        if strategy_name(value) != name:
            raise Refused(f"fsdp_sharding_strategy is {name}", "keep one of the two")
        return Meaning("fsdp_sharding_strategy says the same")
    reshard = switch(value)
    if name:
        if name != "NO_SHARD" and reshard == (name in _KEEPS):
            does = "keeps" if name in _KEEPS else "frees"
            rule = f"fsdp_sharding_strategy is {name}, which {does} gathered parameters after forward"
            raise Refused(rule, "keep one of the two")
        return Meaning(f"{name} says how parameters are kept")
    kept = "freed after forward, those of the last unit too" if reshard else "kept from forward to backward"
    said = {"parallelism.fsdp_reshard_after_forward": "always" if reshard else "never"}
    return Meaning(f"gathered parameters are {kept}", said)


def _wrap_policy(value: Any, values: Values) -> Meaning:
    policy = word(value, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    key = "parallelism.fsdp_wrap_policy"
    if policy == "TRANSFORMER_BASED_WRAP":
        return Meaning("a unit is a module of the classes named", {key: "class"})
    if policy == "SIZE_BASED_WRAP":
        return Meaning("a unit is a module with fsdp_min_num_params parameters", {key: "size"})
    return Meaning(
        "the whole model is one unit, gathered at once: no module is larger",
        {key: "size", "parallelism.fsdp_min_num_params": _NO_UNIT},
    )


def _policy(values: Values) -> str:
    """Return the wrap policy in effect or, without one, the policy that the other keys belong to."""
    if "fsdp_auto_wrap_policy" in values:
        return str(values["fsdp_auto_wrap_policy"]).strip().upper()
    by_class = bool(values.get("fsdp_transformer_layer_cls_to_wrap"))
    return "TRANSFORMER_BASED_WRAP" if by_class else "SIZE_BASED_WRAP"


_HUGGING_FACE = re.compile(r"(?:Llama|Mistral|Qwen[23])(DecoderLayer|Attention|MLP|RMSNorm)$")
_OURS = {
    "DecoderLayer": "TransformerBlock",
    "Attention": "Attention",
    "MLP": "FeedForward",
    "RMSNorm": "RMSNorm",
}


def _wrap_classes(value: Any, values: Values) -> Meaning:
    named = value if isinstance(value, list) else str(value or "").split(",")
    asked = [str(name).strip() for name in named if str(name).strip()]
    if _policy(values) != "TRANSFORMER_BASED_WRAP":
        return Meaning("not read: fsdp_auto_wrap_policy is another")
    if not asked:
        return Meaning("none named: blocks, as everywhere")
    classes = []
    for name in asked:
        found = _HUGGING_FACE.match(name)
        ours = _OURS[found[1]] if found else name
        if ours not in WRAP_CLASSES:
            rule = f"the model has no {name}; its classes are {', '.join(WRAP_CLASSES)}"
            raise Refused(rule, f"{right_class(name)} (LlamaDecoderLayer is taken for TransformerBlock)")
        classes.append(ours)
    renamed = classes != asked
    return Meaning(
        "the name of the class here" if renamed else "the same class",
        {"parallelism.fsdp_wrap_policy": "class", "parallelism.fsdp_wrap_classes": classes},
    )


def _min_params(value: Any, values: Values) -> Meaning:
    if _policy(values) != "SIZE_BASED_WRAP" or ("fsdp_auto_wrap_policy" not in values and not is_on(value)):
        return Meaning("not read: fsdp_auto_wrap_policy is another")
    said = {"parallelism.fsdp_wrap_policy": "size", "parallelism.fsdp_min_num_params": number(value)}
    return Meaning("the same: parameters that are in no smaller unit", said)


def _backward_prefetch(value: Any, values: Values) -> Meaning:
    asked = word(value, ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"))
    if asked == "BACKWARD_PRE":
        said = {"parallelism.fsdp_backward_prefetch": 1}
        return Meaning("the next unit is asked for while one computes its backward; more ask earlier", said)
    later = "asks later and overlaps less" if asked == "BACKWARD_POST" else "does not overlap"
    raise Refused(
        f"{asked} {later}, to hold one unit less; FSDP2 always asks ahead and has no such choice",
        "write BACKWARD_PRE",
    )


def _forward_prefetch(value: Any, values: Values) -> Meaning:
    if switch(value):
        said = {"parallelism.fsdp_forward_prefetch": 1}
        return Meaning("the next unit is asked for while one computes its forward", said)
    said = {"parallelism.fsdp_forward_prefetch": 0}
    return Meaning("a unit is asked for when its turn comes, which overlaps on GPUs", said)


def _offload(value: Any, values: Values) -> Meaning:
    if not switch(value):
        return Meaning("stay on the device", {"training.enable_cpu_offload": False})
    if values.get("use_cpu") is not None and switch(values["use_cpu"]):
        return Meaning("nothing to offload from: use_cpu is true, parameters are in CPU memory")
    why = "parameters, gradients and optimizer state in CPU memory, and clipping works with it"
    return Meaning(f"{why}; needs a GPU", {"training.enable_cpu_offload": True})


def _state_dict(value: Any, values: Values) -> Meaning:
    numbers = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
    said = numbers.get(str(value), value)
    kind = word(said, tuple(numbers.values()))
    saves = {"checkpoint.enable": True}
    if kind == "FULL_STATE_DICT":
        saves["checkpoint.last_save_in_hf"] = True
        return Meaning(
            "checkpoints in between are sharded all the same, and load at any world size; the whole model "
            "is written at the end, as a Hugging Face folder",
            saves,
        )
    if kind == "LOCAL_STATE_DICT":
        why = "flat shards that load on as many ranks alone do not exist: checkpoints load at any world size"
        return Meaning(why, saves)
    return Meaning("sharded by DCP, hashed, committed by one rename; loads at any world size", saves)


def _activation_checkpointing(value: Any, values: Values) -> Meaning:
    if switch(value):
        why = "each block is computed again in backward; applied before sharding"
        return Meaning(why, {"activation_checkpoint.mode": "full"})
    return Meaning("all activations are kept", {"activation_checkpoint.mode": "none"})


def _activation_offload(value: Any, values: Values) -> Meaning:
    if not switch(value):
        return Meaning("off")
    if not is_on(values.get("fsdp_activation_checkpointing", False)):
        return Meaning("not read: fsdp_activation_checkpointing is off")
    why = "the inputs of blocks that are computed again wait in CPU memory"
    return Meaning(why, {"activation_checkpoint.enable_activation_offloading": True})


def _version(value: Any, values: Values) -> Meaning:
    word(value, ("1", "2"))
    return Meaning("always FSDP2, which has all that version 1 has")


def _degree(key: str) -> Rule:
    def rule(value: Any, values: Values) -> Meaning:
        return Meaning("the same dimension of the mesh", {f"parallelism.{key}": number(value)})

    return rule


def _cp_method(value: Any, values: Values) -> Meaning:
    if number(values.get("parallelism_config_cp_size", 1)) == 1:
        return Meaning("not read: sequences are not split")
    how = word(value, ("allgather", "alltoall"))
    return Meaning(
        "how keys and values reach the other ranks", {"parallelism.context_parallel_rotate_method": how}
    )


def _no_sp(value: Any, values: Values) -> Meaning:
    if number(value) > 1:
        fix = "write 1, and split sequences by parallelism_config_cp_size"
        raise Refused("DeepSpeed's sequence parallelism is not here", fix)
    return Meaning("off")


_SP_DETAILS = ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
_NO_SP = "off with parallelism_config_sp_size 1"
_BY_DESIGN = "not needed: each rank makes or reads its own shards and nothing else"

FSDP_KEYS: dict[str, Rule] = {
    "fsdp_version": _version,
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_auto_wrap_policy": _wrap_policy,
    "fsdp_transformer_layer_cls_to_wrap": _wrap_classes,
    "fsdp_min_num_params": _min_params,
    "fsdp_backward_prefetch": _backward_prefetch,
    "fsdp_forward_prefetch": _forward_prefetch,
    "fsdp_offload_params": _offload,
    "fsdp_state_dict_type": _state_dict,
    "fsdp_cpu_ram_efficient_loading": gone(
        f"{_BY_DESIGN}; checkpoint.initial_load_broadcast is for files that only rank 0's machine sees"
    ),
    "fsdp_sync_module_states": gone(f"{_BY_DESIGN}, bit-identical on any mesh"),
    "fsdp_use_orig_params": gone("always: parameters keep their names and shapes"),
    "fsdp_limit_all_gathers": gone("always: FSDP2 bounds what is in flight by itself"),
    "fsdp_activation_checkpointing": _activation_checkpointing,
    "fsdp_activation_checkpointing_offload": _activation_offload,
    "fsdp_ignored_modules": off("every module is sharded", "remove it"),
    "parallelism_config_dp_replicate_size": _degree("data_parallel_replicate_degree"),
    "parallelism_config_dp_shard_size": _degree("data_parallel_shard_degree"),
    "parallelism_config_tp_size": _degree("tensor_parallel_degree"),
    "parallelism_config_cp_size": _degree("context_parallel_degree"),
    "parallelism_config_cp_backend": gone("always torch"),
    "parallelism_config_cp_comm_strategy": _cp_method,
    "parallelism_config_sp_size": _no_sp,
    **{f"parallelism_config_sp_{name}": gone(_NO_SP) for name in _SP_DETAILS},
    "xla": tpu(),
    "xla_fsdp_v2": tpu(),
    "xla_fsdp_settings": tpu(),
    "xla_fsdp_grad_ckpt": tpu(),
}
