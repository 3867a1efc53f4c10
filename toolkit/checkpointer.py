"""Save and restore the checkpoints of a run, and load its initial weights."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit import __version__
from toolkit.checkpoint.async_save import BackgroundWriter
from toolkit.checkpoint.free_space import check_free_space
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import committed_steps, parts_to_exclude, read_manifest, step_folder
from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.data.batch_size import BatchShape
from toolkit.errors import CheckpointError, printable
from toolkit.exporter import Exporter
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import pretrained_folder
from toolkit.models.meta_decoder import buffer_dtype
from toolkit.models.on_disk import EXPORTS
from toolkit.optim.ema import weight_average
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.model_parts import ModelParts
from toolkit.train_step import TrainState

if TYPE_CHECKING:
    from toolkit.weights.source import WeightSource

_PREFIXES = {"model": "model", "optimizer": "optim", "ema": "ema"}
"""Prefix of the tensor names of each part that can be excluded from loading."""


class Stateful(Protocol):
    """An object that can save and restore its position in the data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpointer:
    """Saves and restores the model, the optimizer, the training ``state`` and the data ``position``.

    All ranks call every method except :meth:`due`. ``metadata`` (JSON types) is stored in every manifest.
    ``say`` reports a line to the user; by default it prints.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        *,
        model_parts: ModelParts,
        optimizer: Optimizer,
        position: Stateful,
        state: TrainState,
        metadata: Mapping[str, Any],
        group: dist.ProcessGroup,
    ):
        self._config = config
        self._options = options = config.checkpoint
        self._model_parts = model_parts
        self._optimizer = optimizer
        self._average, self._average_loaded = weight_average(optimizer), False
        self._position = position
        self._state = state
        self._metadata = metadata
        self._group = group
        self._base: dict[str, str] | None = None  # the base model of an adapter
        self._first_step = 0  # the step at which this process started
        self._best_losses: dict[int, float] = {}  # validation loss of each step that was the best so far
        self.say: Callable[[str], None] = lambda text: print(printable(text), flush=True)
        background = None
        if options.async_mode != "disabled":
            background = BackgroundWriter(pinned=options.async_mode == "async_with_pinned_mem")
        self.manager = CheckpointManager(
            expand_user(options.folder, inside=run_folder),
            keep_latest_k=options.keep_latest_k,
            keep_every_n=options.keep_every_n,
            start=None if options.load_step == -1 else options.load_step,
            background=background,
            group=group,
            say=lambda text: self.say(text),
        )
        self.exporter = Exporter(config, run_folder / EXPORTS, self.manager, say=lambda text: self.say(text))

    @property
    def step_folder(self) -> Path:
        """The checkpoint folder of the current step, existing or not."""
        return step_folder(self.manager.folder, self._state.step)

    def tensors(self, *, model_only: bool, copies: bool = False) -> dict[str, Tensor]:
        """Return this rank's tensors to save or, with ``copies``, the tied copies, which are not saved. With
        an adapter, these are only trained parameters: the frozen model is reloaded from its source."""
        parameters = list(self._model_parts.tied_copies() if copies else self._model_parts.named_parameters())
        buffers = [] if copies else list(self._model_parts.named_buffers())
        if self._config.finetune.adds:
            parameters = [(name, tensor) for name, tensor in parameters if tensor.requires_grad]
            buffers = []
        tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in (*parameters, *buffers)}
        return tensors if model_only else tensors | optimizer_tensors(parameters, self._optimizer)

    # Loading

    def restore(self, on_initial: Callable[[], object] | None = None) -> None:
        """Resume from the run's own checkpoint, else load the configured initial weights or checkpoint. With
        ``on_initial``, the initial weights are loaded even before resuming; it is called with them."""
        options = self._options
        if not options.load_only:
            self.manager.remove_leftovers(exports=self.exporter.folder)
            check_free_space(
                self.manager.folder,
                self.tensors(model_only=True).values(),
                lambda: self.tensors(model_only=False).values(),
                stages=self._config.parallelism.pipeline_parallel_degree,
                ranks=self.manager.ranks,
                group=self._group,
            )
        step = self.manager.latest() if options.load_step == -1 else options.load_step
        if self._config.finetune.adds:
            self._load_base()
        if step is None or on_initial:
            self._load_initial(model_only=step is not None)
        if on_initial:
            on_initial()
        if step is not None:
            self._resume(step)
        self._begin_average()
        self._first_step = self._state.step

    def _load_initial(self, *, model_only: bool) -> None:
        """Load the configured initial weights or checkpoint; with an adapter, only the initial adapter."""
        options = self._options
        if self._config.finetune.adds:
            if self._config.finetune.adapter_path is not None:
                self._load_adapter(self._config.finetune.adapter_path)
        elif folder := pretrained_folder(self._config):
            self._load_hugging_face(folder)
        elif options.initial_load_path and not options.initial_load_in_hf:
            source = expand_user(options.initial_load_path)
            if options.initial_load_model_only or model_only:
                self._load(source, without=options.exclude_from_loading, model_only=True)
            else:
                self._resume(source)

    def _load_base(self) -> None:
        """Load the frozen base model of an adapter and record its identity."""
        from toolkit.finetune.apply import init_from_weights
        from toolkit.finetune.base import base_of
        from toolkit.weights.load import open_on_all_ranks
        from toolkit.weights.open import open_weights
        from toolkit.weights.pretrained import load_base_weights

        model_parts, options = self._model_parts, self._options
        if folder := pretrained_folder(self._config):
            self._load_hugging_face(folder)
        elif options.initial_load_path and not options.initial_load_in_hf:
            path, ranks = options.initial_load_path, self.manager.ranks
            source = open_on_all_ranks(lambda: open_weights(path, ranks=ranks), group=self._group)
            load_base_weights(model_parts, source, group=self._group)
        init_from_weights(model_parts.models)
        self._base = self.manager.ranks.on_rank_0(lambda: base_of(self._config, self._metadata["model"]))

    def _load_hugging_face(self, folder: Path) -> None:
        from toolkit.weights.pretrained import load_hugging_face

        vocab_size = self._config.model.vocab_size if self._config.model.additional_special_tokens else None
        broadcast = self._options.initial_load_broadcast
        load_hugging_face(
            self._model_parts, folder, broadcast=broadcast, group=self._group, vocab_size=vocab_size
        )

    def _load_adapter(self, path: str) -> None:
        """Load an adapter of the same base; all its trained parameters must be trained in this run too."""
        from toolkit.finetune.base import check_base
        from toolkit.finetune.open_adapter import open_adapter
        from toolkit.finetune.parameters import is_added
        from toolkit.weights.load import load_weights, open_on_all_ranks

        def open_checked() -> WeightSource:
            adapter = open_adapter(path, self._model_parts.models[0].args)
            check_base(adapter.place, adapter.base or {}, self._base or {})
            return adapter

        source = open_on_all_ranks(open_checked, group=self._group)
        assert source is not None
        trained = {
            name: parameter
            for name, parameter in self._model_parts.named_parameters()
            if parameter.requires_grad and (is_added(name) or name in source.tensors)
        }
        load_weights(source, trained, group=self._group)
        tensors = self.tensors(model_only=True)
        self._model_parts.refresh_tied_copies(tensors, self.tensors(model_only=True, copies=True))

    def _load(self, where: int | Path, *, without: Sequence[str], model_only: bool) -> dict[str, Any]:
        tensors = self.tensors(model_only=model_only)
        excluded = [_PREFIXES[part] for part in without if part in _PREFIXES]
        if model_only and not isinstance(where, int):
            excluded += self._new_head(where)
        manifest = self.manager.load(where, tensors, exclude=excluded)
        self._model_parts.refresh_tied_copies(tensors, self.tensors(model_only=model_only, copies=True))
        self._model_parts.reset_float8_scales()
        self._average_loaded = not model_only and "ema" not in without
        return manifest

    def _begin_average(self) -> None:
        """Set the average of the weights to the loaded weights, unless it was loaded itself."""
        if self._average and not self._average_loaded:
            self._average.reset()

    def _new_head(self, source: Path) -> list[str]:
        """Return the name prefixes of tensors to initialize instead of loading: a classifier's head, if
        ``source`` is a language model or has other classes."""
        classifier = json.loads(json.dumps(self._metadata["model"]["classifier"]))  # tuples become lists
        if classifier is None:
            return []
        saved = self.manager.ranks.on_rank_0(lambda: read_manifest(source)["run"]["model"])
        return [] if saved.get("classifier") == classifier else ["model.output"]

    def _resume(self, where: int | Path) -> None:
        excluded, state = self._excluded_parts(where), self._state
        manifest = self._load(where, without=excluded, model_only=False)
        run = manifest["run"]
        if self._base:
            from toolkit.finetune.base import check_same_base

            check_same_base(run.get("base"), self._base)
        before, now = run.get("reference"), self._metadata.get("reference")
        if before and now and before != now:
            raise CheckpointError(
                "the run of the checkpoint has another reference: it started from other initial weights\n"
                "  fix:  set the same initial weights (checkpoint.initial_load_path, model.hf_assets_path, "
                "finetune.adapter_path), or start in another job.dump_folder"
            )
        if "train_state" not in excluded:
            state.step = manifest["step"]
            state.tokens = run.get("tokens", 0)
            state.best_validation, state.best_step = run.get("best_validation"), run.get("best_step")
            best_of = run.get("best_of") or state.best_of
            lost = self._options.keep_best and state.best_step not in self._committed()
            # Losses on other validation samples cannot be compared.
            if lost or state.best_of not in (None, best_of):
                state.best_validation = state.best_step = None
            state.best_of = state.best_of or best_of
            self._best_losses.clear()
            self._note_best()
            state.before = run.get("before", {})
            state.run_id = run.get("id", state.run_id)
            state.health = run.get("health", {})
        done = 0 if "lr_scheduler" in excluded else manifest["step"] - run.get("schedule_start", 0)
        state.schedule_start = state.step - done
        if "dataloader" not in excluded:
            self._position.load_state_dict(run["loader"])

    def _excluded_parts(self, where: int | Path) -> list[str]:
        """Return the parts excluded from loading, for a step of this run or for another folder."""
        excluded: list[str] = [*self._options.exclude_from_loading]
        if not excluded or not isinstance(where, int):
            return excluded
        folder = step_folder(self.manager.folder, where)
        return self.manager.ranks.on_rank_0(lambda: parts_to_exclude(excluded, read_manifest(folder)["run"]))

    def roll_back(self) -> int | None:
        """Load the newest checkpoint of an earlier step and return its step, or None if there is none.

        Checkpoints from before a rewind (``checkpoint.load_step``) belong to another training history and are
        skipped.
        """
        self.end_save(wait=True)
        usable = [
            step for step in self._committed() if step <= self._first_step or step in self.manager.saved
        ]
        newest = max((step for step in usable if step < self._state.step), default=None)
        if newest is not None:
            self._resume(newest)
            self._begin_average()
        return newest

    def _committed(self) -> list[int]:
        """Steps with a committed checkpoint."""
        return self.manager.ranks.on_rank_0(lambda: committed_steps(self.manager.folder))

    def finish_without_training(self, total_steps: int) -> bool:
        """Finish a run that only saves initial weights or has no steps left; return False if steps remain."""
        step, folder = self._state.step, self.step_folder
        if self._options.create_seed_checkpoint:
            self.save(final=True)
            self.say(f"saved the initial weights as {folder}")
            return True
        if step and not self._options.load_only:
            self.exporter.export_missed(step, last=step >= total_steps)
        if step < total_steps:
            return False
        self.say(
            f"nothing to do: the checkpoint of step {step} in {folder.parent} has reached the "
            f"{total_steps} steps of this run; raise --training.steps (or epochs) to continue, or set "
            "another --job.dump_folder to start over"
        )
        return True

    # Saving

    def due(self, *, last: bool, stop: bool) -> bool:
        options, step = self._options, self._state.step
        if not options.enable or options.load_only:
            return False
        first = step == 1 and options.enable_first_step_checkpoint
        return last or stop or first or step % options.interval == 0

    def save(self, *, model_only: bool = False, final: bool = False) -> None:
        """Save a checkpoint. A failure is reported, and the next save retries.

        Raises:
            CheckpointError: the ``final`` save failed.
        """
        self.end_save(wait=True)
        tensors = self.tensors(model_only=model_only)
        if model_only:
            dtype = self.exporter.dtype
            dtypes = {f"model.{name}": buffer_dtype(dtype) for name, _ in self._model_parts.named_buffers()}
            tensors = {name: it.detach().to(dtypes.get(name, dtype)) for name, it in tensors.items()}
        state = self._state
        if self._options.keep_best:
            self._choose_best(about_to_be_saved=state.step)
            self.manager.best = state.best_step
        run = {
            **self._metadata,
            **({"base": self._base} if self._base else {}),
            "id": state.run_id,
            "model_only": model_only,
            "tokens": state.tokens,
            "schedule_start": state.schedule_start,
            "best_validation": state.best_validation,
            "best_step": state.best_step,
            "best_of": state.best_of,
            "before": state.before,
            **({"health": state.health} if state.health else {}),
            "loader": self._position.state_dict(),
        }
        try:
            self.manager.save(state.step, tensors, run)
            if final:
                self.manager.end_save(wait=True)
        except CheckpointError as error:
            if final:
                raise
            self._not_saved(error)
            if self._options.keep_best:
                self._choose_best()

    def _note_best(self) -> None:
        state = self._state
        if state.best_step is not None and state.best_validation is not None:
            self._best_losses[state.best_step] = state.best_validation

    def _choose_best(self, about_to_be_saved: int | None = None) -> None:
        """Fall back to the best saved step if saving a better one failed."""
        self._note_best()
        saved = {about_to_be_saved, *self.manager.saved}
        bests = [
            (loss, step)
            for step, loss in self._best_losses.items()
            if step <= self._first_step or step in saved
        ]
        self._state.best_validation, self._state.best_step = min(bests, default=(None, None))

    def end_save(self, *, wait: bool) -> None:
        """Report the result of a background save; ``wait`` for one in progress."""
        try:
            self.manager.end_save(wait=wait)
        except CheckpointError as error:
            self._not_saved(error)

    def _not_saved(self, error: CheckpointError) -> None:
        self.say(f"NOT SAVED: {error}\n  Training continues, and the next save retries.")

    def after_step(
        self, exclude: Callable[[str], AbstractContextManager[None]], *, last: bool, stop: bool
    ) -> None:
        """Run the saves and exports that are due after a step, inside ``exclude``, which excludes them from
        the step time."""
        self.end_save(wait=False)
        if self.due(last=last, stop=stop):
            with exclude("checkpoint"):
                self.save(model_only=last and self._options.last_save_model_only, final=last or stop)
                if self.exporter.due(self._state.step, last=last) and (last or not stop):
                    self._export(final=last)

    def _export(self, *, final: bool) -> None:
        step = self._state.step
        self.end_save(wait=True)
        if step in self.manager.saved:
            self.exporter.export(step, final=final)
        else:  # a checkpoint of this step, if any, is from before a rewind
            self.say(f"NOT EXPORTED: step {step} was not saved.")


def run_metadata(
    config: Config, args: ModelArgs, *, mesh: str, data_parallel: int, batch: BatchShape
) -> dict[str, Any]:
    """Return the facts about a run that every manifest records."""
    return {
        "config": config.to_toml(origins=False),
        "model": asdict(args),
        "mesh": mesh,
        "data_parallel_degree": data_parallel,
        "global_batch_size": batch.total,
        "versions": {"toolkit": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
