"""Tables for the run as a whole: job, logging, health checks, checkpoints and communication."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Interval

from toolkit.config.types import (
    EXPERTS,
    MAX_INT,
    LocalPath,
    Needs,
    NonNegative,
    OnlyWith,
    Positive,
    PositiveFloat,
    Seconds,
    Table,
    UnsupportedValues,
)

_PROFILER = OnlyWith("profiling.enable_profiling")
_SNAPSHOT = OnlyWith("profiling.enable_memory_snapshot")
_SAVES = OnlyWith("checkpoint.enable", rejected=True)
_LAST_IN_HF = OnlyWith("checkpoint.last_save_in_hf", rejected=True)
_EXPORTS = OnlyWith("checkpoint.last_save_in_hf")
_EXPORTS_TOO = OnlyWith("checkpoint.hf_export_interval", above=0)
_WEIGHTS_ALONE = OnlyWith("checkpoint.last_save_model_only")
_SPIKES = OnlyWith("health.loss_spike_policy", ("stop", "skip", "rollback"))
_SKIPS, _SKIPS_TOO = (OnlyWith(f"health.{it}_policy", ("skip", "rollback")) for it in ("nan", "loss_spike"))
_NOT_LOAD_ONLY, _SAVED = (OnlyWith("checkpoint.load_only", (False,), rejected=it) for it in (False, True))
_RECORDER = OnlyWith("comm.trace_buf_size", above=0)


class Job(Table):
    """Config file, output folder and other settings of the job."""

    config_file: str | None = None
    """TOML file to read. Command-line flags override it."""
    dump_folder: Annotated[str, LocalPath()] = "./outputs"
    """Folder for all output of the run."""
    description: str = "default job"
    """Free-text description, saved with the run."""
    print_config: bool = False
    """Print the resolved config, with the origin of each value, at start-up."""
    save_config_file: Annotated[str | None, LocalPath()] = None
    """Also save the resolved config under this name in dump_folder (config.toml is always written)."""
    time_limit: Annotated[PositiveFloat | None, _SAVES] = None
    """Minutes of wall time after which the run saves a checkpoint and exits with code 75. The end of a Slurm
    job is respected without it."""
    custom_import: str = ""
    """Module to import before the config is validated, such as my_package.my_module. It may register
    components as described in docs/extending.md."""
    debug: bool = False
    """Show tracebacks of errors in config, data or checkpoint. The flag --debug is short for it."""


class Profiling(Table):
    """torch.profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write a trace every profile_freq steps and log a breakdown of the step time."""
    save_traces_folder: Annotated[str, _PROFILER, LocalPath()] = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Annotated[Positive, _PROFILER, _SNAPSHOT] = 10
    """Steps between traces or memory snapshots."""
    profiler_active: Annotated[Positive, _PROFILER] = 1
    """Steps per trace."""
    profiler_warmup: Annotated[NonNegative, _PROFILER] = 3
    """Warmup steps of the profiler before each trace."""
    enable_memory_snapshot: Annotated[bool, Needs("a GPU", rejected=True)] = False
    """Write the CUDA allocator's history every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: Annotated[str, _SNAPSHOT, LocalPath()] = "memory_snapshot"
    """Folder of the snapshots, inside job.dump_folder."""


class Metrics(Table):
    """Console output, metrics.jsonl, TensorBoard and other loggers."""

    log_freq: Positive = 10
    """Steps between log lines."""
    enable_tensorboard: bool = True
    """Write TensorBoard events (torchtitan's default is false)."""
    disable_color_printing: bool = False
    """Print console lines without color."""
    save_tb_folder: Annotated[str, OnlyWith("metrics.enable_tensorboard"), LocalPath()] = "tb"
    """Folder of the TensorBoard events, inside job.dump_folder."""
    save_for_all_ranks: bool = False
    """Log metrics on every rank (in W&B as a group of runs), instead of only on rank 0."""
    enable_wandb: bool = False
    """Log metrics to Weights & Biases, configured by WANDB_PROJECT, WANDB_TEAM and WANDB_RUN_NAME."""
    report_to: list[Literal["comet", "mlflow", "trackio"]] = []
    """Log metrics to these services too, configured by their own environment variables."""
    prometheus_file: Annotated[str | None, LocalPath()] = None
    """File that is overwritten with the latest metrics, for node_exporter's textfile collector: *.prom in its
    folder."""
    fingerprint_every: NonNegative = 0
    """Steps between fingerprints of gradients, weights and optimizer state in fingerprints.jsonl, which
    compare-runs reads; 0 writes none."""
    peak_tflops: PositiveFloat | None = None
    """Peak dense bf16 throughput of one device in TFLOP/s, used for MFU if the device is not in our table."""


