"""Tables about a run as a whole: the job, what it shows and saves, and how its processes talk."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Interval

from toolkit.config.types import (
    MAX_INT,
    ActsWith,
    LocalPath,
    Needs,
    NonNegative,
    Positive,
    PositiveFloat,
    RefusedValues,
    Seconds,
    Table,
)

_PROFILER = ActsWith("profiling.enable_profiling")
_SNAPSHOT = ActsWith("profiling.enable_memory_snapshot")
_SAVES = ActsWith("checkpoint.enable", refused=True)
_LAST_IN_HF = ActsWith("checkpoint.last_save_in_hf", refused=True)
_EXPORTS = ActsWith("checkpoint.last_save_in_hf")
_EXPORTS_TOO = ActsWith("checkpoint.hf_export_interval", above=0)
_WEIGHTS_ALONE = ActsWith("checkpoint.last_save_model_only")
_SPIKES = ActsWith("health.loss_spike_policy", ("stop", "skip", "rollback"))
_SKIPS, _SKIPS_TOO = (ActsWith(f"health.{it}_policy", ("skip", "rollback")) for it in ("nan", "loss_spike"))
_NOT_LOAD_ONLY, _SAVED = (ActsWith("checkpoint.load_only", (False,), refused=it) for it in (False, True))
_RECORDER = ActsWith("comm.trace_buf_size", above=0)


class Job(Table):
    """The run: its config file, its folder and what it says about itself."""

    config_file: str | None = None
    """TOML file to read. Flags override it."""
    dump_folder: Annotated[str, LocalPath()] = "./outputs"
    """Folder of everything that the run writes."""
    description: str = "default job"
    """Free text, kept with the run."""
    print_config: bool = False
    """Print the resolved config, with the origin of each value, at start-up."""
    save_config_file: Annotated[str | None, LocalPath()] = None
    """Also save the resolved config under this name in dump_folder (config.toml is always written)."""
    time_limit: Annotated[PositiveFloat | None, _SAVES] = None
    """Minutes of wall time within which a rank saves and stops, with exit code 75. The end of a Slurm job is
    heeded without it."""
    custom_import: str = ""
    """Module to import before the configuration is checked, such as my_package.my_module, which may register
    what docs/extending.md tells."""
    debug: bool = False
    """Show tracebacks of mistakes in config, data or checkpoint. The flag --debug is short for it."""


class Profiling(Table):
    """torch.profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write a trace every profile_freq steps, and say where the time of the step went."""
    save_traces_folder: Annotated[str, _PROFILER, LocalPath()] = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Annotated[Positive, _PROFILER, _SNAPSHOT] = 10
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: Annotated[Positive, _PROFILER] = 1
    """Steps that a trace covers."""
    profiler_warmup: Annotated[NonNegative, _PROFILER] = 3
    """Steps that the profiler runs before each trace."""
    enable_memory_snapshot: Annotated[bool, Needs("a GPU", refused=True)] = False
    """Write the CUDA allocator's history every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: Annotated[str, _SNAPSHOT, LocalPath()] = "memory_snapshot"
    """Folder of the snapshots, inside job.dump_folder."""


