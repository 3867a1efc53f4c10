"""The comparison with peers refuses two sides that do not compute the same."""

from __future__ import annotations

import pytest

from benchmarks.peer_models import Case
from benchmarks.peers import SAME_LOSS, NotComparable, refuse_other_losses


@pytest.mark.parametrize("dtype", SAME_LOSS)
def test_other_losses_are_refused_with_the_step_and_both(dtype: str) -> None:
    case = Case("5.2M", 2, 1, dtype, 4, 256)
    mine = [8.0, 7.0]
    refuse_other_losses(case, {"ours": mine, "theirs": [8.0, 7.0 * (1 + 0.9 * SAME_LOSS[dtype])]})
    for other in (7.0 * (1 + 1.1 * SAME_LOSS[dtype]), float("nan")):
        with pytest.raises(NotComparable, match=f"at step 2 the loss is 7.0 here and {other} there"):
            refuse_other_losses(case, {"ours": mine, "theirs": [8.0, other]})