class Health(Table):
    """Handling of non-finite values and loss spikes, and detection of slow ranks."""

    nan_policy: Literal["stop", "skip", "rollback"] = "stop"
    """Action if the loss or gradient norm is not finite. stop; skip: drop the batch without an update;
    rollback: restore the newest checkpoint and skip all batches since then, including this one."""
    loss_spike_policy: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """The same actions, if the loss or gradient norm is far above that of previous updates."""
    loss_spike_window: Annotated[int, Interval(ge=2, le=MAX_INT), _SPIKES] = 128
    """Updates over which mean and standard deviation are computed; spikes are detected once half of them are
    available."""
    loss_spike_sigma: Annotated[PositiveFloat, _SPIKES] = 6.0
    """Standard deviations above the mean that count as a spike."""
    max_skips: Annotated[Positive, _SKIPS, _SKIPS_TOO] = 10
    """Maximum number of skipped batches without an update in between, or of rollbacks without a checkpoint in
    between."""
    straggler_factor: Annotated[Annotated[float, Gt(1)] | None, Needs("several ranks")] = None
    """Compare ranks at each logged step and report any that takes this many times as long as the others."""
    heartbeat_seconds: PositiveFloat | None = None
    """Minimum seconds between writes of heartbeat.json (time, step and state of the run) in
    job.dump_folder."""


