"""How a pipeline is cut, against cuts made by hand and against the orders that torch makes."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.config.parallelism import Parallelism
from toolkit.parallel.pipeline_schedules import (
    SCHEDULES,
    bubble,
    is_valid_split,
    module_names,
    pipeline_stages,
    stages_of_ranks,
)


def _layers(**options: Any) -> list[int]:
    """Layers of each stage; ends at 1 as in torchtitan where nothing is said."""
    n_layers = options.pop("n_layers")
    options = {f"pipeline_parallel_{name}": value for name, value in options.items()}
    parts = pipeline_stages(Parallelism(**options), n_layers).modules
    assert [name for part in parts for name in part] == module_names(n_layers)
    return [sum(name.startswith("layers.") for name in part) for part in parts]


# torchtitan's generate_llm_fqn_per_model_part, by hand: layers and ends are spread evenly, what is left of
# the division goes to the first stages, and the ends are taken off again.
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"n_layers": 6, "degree": 2}, [3, 3]),  # 8 = 4 + 4
        ({"n_layers": 6, "degree": 4}, [1, 2, 2, 1]),
        ({"n_layers": 7, "degree": 4}, [2, 2, 2, 1]),  # 9 = 3 + 2 + 2 + 2
        ({"n_layers": 32, "degree": 4}, [8, 9, 8, 7]),  # 34 = 9 + 9 + 8 + 8
        ({"n_layers": 32, "degree": 4, "schedule": "Interleaved1F1B"}, [4, 5, 4, 4, 4, 4, 4, 3]),
        ({"n_layers": 126, "degree": 16}, [7, *[8] * 14, 7]),
        ({"n_layers": 126, "degree": 8, "layers_per_stage": 8, "schedule": "LoopedBFS"}, [7, *[8] * 14, 7]),
        ({"n_layers": 8, "degree": 2, "first_stage_less_layers": 0, "last_stage_less_layers": 0}, [4, 4]),
        # Ends that fill their stages: 8 = 1 + … + 1, and 8 = 2 + 2 + 1 + 1 + 1 + 1.
        ({"n_layers": 6, "degree": 4, "schedule": "Interleaved1F1B"}, [0, *[1] * 6, 0]),
        ({"n_layers": 6, "degree": 4, "layers_per_stage": 1, "schedule": "ZBVZeroBubble"}, [0, *[1] * 6, 0]),
        ({"n_layers": 6, "degree": 6}, [1, 2, 1, 1, 1, 0]),
        ({"n_layers": 8, "degree": 2, "first_stage_less_layers": 2, "last_stage_less_layers": 1}, [4, 4]),
        ({"n_layers": 8, "degree": 2, "first_stage_less_layers": 0, "last_stage_less_layers": 4}, [6, 2]),
        # 10 layers with the ends, in stages of at most 3: 4 stages.
        ({"n_layers": 8, "degree": 2, "layers_per_stage": 3, "schedule": "ZBVZeroBubble"}, [2, 3, 2, 1]),
    ],
)
def test_layers_are_spread_as_torchtitan_does(options: dict[str, Any], layers: list[int]) -> None:
    assert _layers(**options) == layers


def test_the_ends_hold_embedding_norm_and_head() -> None:
    stages = pipeline_stages(Parallelism(pipeline_parallel_degree=2), 2)
    assert stages.modules == [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    assert stages.of_ranks == [[0], [1]]


def test_a_cut_has_every_module_once_and_no_stage_without_any() -> None:
    assert is_valid_split([["tok_embeddings"], ["layers.0"], ["norm", "output"]], 1)
    assert not is_valid_split([["tok_embeddings"], ["layers.0"], [], ["norm", "output"]], 1)
    assert not is_valid_split([["tok_embeddings"], ["norm", "output"]], 1)
    heavy = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_first_stage_less_layers=5)
    assert not is_valid_split(pipeline_stages(heavy, 2).modules, 2)


def test_stages_named_by_hand_are_taken_as_they_are() -> None:
    parts = [["tok_embeddings"], ["layers.0", "layers.1"], ["norm", "output"]]
    options = Parallelism(pipeline_parallel_degree=3, module_fqns_per_model_part=parts)
    assert pipeline_stages(options, 2).modules == parts


def test_stages_go_around_the_ranks_or_come_back_in_a_v() -> None:
    assert stages_of_ranks(6, 2, SCHEDULES["Interleaved1F1B"]) == [[0, 2, 4], [1, 3, 5]]
    assert stages_of_ranks(8, 4, SCHEDULES["DualPipeV"]) == [[0, 7], [1, 6], [2, 5], [3, 4]]


class _Stage:
    """A stage with what torch's schedules ask of it before they run."""

    def __init__(self, index: int, count: int, pp: int):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, pp, 0
        self.is_first, self.is_last, self.submod = index == 0, index == count - 1, None


