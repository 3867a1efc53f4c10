"""A run as seen by rules: the config, the world size, the hardware, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.config import Config
from toolkit.config.local_paths import assets_folder, expand_user
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import SourceError
from toolkit.data.sources import open_corpus
from toolkit.data.tokenizers.load_tokenizer import vocabulary_size
from toolkit.errors import CheckpointError, ConfigError, DataError, Problem, quote
from toolkit.hardware import Hardware
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import attention_name, model_args, model_label
from toolkit.parallel.dims import ParallelDims, degrees

if TYPE_CHECKING:
    from toolkit.parallel.pipeline_schedules import Schedule, Stages
    from toolkit.preflight.start import Start

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedRun:
    """A run that has not started. A value is None if a broken rule makes it unknown."""

    config: Config
    world_size: int
    detected: Hardware

    @property
    def hardware(self) -> Hardware:
        """Hardware selected by training.device; unknown if its value is invalid."""
        assert self.config.training.device
        return self.detected

    def problem(self, key: str, rule: str, fix: str, *others: str) -> Problem:
        """Describe a rule that a key breaks, with the key's value and origin.

        ``others`` are keys that contribute: :meth:`blame` selects the key that is reported.
        """
        blamed = self.blame(key, *others)
        if blamed != key:
            rule = f"{key} = {quote(self.config.value(key))}: {rule}"
        return Problem(rule, fix, blamed, self.config.value(blamed), self.config.origin(blamed))

    def blame(self, *keys: str) -> str:
        """Return the key that the user set most directly, the first of several; defaults come last."""
        return min(keys, key=self.config.depth)

    def located(self, problem: Problem) -> Problem:
        """Add the origin to a problem that was detected without the config."""
        return replace(problem, origin=self.config.origin(problem.key))

    @cached_property
    def mesh(self) -> ParallelDims | None:
        """The mesh, if it fits the world size."""
        return degrees(self.config.parallelism, self.world_size)

    @cached_property
    def tokenizer_path(self) -> str:
        return str(assets_folder(self.config.model.tokenizer_path or self.config.model.hf_assets_path))

    @cached_property
    def opened(self) -> dict[str, Corpus | DataError]:
        """Each corpus of the run, or the error from opening it, by table name."""

        def open_one(options: CorpusOptions) -> Corpus | DataError:
            if "://" in (options.dataset_path or "") and not self.config.data.streaming:
                rule = "text at a URL can only be streamed, and data.streaming is false"
                fix = "set data.streaming = true, or use a copy on a local disk"
                return SourceError(Problem(rule, fix, "dataset_path", options.dataset_path))
            try:
                return open_corpus(**options.arguments())
            except DataError as error:
                return error

        return {options.table: open_one(options) for options in corpora(self.config)}

    @cached_property
    def _vocabulary(self) -> int | DataError:
        try:
            added = self.config.model.additional_special_tokens
            return vocabulary_size(self.tokenizer_path) + len(added)
        except DataError as error:
            return error

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens in the tokenizer."""
        return self._vocabulary if isinstance(self._vocabulary, int) else None

    @property
    def tokenizer_error(self) -> str:
        return "" if isinstance(self._vocabulary, int) else str(self._vocabulary)

    @cached_property
    def _model(self) -> ModelArgs | ConfigError | DataError:
        try:
            return model_args(self.config, tokenizer_vocab=self.vocabulary)
        except (ConfigError, DataError) as error:
            return error

    @property
    def model(self) -> ModelArgs | None:
        """Shape of the model."""
        return self._model if isinstance(self._model, ModelArgs) else None

    def with_model(self, config: Config, model: ModelArgs, label: str) -> PlannedRun:
        """Return a run of another ``model`` with ``config``, for rules that check it too."""
        run = replace(self, config=config)
        vars(run).update(_model=model, model_label=label)  # cached properties
        return run

    @property
    def model_problems(self) -> list[Problem]:
        return self._model.problems if isinstance(self._model, ConfigError) else []

    @property
    def architecture_error(self) -> str:
        """The reason why config.json does not describe a supported model, if it should; else ""."""
        return str(self._model) if isinstance(self._model, DataError) else ""

    @cached_property
    def model_label(self) -> str:
        """Name of the model."""
        return model_label(self.config)

    @property
    def precision(self) -> str:
        """Data type of forward and backward."""
        asked = self.config.training.mixed_precision_param
        return asked if asked != "auto" else "bfloat16" if self.hardware.native_bf16 else "float32"

    @property
    def batch(self) -> BatchShape | None:
        """Sizes of global batch, micro-batches and accumulation."""
        return batch_shape(self.config.training, dp=self.mesh.dp) if self.mesh else None

    @property
    def pp(self) -> int:
        return self.config.parallelism.pipeline_parallel_degree

    @property
    def schedule(self) -> Schedule:
        from toolkit.parallel.pipeline_schedules import schedule_of

        return schedule_of(self.config.parallelism)

    @cached_property
    def stages(self) -> Stages | None:
        """The configured stages of a pipeline, which may not match the model."""
        if self.pp == 1 or self.model is None:
            return None
        from toolkit.parallel.pipeline_schedules import pipeline_stages

        return pipeline_stages(self.config.parallelism, self.model.n_layers)

    @property
    def rows(self) -> int | None:
        """Samples per rank and step."""
        return self.batch.total // self.mesh.dp if self.mesh and self.batch else None

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches per rank and step of a pipeline."""
        size = self.config.parallelism.pipeline_parallel_microbatch_size
        if self.pp == 1 or self.rows is None or self.rows % size:
            return None
        return self.rows // size

    @property
    def dump_folder(self) -> Path:
        """Folder for all output of the run."""
        return expand_user(self.config.job.dump_folder)

    @cached_property
    def checkpoints(self) -> Path:
        """Folder of the run's own checkpoints."""
        return expand_user(self.config.checkpoint.folder, inside=self.dump_folder)

    @cached_property
    def start(self) -> Start:
        """Checkpoint or weights that the run starts from."""
        from toolkit.preflight.start import Start

        return Start(self.config, self.checkpoints)

    @property
    def attention(self) -> str:
        """The attention backend that the run uses."""
        return attention_name(self.config, self.hardware.device, self.model)