class Checkpoint(Table):
    """Saving and loading of the training state."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Annotated[str, LocalPath(storage=True)] = "checkpoint"
    """Checkpoint folder, inside job.dump_folder, or a URL of object storage (s3://bucket/run)."""
    interval: Annotated[Positive, _NOT_LOAD_ONLY] = 500
    """Steps between checkpoints; the last step is always saved."""
    initial_load_path: Annotated[str | None, LocalPath(storage=True), _SAVES] = None
    """Checkpoint to start from when the run has none of its own: a step-N folder, local or in object storage.
    With initial_load_in_hf a Hugging Face folder, or a step-N next to which its run has exported one."""
    initial_load_model_only: Annotated[bool, Needs("checkpoint.initial_load_path")] = True
    """Load only the weights from initial_load_path, not the optimizer, step and data position."""
    initial_load_in_hf: Annotated[bool, _SAVES] = False
    """Start from the weights of a Hugging Face folder (config.json and safetensors): initial_load_path, or
    model.hf_assets_path if that is None."""
    initial_load_broadcast: Annotated[bool, OnlyWith("checkpoint.initial_load_in_hf", rejected=True)] = False
    """With initial_load_in_hf, only rank 0 reads the folder and sends the other ranks their shards; for
    storage that only its node can access."""
    last_save_model_only: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Save only the weights after the last step (torchtitan's default is true). Such a run cannot be
    resumed."""
    last_save_in_hf: Annotated[bool, _SAVED] = False
    """After the last step, also export the model as a Hugging Face folder, hf/step-N inside job.dump_folder.
    An adapter is exported as a PEFT folder, or merged into the model with finetune.merge_on_export."""
    push_to_hub: Annotated[str | None, _LAST_IN_HF] = None
    """Upload the folder of last_save_in_hf to this repository on the Hugging Face Hub, user/name, as the
    logged-in user (hf auth login). New repositories are private."""
    hf_export_interval: Annotated[Positive | None, _SAVED] = None
    """Steps between such exports during training; a multiple of interval."""
    export_max_bytes: Annotated[NonNegative, _EXPORTS, _EXPORTS_TOO] = 5_000_000_000
    """Maximum size of one weight file in these folders, unless a single tensor is larger; 0 writes one file.
    A rank needs memory for each file that it writes."""
    export_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], _EXPORTS, _EXPORTS_TOO, _WEIGHTS_ALONE
    ] = "float32"
    """Data type of the weights in these folders and in a weights-only save (last_save_model_only)."""
    async_mode: Annotated[Literal["disabled", "async", "async_with_pinned_mem"], _NOT_LOAD_ONLY] = "disabled"
    """Write checkpoints in the background, from a copy in host memory as large as the rank's checkpoint data;
    pinned memory makes the copy from a GPU faster."""
    keep_latest_k: Annotated[NonNegative, _NOT_LOAD_ONLY] = 10
    """Number of checkpoints to keep; older ones are deleted. 0 keeps all."""
    keep_every_n: Annotated[Positive | None, _NOT_LOAD_ONLY] = None
    """Additionally keep every checkpoint whose step is a multiple of this; a multiple of interval."""
    keep_best: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Additionally keep the checkpoint with the lowest validation loss, or the best keep_best_metric;
    validation.freq, or evaluation.freq, must be a multiple of interval."""
    keep_best_metric: Annotated[str, OnlyWith("checkpoint.keep_best", rejected=True)] = "validation_loss"
    """Metric of keep_best: validation_loss, or eval/TASK/METRIC of a task in evaluation.tasks. lm-eval knows
    whether higher is better."""
    load_step: Annotated[Literal[-1] | NonNegative, _SAVES] = -1
    """Step to resume from; -1 is the newest."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "ema", "lr_scheduler", "dataloader", "train_state"]
    ] = []
    """Components that are not loaded and start fresh; the run's own later checkpoints are loaded in full.
    train_state is the step and the number of tokens, ema the average of optimizer.ema_decay. Without
    lr_scheduler, the schedule restarts, including warmup, at the current step."""
    enable_first_step_checkpoint: Annotated[bool, _NOT_LOAD_ONLY] = False
    """Also save after the first step, to find out early whether saving works."""
    create_seed_checkpoint: Annotated[bool, _SAVED] = False
    """Save the initial weights and exit. Not needed here: initial weights do not depend on the mesh."""
    load_only: Annotated[bool, _SAVES] = False
    """Load checkpoints but never save."""


class Comm(Table):
    """Process groups and their timeouts."""

    init_timeout_seconds: Seconds = 300
    """Timeout of collectives until the first step is done."""
    train_timeout_seconds: Seconds = 100
    """Timeout of collectives after the first step."""
    save_timeout_seconds: Seconds = 1800
    """Timeout of collectives while saving, loading and exporting, when one rank may be busy with files long
    after the others."""
    trace_buf_size: NonNegative = 20000
    """Collectives recorded by each rank's flight recorder, for the trace of a failure; 0 disables it."""
    save_traces_folder: Annotated[str, _RECORDER, LocalPath()] = "comm_traces"
    """Folder of the flight recorder's traces, inside job.dump_folder."""
    save_traces_file_prefix: Annotated[str, _RECORDER, LocalPath()] = "rank_"
    """File name prefix of the flight recorder's traces."""
    mode: Annotated[
        Literal["default", "fake_backend", "local_tensor"],
        UnsupportedValues(
            ("local_tensor",),
            "one process cannot simulate several ranks; use real CPU ranks, which support every parallelism",
        ),
    ] = "default"
    """fake_backend validates a run of NGPU x NNODES ranks in one process without GPUs and prints its mesh and
    the memory and traffic of the ranks in LOG_RANK, without training."""


class MemoryEstimation(Table):
    """A memory estimate instead of a run."""

    enable: bool = False
    """Same as comm.mode = "fake_backend", which estimates the memory of a step."""


class Debug(Table):
    """Seeds and determinism."""

    seed: NonNegative | None = None
    """Seed for the initial weights, the data order and random numbers in the model; None is 0."""
    moe_force_load_balance: Annotated[bool, EXPERTS] = False
    """Send tokens to all experts in turn instead of those that the router prefers, to measure speed."""
    bitwise_data_parallel: bool = False
    """Give the same bits at any number of data-parallel ranks and replicas, for the same micro-batches."""
    deterministic: bool = False
    """Use only deterministic algorithms, at some cost in speed; an operator without one is an error."""
    deterministic_warn_only: Annotated[bool, OnlyWith("debug.deterministic", rejected=True)] = False
    """With deterministic, only warn about operators without a deterministic algorithm."""
