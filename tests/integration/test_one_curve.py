"""One curve on any mesh: the same run on one process and on several, by every technique. CI
tries each of them, ``-m exhaustive`` each pair.

Ten steps in fp32. Rounding differs between layouts (a batch is summed in another order), and after ten
updates the difference is about 1e-6; a wrong factor anywhere is at least 1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean

import pytest

from tests import layouts
from tests.curves import Run, configure, differences, train_all
from tests.helpers import run_world
from toolkit.hardware import Hardware
from toolkit.preflight import check

pytestmark = pytest.mark.timeout(600)  # the first test waits for all runs

STEPS = 10
RELATIVE = 1e-5
PAIRWISE = layouts.pairwise()
ROWS = layouts.each_level(PAIRWISE)
MORE_ROWS = [row for row in PAIRWISE if row not in ROWS] + layouts.with_inductor(layouts.MORE_INDUCTOR)
REFERENCE = layouts.reference_row(layouts.plain_row())
HALF_ROWS = [
    layouts.plain_row() | {"strategy": strategy, "ranks": ranks, "accumulation": accumulation}
    for strategy, (ranks, accumulation) in zip(
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        (("4", "1"), ("2", "4"), ("4", "1"), ("4", "1"), ("2", "1")),
        strict=True,
    )
]
CROSSED = ("strategy", "ranks", "accumulation", "checkpointing", "compile", "wrap", "prefetch")
CPU = Hardware("cpu", "CPU", 2, native_bf16=True)

Runs = dict[tuple[str, str], Run]


def run_all(folder: str, jobs: Sequence[tuple[layouts.Row, str]]) -> Runs:
    """Every run by the name of its row and its precision."""
    results = {}
    for ranks in layouts.FACTORS["ranks"]:
        mine = [job for job in jobs if job[0]["ranks"] == ranks]
        everywhere = run_world(train_all, int(ranks), folder, mine, STEPS, timeout=400)
        assert all(result == everywhere[0] for result in everywhere), "ranks log different values"
        names = [(layouts.name(row), precision) for row, precision in mine]
        results |= dict(zip(names, everywhere[0], strict=True))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    jobs = [(row, "float32") for row in ROWS] + [(row, "bfloat16") for row in (REFERENCE, *HALF_ROWS)]
    return run_all(str(tmp_path_factory.mktemp("one_curve")), jobs)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = str(tmp_path_factory.mktemp("more_curves"))
    return run_all(folder, [(row, "float32") for row in MORE_ROWS])


@pytest.mark.parametrize("row", ROWS, ids=layouts.name)
def test_layout_gives_the_run_of_one_process(runs: Runs, row: layouts.Row) -> None:
    _check(row, runs[layouts.name(row), "float32"], runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", MORE_ROWS, ids=layouts.name)
def test_more_layouts_do(runs: Runs, more_runs: Runs, row: layouts.Row) -> None:
    _check(row, more_runs[layouts.name(row), "float32"], runs)


def _check(row: layouts.Row, run: Run, runs: Runs) -> None:
    reference = runs[layouts.name(layouts.reference_row(row)), "float32"]
    assert run["accumulation"] == int(row["accumulation"])
    assert run["weights"] == reference["weights"]
    assert run["samples"] == reference["samples"]
    assert len(run["losses"]) == len(run["norms"]) == STEPS
    # Not max(): it passes over a difference that is not a number.
    assert all(difference <= RELATIVE for difference in differences(run["losses"], reference["losses"]))
    assert all(difference <= RELATIVE for difference in differences(run["norms"], reference["norms"]))


@pytest.mark.parametrize("reference", layouts.references(), ids=layouts.name)
def test_the_run_learns_and_sees_new_samples_every_step(runs: Runs, reference: layouts.Row) -> None:
    run = runs[layouts.name(reference), "float32"]
    assert len(set(run["samples"])) == STEPS
    assert run["losses"][-1] < run["losses"][0] - 0.5


def test_what_is_trained_makes_a_difference(runs: Runs) -> None:
    """Else the rows that clip, or tie the head, would be compared with a run that does not."""
    curves = [runs[layouts.name(row), "float32"]["losses"] for row in layouts.references()]
    apart = [max(differences(one, other)) for one, other in product(curves, curves) if one is not other]
    assert min(apart) > 30 * RELATIVE


@pytest.mark.parametrize("row", HALF_ROWS, ids=layouts.name)
def test_bf16_layout_is_as_near_to_one_process_as_that_is_to_fp32(runs: Runs, row: layouts.Row) -> None:
    """In the mean over the steps, since the difference of a single step may cross zero."""
    single, exact = (
        runs[layouts.name(REFERENCE), precision]["losses"] for precision in ("bfloat16", "float32")
    )
    run = runs[layouts.name(row), "bfloat16"]
    assert run["weights"] == runs[layouts.name(REFERENCE), "float32"]["weights"]
    own = fmean(differences(single, exact))
    assert 0 < fmean(differences(run["losses"], single)) <= own


def test_rows_try_every_pair() -> None:
    assert all(layouts.allowed(row) for row in PAIRWISE)
    tried = set().union(*map(layouts.pairs, PAIRWISE))
    assert tried >= set(layouts.allowed_pairs())
    # What allowed_pairs says is checked by rows that were made another way.
    others = (row for row in layouts.every(CROSSED) if row["compile"] != "inductor")
    assert tried >= set().union(*map(layouts.pairs, others))


@pytest.mark.parametrize("row", ROWS + MORE_ROWS, ids=layouts.name)
def test_rows_are_runs_that_the_preflight_allows(tmp_path, row: layouts.Row) -> None:
    assert check(configure(tmp_path, row), world_size=int(row["ranks"]), hardware=CPU) == []


def _in_order(rule: dict[str, set[str]]) -> str:
    """The name of a rule, the same in every process."""
    return str({factor: sorted(levels) for factor, levels in rule.items()})


@pytest.mark.parametrize("rule", [rule for rule in layouts.FORBIDDEN if "reduce" not in rule], ids=_in_order)
def test_what_rows_leave_out_the_preflight_refuses(tmp_path, rule: dict[str, set[str]]) -> None:
    for levels in product(*rule.values()):
        row = layouts.plain_row() | dict(zip(rule, levels, strict=True))
        assert check(configure(tmp_path, row), world_size=int(row["ranks"]), hardware=CPU)
