"""Runs that break the rules of ``rules.pipeline``. A rank has all 16 samples of a step, where nothing else is
said, in as many micro-batches."""

from __future__ import annotations

from tests.preflight.bad_runs import PP, Bad, bad, write

SCHEDULE = "parallelism.pipeline_parallel_schedule"
SIZE = "parallelism.pipeline_parallel_microbatch_size"
FILE = "parallelism.pipeline_parallel_schedule_csv"
RESHARD = "parallelism.fsdp_reshard_after_forward"
STRATEGY = "parallelism.sharding_strategy"
POLICY = "parallelism.fsdp_wrap_policy"
BATCH = "training.global_batch_size"
TAKES, KEEPS = "schedule_takes_micro_batches", "split_backward_keeps_parameters"
READ = "schedule_file_is_there"


def _file(lines: str, *says: str, flags: str = f"{PP}=2 {BATCH}=2", world: int = 2) -> Bad:
    """A run by the schedule of these lines."""
    return bad(READ, f"{FILE}=a.csv {flags}", *says, world=world, prepare=write("a.csv", lines))


CASES: list[Bad] = [
    bad("rows_fill_micro_batches", f"{SIZE}=3 {PP}=2", "which are 16", "set it to 2, 4, 8 or 16", world=2),
    bad("rows_fill_micro_batches", f"{SIZE}=32 {PP}=2", "4, 8 or 16", world=2),
    bad(
        TAKES,
        f"{SCHEDULE}=1F1B {PP}=4 {BATCH}=3",
        "3 micro-batches per step (3 samples",
        "at least one per stage, which are 4",
        f'set {BATCH} to 4, or {SCHEDULE} to "GPipe"',
        world=4,
    ),
    bad(
        TAKES,
        f"{SCHEDULE}=1F1B {PP}=2 {SIZE}=4 {BATCH}=8",
        "1 micro-batches per step (4 samples",
        f"set {BATCH} to 16, or",
        world=4,
    ),
    bad(
        TAKES,
        f"{SCHEDULE}=1F1B {PP}=4 {BATCH}=-1 training.local_batch_size=2",
        "set training.local_batch_size to 4",
        world=4,
    ),
    bad(
        TAKES,
        f"{SCHEDULE}=DualPipeV {PP}=2 {BATCH}=3",
        "stage, which are 4",
        f'set {BATCH} to 4, or {SCHEDULE} to "ZBVZeroBubble"',
        world=2,
    ),
    # 7 on 2 ranks are 3 rounds.
    bad(
        TAKES,
        f"{SCHEDULE}=Interleaved1F1B {PP}=2 {BATCH}=7",
        "in 3 equal rounds",
        f'set {BATCH} to 6 or 8, or {SCHEDULE} to "LoopedBFS"',
        world=2,
    ),
    bad(
        TAKES,
        f"{SCHEDULE}=InterleavedZeroBubble {PP}=2 {BATCH}=10 {SIZE}=2",
        "5 micro-batches per step (10 samples",
        f"set {BATCH} to 8 or 12",
        world=2,
    ),
    bad(
        KEEPS,
        f"{RESHARD}=always {PP}=2 {SCHEDULE}=ZBVZeroBubble",
        "ZBVZeroBubble computes",
        '"never"',
        world=2,
    ),
    bad(KEEPS, f"{RESHARD}=always {PP}=2 {SCHEDULE}=DualPipeV", '"never"', '"Interleaved1F1B"', world=8),
    bad(
        KEEPS,
        f"{STRATEGY}=FULL_SHARD {PP}=2 {SCHEDULE}=InterleavedZeroBubble",
        f'remove it for {RESHARD} = "never", or',
        world=4,
    ),
    bad(
        KEEPS,
        f"{STRATEGY}=FULL_SHARD {PP}=2 {SCHEDULE}=InterleavedZeroBubble {RESHARD}=always",
        f'remove it for {RESHARD} = "never", or',
        world=4,
    ),
    bad(
        KEEPS,
        f"{STRATEGY}=NO_SHARD {PP}=2 {SCHEDULE}=ZBVZeroBubble",
        "parallelism.data_parallel_replicate_degree as replicas",
        world=4,
    ),
    bad(
        "split_backward_computes_again",
        f"activation_checkpoint.selective_ac_option=op {PP}=2 {SCHEDULE}=ZBVZeroBubble",
        "ZBVZeroBubble computes",
        'selective_ac_option = "1", set compile.enable = true, or set parallelism.pipeline',
        world=2,
    ),
    bad(
        "split_backward_computes_again",
        f"activation_checkpoint.selective_ac_option=op {PP}=2 {SCHEDULE}=InterleavedZeroBubble",
        'selective_ac_option = "1", or set parallelism.pipeline_parallel_schedule to',
        world=2,
        torch=(2, 12),
    ),
    bad(
        "split_backward_of_compiled_code",
        f"compile.enable {PP}=2 {SCHEDULE}=InterleavedZeroBubble",
        "for compiled code from 2.13 on; this is 2.12",
        'set it to false, set parallelism.pipeline_parallel_schedule to "Interleaved1F1B", or install',
        world=2,
        torch=(2, 12),
    ),
    bad(
        "v_shape_runs_here",
        f"{SCHEDULE}=DualPipeV {PP}=2",
        "needs torch 2.13 on a CPU, and this is 2.11",
        '"InterleavedZeroBubble"',
        world=2,
        torch=(2, 11),
    ),
    bad(
        "early_step_without_pipeline",
        f"optimizer.early_step_in_backward training.max_norm=inf {BATCH}=8 {PP}=2",
        "only after all micro-batches",
        "remove it",
        world=2,
    ),
    bad(
        "base_has_a_file",
        f"{SCHEDULE}=PipelineScheduleMulti {PP}=2",
        "needs a schedule file",
        f'set {FILE}, or set it to "Interleaved1F1B"',
        world=2,
    ),
    bad(
        "base_has_a_file",
        f"{SCHEDULE}=PipelineScheduleSingle {PP}=2",
        'set it to "1F1B"',
        world=2,
    ),
    bad(READ, f"{FILE}=a.csv {PP}=2", "no such file", "one line of actions per pipeline rank", world=2),
    _file("", "lines for 0 ranks, but the pipeline has 2"),
    _file("0F0,0B0\n", "lines for 1 ranks, but the pipeline has 2"),
    bad(
        KEEPS,
        f"{RESHARD}=always {FILE}=a.csv {PP}=2 {BATCH}=1",
        "the schedule of a.csv computes",
        "write B instead of I and W there",
        world=2,
        prepare=write("a.csv", "0F0,0I0,0W0\n1F0,1I0,1W0\n"),
    ),
]