def _order(name: str, pp: int, each: int, micro_batches: int) -> dict[int, list[Any]]:
    """torch's actions of each rank.

    Raises:
        ValueError: it does not take so many micro-batches.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    schedule, chosen = SCHEDULES[name], get_schedule_class(name)
    stages = [_Stage(index, pp * each, pp) for index in stages_of_ranks(pp * each, pp, schedule)[0]]
    first: Any = stages[0] if issubclass(chosen, PipelineScheduleSingle) else stages
    return chosen(first, n_microbatches=micro_batches, loss_fn=lambda *_: None).pipeline_order


def _waiting(order: dict[int, list[Any]], last: int) -> float:
    """Run the actions, F, I and W one unit long each and B two, and return the part that ranks wait."""
    done: dict[tuple[int, str, int], int] = {}
    left = {
        rank: [a for a in row if a and a.computation_type.value[0] in "FIWBO"] for rank, row in order.items()
    }
    clock, work = dict.fromkeys(left, 0), dict.fromkeys(left, 0)

    def needed(stage: int, kind: str, micro_batch: int) -> list[tuple[int, str, int]]:
        if kind == "F":
            return [(stage - 1, "F", micro_batch)] if stage else []
        after = [(stage + 1, "I", micro_batch)] if stage < last else []
        return [(stage, "I", micro_batch)] if kind == "W" else [(stage, "F", micro_batch), *after]

    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, row in left.items():
            while row:
                parts = [
                    (a.stage_index, a.computation_type.value, a.microbatch_index)
                    for a in row[0].sub_actions or row[:1]
                ]
                needs = [need for part in parts for need in needed(*part)]
                if not all(need in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)])
                for stage, kind, micro_batch in parts:
                    length = 2 if kind == "B" else 1
                    clock[rank], work[rank] = clock[rank] + length, work[rank] + length
                    done[stage, "I" if kind == "B" else kind, micro_batch] = clock[rank]
                row.pop(0)
        assert sum(map(len, left.values())) < before, "torch's order can be run"
    return 1 - work[0] / max(clock.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_and_waiting_are_those_of_torch(name: str) -> None:
    schedule = SCHEDULES[name]
    tried = 0
    for pp in (2, 3, 4):
        for each in (2, 3) if schedule.more else (schedule.stages,):
            for count in range(1, 14):
                takes = schedule.supports_micro_batches(count, stages=pp * each, pp=pp)
                try:
                    order = _order(name, pp, each, count)
                except ValueError:
                    assert not takes
                    continue
                assert takes
                # What torch says of 1F1B, unlike what it runs, is not in an order that can be run.
                found = (
                    _waiting(order, pp * each - 1)
                    if name != "1F1B"
                    else bubble("GPipe", count, stages=pp, pp=pp)
                )
                assert bubble(name, count, stages=pp * each, pp=pp) == pytest.approx(found)
                tried += 1
    assert tried > 20
