"""Load a model from weights of any format for generation, chat and evaluation.

In a single process the model is a plain module. In a process group it is sharded by tensor parallelism over
``tp`` ranks, with replicated hidden states (:func:`apply_tensor_parallel` without ``split_sequence``), and by
FSDP over the rest. Each rank reads only its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit import cpu
from toolkit.checkpoint.manifest import saved_settings
from toolkit.config.parallelism import Parallelism
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer, vocabulary_size
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, DataError, Problem
from toolkit.finetune.open_adapter import open_adapted, open_adapter_on
from toolkit.finetune.saved_adapter import Adapter
from toolkit.generation.adapters import Adapters
from toolkit.generation.compiled import compiler_for
from toolkit.generation.cpu_prepack import can_prepack, prepack_model
from toolkit.generation.generator import Generator
from toolkit.hardware import lacks_cpp_compiler
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention_choice import choose_attention
from toolkit.models.common.decoder import Decoder
from toolkit.models.meta_decoder import meta_decoder
from toolkit.models.parameters import table
from toolkit.parallel.mesh import Mesh, build_mesh
from toolkit.weights.hf_assets import configured_add_bos, eos_ids, run_of, tokenizer_of
from toolkit.weights.load import open_on_all_ranks
from toolkit.weights.source import WeightSource
from toolkit.weights.views import note_of


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer and settings.

    Attributes:
        tokenizer: the tokenizer, or None if none was found.
        mesh: the mesh, or None in a single process.
        seq_len: tokens per row in training, if a checkpoint records it.
        adapters: the adapters that can be selected.
        note: notes for the user about weights and speed.
        eos_ids: end-of-text ids from generation_config.json or config.json, in addition to the tokenizer's.
        chat_template_kwargs: the chat template variables used in a checkpoint's training.
    """

    model: Decoder
    args: ModelArgs
    tokenizer: Tokenizer | None
    mesh: Mesh | None
    seq_len: int | None = None
    adapters: Adapters | None = None
    note: str = ""
    eos_ids: tuple[int, ...] = ()
    chat_template_kwargs: Mapping[str, bool | str] = field(default_factory=dict)

    def select(self, adapter: str | None) -> None:
        """Switch to another of ``adapters``, or to the base for None. Collective. Existing generators become
        invalid.

        Raises:
            DataError, CheckpointError: the weights can no longer be read.
        """
        assert self.adapters is not None, "the model was loaded with adapters"
        if self.mesh is not None and self.mesh.dp_size > 1:
            from toolkit.generation.gathered import reshard_all

            reshard_all(self.model)
        self.adapters.select(self.model, adapter, self.mesh.tp if self.mesh else None)

    def generator(self, *, compiled: bool = False) -> Generator:
        """Create a generator limited to the tokenizer's ids, on every rank. Compilation takes half a minute,
        which pays off for long texts.

        On a CPU, weights are prepacked, and the model's blocks lose the original ones; models with selectable
        adapters are not prepacked. Compiled code stores a second copy of the weights.

        Raises:
            ConfigError: ``compiled`` is set, but the model is sharded, or the CPU has no C++ compiler.
        """
        if compiled and self.mesh is not None:
            rule = "a model can be compiled in one process only"
            raise ConfigError(Problem(rule, "remove --compile, or start one process", "--compile", True))
        device = next(self.model.parameters()).device
        if compiled and device.type == "cpu" and (lacks := lacks_cpp_compiler()):
            fix = "install g++, set CXX to another compiler, or remove --compile"
            raise ConfigError(Problem(lacks, fix, "--compile", True))
        plain = self.mesh is None and not compiled and self.adapters is None
        if plain and can_prepack(self.model):
            prepack_model(self.model)
        group = dist.group.WORLD if self.mesh else None
        return Generator(
            self.model,
            vocabulary=self.tokenizer.n_words if self.tokenizer else None,
            group=group,
            compiler=compiler_for(device, constant=self.adapters is None) if compiled else None,
        )


