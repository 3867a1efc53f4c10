"""Keys of an accelerate config other than FSDP's: devices, launch, precision, TPUs."""

from __future__ import annotations

from typing import Any

from toolkit.commands.accelerate.meaning import (
    NO_TPU,
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


def _mixed_precision(value: Any, values: Values) -> Meaning:
    if str(value).strip().lower() in ("fp16", "float16"):
        rule = "fp16 would need loss scaling, which there is not"
        raise Refused(rule, "write bf16, or no, which is fp32")
    if str(value).strip().lower() == "fp8":
        raise Refused(
            "float8 is an option of its own here, and bf16 is computed with it",
            'write bf16, and set model.converters = ["float8"] in the TOML file (docs/float8.md)',
        )
    key = "training.mixed_precision_param"
    if word("no" if value is False else value, ("no", "bf16")) == "no":
        return Meaning("computed in the precision of the weights", {key: "float32"})
    return Meaning(
        "weights are kept in float32, as there; gradients are summed in float32, and not rounded to bf16 as "
        'there: training.mixed_precision_reduce = "bfloat16" does that',
        {key: "bfloat16"},
    )


def _use_cpu(value: Any, values: Values) -> Meaning:
    if switch(value):
        return Meaning("ranks on the CPU, with gloo between them", {"training.device": "cpu"})
    return Meaning("GPUs where there are any", {"training.device": "auto"})


def _distributed_type(value: Any, values: Values) -> Meaning:
    asked = str(value).strip().upper()
    if asked == "FSDP":
        return Meaning("every run is FSDP's, on one rank too")
    if asked in ("XLA", "TPU"):
        raise Refused(NO_TPU, "write FSDP")
    if asked in ("DEEPSPEED", "MEGATRON_LM"):
        rule = "this program reads what accelerate has for FSDP"
        raise Refused(rule, "docs/migration.md has the keys of DeepSpeed and Megatron-LM one by one")
    fix = "write FSDP"
    if asked in ("MULTI_GPU", "MULTI_CPU"):
        fix += " with fsdp_config: {fsdp_sharding_strategy: NO_SHARD}, which is what DDP keeps on each rank"
    raise Refused("this program reads what accelerate has for FSDP", fix)


def _environment(value: Any, values: Values) -> Meaning:
    if str(value).strip().upper() == "LOCAL_MACHINE":
        return Meaning("run_train.sh or torchrun on each machine; SLURM: tools/slurm/train.sbatch")
    raise Refused("jobs are not started on SageMaker", "write LOCAL_MACHINE")


def _processes(value: Any, values: Values) -> Meaning:
    if str(value) == "-1":
        return Meaning("not said: one a GPU")
    machines, processes = values["machines"], number(value)
    if processes % machines:
        rule = f"is not a multiple of num_machines, which is {machines}"
        raise Refused(rule, f"each machine has as many: write {machines}, {2 * machines} or more")
    each = "of each machine, " if machines > 1 else ""
    return Meaning(f"ranks {each}of run_train.sh", launch={"NGPU": processes // machines})


def _machines(value: Any, values: Values) -> Meaning:
    if (machines := number(value)) == 1:
        return Meaning("one machine: nothing to say")
    return Meaning("the same command on each machine", launch={"NNODES": machines})


def _machine_rank(value: Any, values: Values) -> Meaning:
    rank = number(value, least=0)
    if rank >= values["machines"]:
        raise Refused(f"of {values['machines']} machines the last is {values['machines'] - 1}", "write that")
    if values["machines"] == 1:
        return Meaning("one machine: nothing to say")
    return Meaning("each machine its own, from 0", launch={"NODE_RANK": rank})


def _address(value: Any, values: Values) -> Meaning:
    if values["machines"] == 1:
        return Meaning("one machine: nothing to say")
    return Meaning("where the machines meet", launch={"MASTER_ADDR": str(value)})


def _port(value: Any, values: Values) -> Meaning:
    if (port := number(value, least=0)) > 65535:
        raise Refused("a port is at most 65535", "write such a number")
    alone = "of torchrun; run_train.sh takes a free one on one machine"
    return Meaning("where they meet" if values["machines"] > 1 else alone, launch={"MASTER_PORT": port})


def _rendezvous(value: Any, values: Values) -> Meaning:
    asked = word(value, ("static", "c10d", "etcd", "etcd-v2"))
    why = "run_train.sh meets at a fixed place; torchrun takes --rdzv_backend"
    return Meaning(why, launch={"rdzv_backend": asked})


def _debug(value: Any, values: Values) -> Meaning:
    if not switch(value):
        return Meaning("off; a collective that hangs is traced and named in any case (comm.trace_buf_size)")
    why = "torch compares the collectives of the ranks before each"
    return Meaning(why, launch={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def _gpu_ids(value: Any, values: Values) -> Meaning:
    if str(value).strip().lower() == "all":
        return Meaning("all that are visible")
    ids = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return Meaning("the GPUs that a rank may be given", launch={"CUDA_VISIBLE_DEVICES": ids})


def _dynamo_backend(value: Any, values: Values) -> Meaning:
    backend = str(value).strip().lower()
    if not is_on(backend):
        return Meaning("off", {"compile.enable": False})
    return Meaning("block by block", {"compile.enable": True, "compile.backend": backend})


def _dynamo_mode(value: Any, values: Values) -> Meaning:
    mode = word(value, ("default", "reduce-overhead", "max-autotune-no-cudagraphs"))
    if mode == "default" or not is_on(values.get("dynamo_backend", "no")):
        return Meaning("the default mode" if mode == "default" else "not read: nothing is compiled")
    return Meaning("the same, for each block", {"compile.mode": mode})


def _fullgraph(value: Any, values: Values) -> Meaning:
    compiles = is_on(values.get("dynamo_backend", "no"))
    said = {"compile.fullgraph": switch(value)} if compiles else {}
    return Meaning("the same, for each block" if compiles else "not read: nothing is compiled", said)


_OTHER_LIBRARY = "docs/migration.md has the options of that library one by one; leave this out"

LAUNCH_KEYS: dict[str, Rule] = {
    "compute_environment": _environment,
    "distributed_type": _distributed_type,
    "debug": _debug,
    "mixed_precision": _mixed_precision,
    "use_cpu": _use_cpu,
    "num_processes": _processes,
    "num_machines": _machines,
    "machine_rank": _machine_rank,
    "main_process_ip": _address,
    "main_process_port": _port,
    "rdzv_backend": _rendezvous,
    "same_network": gone("not needed: machines meet at main_process_ip in any case"),
    "gpu_ids": _gpu_ids,
    "main_training_function": gone("the training loop is toolkit.train"),
    "enable_cpu_affinity": off("ranks are not bound to cores", "start the ranks under numactl"),
    "dynamo_backend": _dynamo_backend,
    "dynamo_mode": _dynamo_mode,
    "dynamo_use_fullgraph": _fullgraph,
    "dynamo_use_dynamic": off(
        "shapes are fixed, so that a run and its resume use the same kernels", "remove it"
    ),
    "dynamo_use_regional_compilation": gone("always: what is compiled is a block"),
    "deepspeed_config": off("DeepSpeed is not used", _OTHER_LIBRARY),
    "megatron_lm_config": off("Megatron-LM is not used", _OTHER_LIBRARY),
    "mpirun_config": off("ranks are not started by mpirun", "remove it, and use run_train.sh"),
    "fp8_config": off("float8 is model.converters here (docs/float8.md)", "remove it"),
    "downcast_bf16": tpu(),
    "tpu_name": tpu(),
    "tpu_zone": tpu(),
    "tpu_use_cluster": tpu(),
    "tpu_use_sudo": tpu(),
    "tpu_vm": tpu(),
    "tpu_env": tpu(),
    "commands": tpu(),
    "command_file": tpu(),
}