@cache  # reads a file
def torch_version() -> tuple[int, int] | None:
    """Return major and minor version of the installed torch, without importing it."""
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return None
    return int(major), int(minor)


def torch_before(needed: tuple[int, int]) -> str | None:
    """Return the version of torch if it is older than ``needed``."""
    found = torch_version()
    return f"{found[0]}.{found[1]}" if found and found < needed else None


Check = Callable[[PlannedRun], "list[Problem]"]


@dataclass(frozen=True)
class Rule:
    """A check, and the type of error to raise if only checks of this type fail."""

    check: Check
    error: type[ConfigError] | type[DataError] | type[CheckpointError]


RULES: dict[str, Rule] = {}
"""Rules by module and name, so that a user's rule may have the name of a built-in one."""


def rule(
    error: type[ConfigError] | type[DataError] | type[CheckpointError] = ConfigError,
) -> Callable[[Callable[[PlannedRun], Iterable[Problem]]], Check]:
    """Register a function that returns or yields the problems of a :class:`PlannedRun`."""

    def register(function: Callable[[PlannedRun], Iterable[Problem]]) -> Check:
        check = _listed(function)
        RULES[f"{check.__module__}.{check.__qualname__}"] = Rule(check, error)
        return check

    return register


Note = Callable[[PlannedRun], "list[str]"]
NOTES: list[Note] = []


def note(function: Callable[[PlannedRun], Iterable[str]]) -> Note:
    """Register a function that returns or yields notes about valid but surprising settings of a
    :class:`PlannedRun`."""
    listed = _listed(function)
    NOTES.append(listed)
    return listed


def _listed(function: Callable[[PlannedRun], Iterable[T]]) -> Callable[[PlannedRun], list[T]]:
    """Return ``function`` with its result as a list."""

    @wraps(function)
    def listed(run: PlannedRun) -> list[T]:
        return list(function(run))

    return listed
