"""The position in the data that a checkpoint holds, beside what a run counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import DataError


def refuse_another(counted: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise DataError where ``state`` has counted samples of something else than ``counted`` says."""
    changed = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in counted.items()
        if state.get(name) != value
    ]
    if changed:
        raise DataError(
            f"the data position of the checkpoint does not fit this run: {'; '.join(changed)}\n"
            "  fix:  restore these (corpus: the text and the tokenizer), or start the data anew with "
            f'checkpoint.exclude_from_loading = ["dataloader"], in another job.dump_folder where this run '
            "has done so already"
        )
