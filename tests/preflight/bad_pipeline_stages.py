"""Runs that break the rules of ``rules.pipeline`` about stages. A debugmodel has 6 layers, embedding and head
count as one each."""

from __future__ import annotations

from tests.preflight.bad_runs import PP, Bad, bad

SCHEDULE = "parallelism.pipeline_parallel_schedule"
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
PARTS = "parallelism.module_fqns_per_model_part"
FIRST = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST = "parallelism.pipeline_parallel_last_stage_less_layers"
EMBEDDING, HEAD = '"tok_embeddings"', '"norm","output"'


def _layers(*numbers: int) -> str:
    return ",".join(f'"layers.{number}"' for number in numbers)


def _parts(
    *parts: str, says: tuple[str, ...], rule: str = "stage_modules_match_model", flags: str = ""
) -> Bad:
    """Stages by hand on as many ranks."""
    written = ",".join(f"[{part}]" for part in parts)
    return bad(rule, f"{PARTS}=[{written}] {PP}={len(parts)} {flags}", *says, world=len(parts))


CASES: list[Bad] = [
    # 8 layers with the ends: a ninth stage would hold nothing.
    bad(
        "stages_not_empty",
        f"{PP}=10 training.global_batch_size=20",
        "10 stages of 6 layers leave stage 8 empty, which count as 1 and 1 layers",
        "set it to at most 8",
        world=10,
    ),
    bad(
        "stages_not_empty",
        f"{PP}=4 {SCHEDULE}=ZBVZeroBubble {FIRST}=0 {LAST}=0",
        "8 stages of 6 layers leave stage 6 empty",
        "set it to at most 3",
        world=4,
    ),
    # 11 layers with the ends in 4 stages: 3, of which the embedding would fill 4.
    bad(
        "stages_not_empty",
        f"{PP}=4 {FIRST}=4",
        "4 stages of 6 layers leave no room for the embedding and the head, which count as 4",
        f"set it to at most 2, or lower {FIRST}",
        world=4,
    ),
    bad("stages_not_empty", f"{PP}=4 model.n_layers=1", "of 1 layers", "set it to at most 3", world=4),
    bad(
        "schedule_takes_stages",
        f"{PER_STAGE}=3 {PP}=2",
        "makes 3 stages of 6 layers, but 1F1B on 2 ranks needs 2, one per rank",
        "remove it for 2 stages",
        world=2,
    ),
    bad(
        "schedule_takes_stages",
        f"{PER_STAGE}=2 {PP}=2",
        "makes 4 stages",
        "remove it for 2 stages",
        f"{SCHEDULE} to Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV",
        world=2,
    ),
    bad(
        "schedule_takes_stages",
        f"{PER_STAGE}=4 {SCHEDULE}=Interleaved1F1B {PP}=2",
        "needs 4 or a larger multiple of 2",
        f"remove it for 4 stages, or set {SCHEDULE} to GPipe or 1F1B",
        world=2,
    ),
    bad(
        "schedule_takes_stages",
        f"{PER_STAGE}=3 {SCHEDULE}=ZBVZeroBubble {PP}=2",
        "needs 4, two per rank",
        "remove it for 4 stages",
        world=2,
    ),
    bad(
        "schedule_takes_stages",
        f"{PER_STAGE}=1 {SCHEDULE}=DualPipeV {PP}=2 model.n_layers=4",
        "makes 6 stages of 4 layers",
        "remove it for 4 stages, or set",
        world=2,
    ),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 2),
        _layers(3, 4, 5) + "," + HEAD,
        says=("names 2 stages, but Interleaved1F1B on 2 ranks needs 4", "name 4", "GPipe or 1F1B"),
        rule="schedule_takes_stages",
        flags=f"{SCHEDULE}=Interleaved1F1B",
    ),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 2),
        _layers(3, 4, 5, 6) + "," + HEAD,
        says=("the model has no layers.6", "layers.0 to layers.5, norm and output"),
    ),
    _parts(
        '"tok_embedding",' + _layers(0, 1, 2),
        _layers(3, 4, 5) + "," + HEAD,
        says=("the model has no tok_embedding", "did you mean tok_embeddings?"),
    ),
    _parts(EMBEDDING + "," + _layers(0, 1, 2, 3, 4, 5) + "," + HEAD, "", says=("empty stages: 1",)),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 2, 3),
        _layers(3, 4, 5) + "," + HEAD,
        says=("named more than once: layers.3", "once, in this order"),
    ),
    _parts(
        EMBEDDING + "," + _layers(0, 0, 1, 2),
        _layers(3, 4, 5) + "," + HEAD,
        says=("named more than once: layers.0",),
    ),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 2),
        _layers(4, 5) + "," + HEAD,
        says=("in no stage: layers.3",),
    ),
    _parts(_layers(0, 1, 2), _layers(3, 4, 5) + "," + HEAD, says=("in no stage: tok_embeddings",)),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 3),
        _layers(2, 4, 5) + "," + HEAD,
        says=("out of order: layers.2", "once, in this order"),
    ),
    _parts(
        EMBEDDING + "," + _layers(0, 1, 2),
        _layers(3, 4, 5) + ',"norm"',
        '"output"',
        says=("two stages: norm and output", "the last two in one stage"),
        flags="training.global_batch_size=18",
    ),
]
