"""Send metrics, under TensorBoard's tags, and the config to Weights & Biases, Comet, MLflow and trackio.

Each service's own environment variables define server, project and keys.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.metrics.tensorboard import tag

PROJECT = "llama-toolkit"
"""Default project name."""


class Tracker(ABC):
    """Sends the metrics of a run to a service.

    A resumed run continues the service's run, whose ID is in a file in the run folder; some steps are sent
    again, with equal values. A failure is reported once through ``say``, and stops this tracker but not the
    training. If every rank logs, each has a separate run, whose name ends in ``rank``.

    Attributes:
        title: name of the service in messages.
        id_file: name of the file that contains the ID.
        project: name of the project.
    """

    title: str
    id_file: str
    project = PROJECT

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        rank: int | None = None,
    ):
        self.folder, self.rank, self._say = folder, rank, say
        self.run: Any = None
        id_file = folder / (f"{self.id_file}.rank-{rank}" if rank else self.id_file)

        def begin() -> None:
            resumes = resume_step and id_file.exists()
            run_id = self.start(config, id_file.read_text(encoding="utf-8").strip() if resumes else None)
            id_file.write_text(run_id, encoding="utf-8")

        self._attempt(begin)

    def name(self, chosen: str | None) -> str:
        """Return the name of the run, ``chosen`` or the folder's, with the rank appended if each rank has a
        run."""
        base = chosen or self.folder.absolute().name
        return base if self.rank is None else f"{base}-rank-{self.rank}"

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numeric ``values`` of ``step``."""
        scalars = {tag(key): value for key, value in values.items() if isinstance(value, int | float)}
        if self.run:
            self._attempt(lambda: self.send(scalars, step))

    def close(self) -> None:
        """End the run."""
        if self.run:
            self._attempt(self.end)

    @abstractmethod
    def start(self, config: Mapping[str, Any], run_id: str | None) -> str:
        """Set ``run`` to a new run, or to the run ``run_id``, and return its ID."""

    @abstractmethod
    def send(self, scalars: Mapping[str, float], step: int) -> None:
        """Send the values of a step."""

    def end(self) -> None:
        """End the run at the service."""
        self.run.finish()

    def _attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # errors of a package, its server and the network
            self.run = None
            self._say(f"{self.title}: {error}; training continues without it")


class WandB(Tracker):
    """Weights & Biases.

    As in torchtitan, WANDB_PROJECT, WANDB_TEAM and WANDB_RUN_NAME select the run. Runs of ranks are in one
    group, named by WANDB_RUN_GROUP, else after the run or the folder. wandb keeps the first values of a step.
    """

    title, id_file = "Weights & Biases", "wandb_run_id"

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str:
        import wandb

        name, group = os.environ.get("WANDB_RUN_NAME"), {}
        if self.rank is not None:
            base = name or self.folder.absolute().name
            group = {"group": os.environ.get("WANDB_RUN_GROUP", base), "job_type": f"rank-{self.rank}"}
            name = self.name(name)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.project),
            entity=os.environ.get("WANDB_TEAM"),
            name=name,
            **group,
            dir=str(self.folder),
            config=dict(config),
            id=run_id,
            resume="allow" if run_id else None,
        )
        return self.run.id

    def send(self, scalars: Mapping[str, float], step: int) -> None:
        self.run.log(scalars, step=step)


class Comet(Tracker):
    """Comet: COMET_API_KEY, COMET_PROJECT_NAME, COMET_WORKSPACE; COMET_START_ONLINE=0 writes to a file."""

    title, id_file = "Comet", "comet_experiment_key"

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str:
        import comet_ml

        project = os.environ.get("COMET_PROJECT_NAME", self.project)
        self.run = comet_ml.start(project_name=project, experiment_key=run_id)
        self.run.set_name(self.name(os.environ.get("COMET_EXPERIMENT_NAME")))
        self.run.log_parameters(flat(config))
        return self.run.get_key()

    def send(self, scalars: Mapping[str, float], step: int) -> None:
        self.run.log_metrics(dict(scalars), step=step)

    def end(self) -> None:
        self.run.end()


class MLflow(Tracker):
    """MLflow: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_NAME."""

    title, id_file = "MLflow", "mlflow_run_id"

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.run = MlflowClient()  # not the global run, which threads of a program may share
        if run_id:
            self.run.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.project)
        found = self.run.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.run.create_experiment(project)
        run = self.run.create_run(experiment, run_name=self.name(os.environ.get("MLFLOW_RUN_NAME")))
        self._id = run.info.run_id
        values = [Param(key, str(value)[:_MLFLOW_TEXT]) for key, value in flat(config).items()]
        for first in range(0, len(values), _MLFLOW_BATCH):
            self.run.log_batch(self._id, params=values[first : first + _MLFLOW_BATCH])
        return self._id

    def send(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.run.log_batch(self._id, [Metric(key, value, now, step) for key, value in scalars.items()])

    def end(self) -> None:
        self.run.set_terminated(self._id)


_MLFLOW_TEXT, _MLFLOW_BATCH = 500, 100
"""Maximum number of characters per parameter, and of parameters per request."""


class Trackio(Tracker):
    """trackio: TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_PROJECT; show it with ``trackio show``."""

    title, id_file = "trackio", "trackio_run_name"

    def start(self, config: Mapping[str, Any], run_id: str | None) -> str:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", self.project)
        name = run_id or self.name(os.environ.get("TRACKIO_RUN_NAME"))
        resume = "allow" if run_id else "never"
        self.run = trackio.init(project, name=name, config=flat(config), resume=resume, embed=False)
        return self.run.name

    def send(self, scalars: Mapping[str, float], step: int) -> None:
        self.run.log(dict(scalars), step=step)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config into a dict with dotted keys, such as ``training.steps``."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


TRACKERS: dict[str, type[Tracker]] = {"comet": Comet, "mlflow": MLflow, "trackio": Trackio}
"""Trackers by their name in ``metrics.report_to``; W&B has torchtitan's key, ``metrics.enable_wandb``."""