class Metrics(Table):
    """Console, metrics.jsonl and TensorBoard."""

    log_freq: Positive = 10
    """Steps from one logged line to the next."""
    enable_tensorboard: bool = True
    """Write TensorBoard events (torchtitan's default is false)."""
    disable_color_printing: bool = False
    """Print the console lines without colour."""
    save_tb_folder: Annotated[str, ActsWith("metrics.enable_tensorboard"), LocalPath()] = "tb"
    """Folder of the TensorBoard events, inside job.dump_folder."""
    save_for_all_ranks: bool = False
    """Write metrics on every rank, each its own (W&B: a group of runs), instead of rank 0 alone."""
    enable_wandb: bool = False
    """Send the metrics to Weights & Biases, as WANDB_PROJECT, WANDB_TEAM and WANDB_RUN_NAME say."""
    prometheus_file: Annotated[str | None, LocalPath()] = None
    """Keep the newest numbers in this file for node_exporter's textfile collector: *.prom in its folder."""
    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one device in TFLOP/s, for the MFU of a device that is not in our table."""


class Health(Table):
    """The remedies for numbers that are not sound, and the watch over slow ranks."""

    nan_policy: Literal["stop", "skip", "rollback"] = "stop"
    """When loss or gradient norm are not finite: stop; skip the batch, without an update; or roll back to the
    newest checkpoint and skip the batches since, and this one."""
    loss_spike_policy: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """The same when one of them is far above those of the updates before."""
    loss_spike_window: Annotated[int, Interval(ge=2, le=MAX_INT), _SPIKES] = 128
    """Updates whose mean and standard deviation tell; until there are half as many, nothing is a spike."""
    loss_spike_sigma: Annotated[PositiveFloat, _SPIKES] = 6.0
    """Standard deviations above the mean beyond which it is a spike."""
    max_skips: Annotated[Positive, _SKIPS, _SKIPS_TOO] = 10
    """Batches that may be skipped, or roll-backs made, without an update or a checkpoint in between."""
    straggler_factor: Annotated[Annotated[float, Gt(1)] | None, Needs("several ranks")] = None
    """Compare the ranks at each logged step, and name one that takes so many times as long as the others."""
    heartbeat_seconds: PositiveFloat | None = None
    """Write heartbeat.json, the time, step and state of the run, in job.dump_folder, at most so often."""


class Checkpoint(Table):
    """Saving and loading of the training state."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Annotated[str, LocalPath(storage=True)] = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder, or a URL of object storage (s3://bucket/run)."""
    interval: Annotated[Positive, _NOT_LOAD_ONLY] = 500
    """Steps from one checkpoint to the next; the last step is always saved."""
    initial_load_path: Annotated[str | None, LocalPath(storage=True), _SAVES] = None
    """A step-N folder, here or in object storage, to start from when the run has no checkpoint of its own, or
    with initial_load_in_hf a Hugging Face folder, or a step-N beside which its run has written one."""
    initial_load_model_only: Annotated[bool, Needs("checkpoint.initial_load_path")] = True
    """Take only the weights from initial_load_path, not optimizer, step and data position."""
    initial_load_in_hf: Annotated[bool, _SAVES] = False
    """Start from the weights of a Hugging Face folder (config.json and safetensors): initial_load_path, or
    model.hf_assets_path where that is None."""
    initial_load_broadcast: Annotated[bool, ActsWith("checkpoint.initial_load_in_hf", refused=True)] = False
    """With initial_load_in_hf, rank 0 alone reads the folder and sends the others their parts: for storage
    that only its node sees."""
    last_save_model_only: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Save only the weights after the last step (torchtitan's default is true). A run that ended so cannot
    go on."""
    last_save_in_hf: Annotated[bool, _SAVED] = False
    """After the last step also write the model as a Hugging Face folder, hf/step-N inside job.dump_folder; of
    an adapter PEFT's folder, or with finetune.merge_on_export the whole model."""
    push_to_hub: Annotated[str | None, _LAST_IN_HF] = None
    """Upload the folder of last_save_in_hf to this model of the Hugging Face Hub, user/name, as whoever is
    logged in there (hf auth login); one that is new is private."""
    hf_export_interval: Annotated[Positive | None, _SAVED] = None
    """Steps from one such folder to the next, during training: a multiple of interval."""
    export_max_bytes: Annotated[NonNegative, _EXPORTS, _EXPORTS_TOO] = 5_000_000_000
    """Size of a file of weights in these folders, unless one tensor has more; 0 is one file for all. A rank
    that writes a file has it in memory."""
    export_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], _EXPORTS, _EXPORTS_TOO, _WEIGHTS_ALONE
    ] = "float32"
    """Precision of the weights in these folders and in a weights-only save (last_save_model_only)."""
    async_mode: Annotated[Literal["disabled", "async", "async_with_pinned_mem"], _NOT_LOAD_ONLY] = "disabled"
    """Write checkpoints while training goes on, from a copy in host memory as large as what a rank saves;
    with pinned memory a GPU makes it faster."""
    keep_latest_k: Annotated[NonNegative, _NOT_LOAD_ONLY] = 10
    """Keep this many checkpoints and delete older ones; 0 keeps all."""
    keep_every_n: Annotated[Positive | None, _NOT_LOAD_ONLY] = None
    """Beside the latest, keep those of every so many steps: a multiple of interval."""
    keep_best: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Beside the latest, keep that of the lowest validation loss: validation.freq must be a multiple of
    interval."""
    load_step: Annotated[Literal[-1] | NonNegative, _SAVES] = -1
    """Step to resume from; -1 is the newest."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]
    ] = []
    """Parts not to load, whose fresh values the run goes on with; of what it has saved then it loads all.
    train_state is the step and the tokens so far; without lr_scheduler the schedule starts again, warm-up
    included, at the step that the run is at."""
    enable_first_step_checkpoint: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Also save after the first step, to learn early that saving works."""
    create_seed_checkpoint: Annotated[bool, _SAVED] = False
    """Save the initial weights and stop. Not needed here: they do not depend on the mesh."""
    load_only: Annotated[bool, _SAVES] = False
    """Load but never save."""


class Comm(Table):
    """Process groups."""

    init_timeout_seconds: Seconds = 300
    """Time-out of collectives until the first step is done."""
    train_timeout_seconds: Seconds = 100
    """Time-out of collectives after the first step."""
    save_timeout_seconds: Seconds = 1800
    """Time-out of what ranks do together with files, which may keep one busy long after the others: to save,
    load and export."""
    trace_buf_size: NonNegative = 20000
    """Collectives that a rank's flight recorder remembers, for the trace of one that failed; 0 is off."""
    save_traces_folder: Annotated[str, _RECORDER, LocalPath()] = "comm_traces"
    """Folder of the flight recorder's traces, inside job.dump_folder."""
    save_traces_file_prefix: Annotated[str, _RECORDER, LocalPath()] = "rank_"
    """First part of the name of a flight recorder's trace."""
    mode: Annotated[
        Literal["default", "fake_backend", "local_tensor"],
        RefusedValues(
            ("local_tensor",),
            "one process does not compute for several ranks; each parallelism runs on the CPU with real ones",
        ),
    ] = "default"
    """fake_backend checks and describes a run of NGPU x NNODES ranks, the mesh and the memory and traffic of
    ranks, in one process without GPUs, and trains nothing. LOG_RANK names the ranks to describe."""


class MemoryEstimation(Table):
    """A forecast in place of a run."""

    enable: bool = False
    """The same as comm.mode = "fake_backend", which tells the memory that a step will take."""


class Debug(Table):
    """Seeds and determinism."""

    seed: NonNegative | None = None
    """Seed of the initial weights, the data order and random numbers in the model; None is 0."""
    deterministic: bool = False
    """Deterministic algorithms only, at some cost in speed; an operation without one is an error."""
    deterministic_warn_only: Annotated[bool, ActsWith("debug.deterministic", refused=True)] = False
    """With deterministic, an operation without such an algorithm is only a warning."""