def load_model(
    path: Path | str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tp: int = 1,
    tokenizer_path: Path | str | None = None,
    add_bos: bool | None = None,
    verify: bool = True,
    ema: bool = False,
    adapters: Mapping[str, Path | str] | None = None,
    check: Callable[[Tokenizer | None, ModelArgs], object] | None = None,
) -> LoadedModel:
    """Load the model at ``path``: any format of :func:`toolkit.weights.open.open_weights`, or an adapter (a
    PEFT folder or checkpoint) together with its base.

    Parameters have ``dtype`` and no gradients. The first of ``adapters`` by name is active until another is
    selected.

    In a process group the model is sharded over all ranks. Parameters gathered in the first forward stay
    gathered if they fit on all ranks. ``verify`` checks the hashes of a checkpoint, divided among the ranks;
    ``ema`` reads the moving average of its trained weights.
    The tokenizer is the one at ``tokenizer_path``, else the one next to the weights, else the one used in the
    checkpoint's training; ``add_bos`` overrides whether plain texts begin with BOS. Every rank calls
    ``check`` with the tokenizer before weights are read, so that it can reject the tokenizer.

    Raises:
        ConfigError: ``tp`` does not divide the number of ranks or a dimension of the model, or the parameters
            of a custom decoder differ from the toolkit's.
        DataError: weights or tokenizer are unusable; raised on every rank.
    """
    source, adapter_set = _open(path, adapters or {}, verify, ema)
    if source.args.classifier:
        raise DataError(
            f"{path} is a classifier with {len(source.args.classifier.labels)} classes and generates no "
            "tokens\n  fix:  use a language model"
        )
    mesh = _mesh(device, source.args, tp)
    trained = adapter_set.adapters.get(_DEFAULT_ADAPTER, source)
    run = run_of(trained)
    settings = saved_settings(run)
    tokenizer_source = next((it for it in (trained, source) if tokenizer_of(it)), source)
    tokenizer = _tokenizer(
        tokenizer_source, tokenizer_path, configured_add_bos(run) if add_bos is None else add_bos
    )
    if check:
        check(tokenizer, source.args)
    prefix = any(it.options.adapter == "prefix_tuning" for it in adapter_set.adapters.values())
    attention = choose_attention(
        "auto",
        "",
        device=device.type,
        documents=False,
        prefix=prefix,
        sinks=source.args.sinks,
        cpu_fast_paths=cpu.is_enabled(),
    )
    model = meta_decoder(source.args, attention=attention, dtype=dtype)
    notes = [note_of(source), _shard(model, mesh, device, dtype) if mesh is not None else ""]
    model.to_empty(device=device).requires_grad_(False)
    adapter_set.load(model, next(iter(adapter_set.adapters), None), mesh.tp if mesh else None)
    return LoadedModel(
        model.eval(),
        source.args,
        tokenizer,
        mesh,
        settings.get("training.seq_len"),
        adapters=adapter_set if adapters else None,
        note="\n".join(filter(None, notes)),
        eos_ids=Ranks().on_rank_0(partial(eos_ids, source)),
        chat_template_kwargs={
            name.removeprefix(_KWARGS): value for name, value in settings.items() if name.startswith(_KWARGS)
        },
    )


_DEFAULT_ADAPTER = ""
"""Name of the adapter at the path of the model itself."""
_KWARGS = "data.chat_template_kwargs."


def _open(
    path: Path | str, extra: Mapping[str, Path | str], verify: bool, ema: bool
) -> tuple[WeightSource, Adapters]:
    """Open the base at ``path`` and its adapters; the result is the same on every rank."""
    adapters: dict[str, Adapter] = {}

    def open_base() -> WeightSource:
        base, adapter = open_adapted(path, verify=verify, ranks=Ranks(), ema=ema)
        if adapter is not None and extra:
            raise DataError(
                f"{path} is itself an adapter: give the base instead, and the adapter with --adapter"
            )
        if adapter is not None:
            adapters[_DEFAULT_ADAPTER] = adapter
        return base

    base = open_on_all_ranks(open_base)
    assert base is not None
    for name, folder in extra.items():
        adapter = open_on_all_ranks(partial(open_adapter_on, folder, base, verify=verify, ranks=Ranks()))
        assert isinstance(adapter, Adapter)
        adapters[name] = adapter
    return base, Adapters(base, adapters)


