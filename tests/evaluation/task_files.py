"""Tasks of lm-eval in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_task(folder: Path, name: str, docs: list[dict[str, Any]], metrics: str, **settings: Any) -> None:
    """Write a task with the examples ``docs`` and the names of ``metrics``."""
    import yaml  # comes with lm-eval

    (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / f"{name}.jsonl")}},
        "validation_split": "validation",
        "metric_list": [{"metric": metric} for metric in metrics.split()],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | settings))