def _mesh(device: torch.device, args: ModelArgs, tp: int) -> Mesh | None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if tp < 1 or ranks % tp:
        rule = f"it must be at least 1 and divide the {ranks} ranks"
        raise ConfigError(Problem(rule, "start a multiple of tp ranks with torchrun", "tp", tp))
    sharded = {"n_heads": args.n_heads, "n_kv_heads": args.n_kv_heads, "ffn_dim": args.ffn_dim}
    for name, size in {**sharded, "vocab_size": args.vocab_size}.items():
        if size % tp:
            rule = f"it must divide the model's {name}, {size}"
            raise ConfigError(Problem(rule, "use a smaller tp; FSDP shards over the other ranks", "tp", tp))
    return build_mesh(device, dp_shard=ranks // tp, tp=tp) if ranks > 1 else None


def _shard(model: Decoder, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> str:
    """Shard ``model`` of ``dtype`` and return a note for the user about its speed."""
    if mesh.tp:
        from toolkit.parallel.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, table(model.args).tensor_plan(), mesh.tp, split_sequence=False)
    if mesh.dp_size == 1:
        return ""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from toolkit.generation.gathered import fits_unsharded
    from toolkit.parallel.fsdp import apply_fsdp, fsdp_units

    fits, note = fits_unsharded(model, device)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    options = Parallelism(fsdp_reshard_after_forward="never" if fits else "always")
    apply_fsdp(model, fsdp_units(model), mesh.fsdp, options, precision=precision)
    return note


def _tokenizer(source: WeightSource, chosen: Path | str | None, add_bos: bool | None) -> Tokenizer | None:
    """Load the tokenizer, the same on every rank.

    Raises:
        DataError: it cannot be loaded on some rank, or the ranks load different ones; raised on every rank.
    """
    ranks, tokenizer, problems = Ranks(), None, []
    try:
        path = chosen or tokenizer_of(source)
        tokenizer = load_tokenizer(path, add_bos=add_bos) if path else None
        if tokenizer and chosen:
            _check_not_smaller(tokenizer, tokenizer_of(source))
    except DataError as error:
        problems = [str(error)]
    if not (failures := ranks.gather_problems(problems)):
        fingerprint = tokenizer.fingerprint if tokenizer else None
        same = fingerprint == ranks.on_rank_0(lambda: fingerprint)
        failures = ranks.gather_problems(
            [] if same else [f"rank {ranks.rank} has another tokenizer than rank 0"]
        )
    if failures:
        raise DataError("\n".join(failures))
    return tokenizer


def _check_not_smaller(tokenizer: Tokenizer, original: Path | None) -> None:
    """Reject a tokenizer smaller than the model's ``original`` one, because it is probably the wrong one.

    Raises:
        DataError: ``tokenizer`` is smaller.
    """
    try:
        entries = vocabulary_size(original) if original else 0
    except DataError:
        return  # the original is damaged, which is why another was chosen
    if tokenizer.n_words < entries:
        raise DataError(
            f"the tokenizer {tokenizer.path} has {tokenizer.n_words:,} entries, but the model's, in "
            f"{original}, has {entries:,}\n  fix:  remove --tokenizer, or use one with as many entries"
        )


def require_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Return the tokenizer of ``loaded``, checked by :func:`check_tokenizer`."""
    return check_tokenizer(loaded.tokenizer, loaded.args)


def check_tokenizer(tokenizer: Tokenizer | None, args: ModelArgs) -> Tokenizer:
    """Return ``tokenizer`` if it is usable with the model.

    Raises:
        DataError: there is none, or it has more entries than the model.
    """
    if tokenizer is None:
        raise DataError(
            "no tokenizer was found next to the weights: give its folder or file with --tokenizer"
        )
    if tokenizer.n_words > args.vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.path} has {tokenizer.n_words:,} entries, but the model only "
            f"{args.vocab_size:,}: give the one it was trained with by --tokenizer"
        )
    return tokenizer
