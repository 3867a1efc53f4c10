"""A model to use, from weights of any format: for generation, chat and evaluation.

In one process the model is a plain module. Over the ranks of a process group it is sharded: split by heads
and features among ``tp`` of them, whose hidden states are whole (:func:`apply_tensor_parallel` without
``split_sequence``), and by FSDP among the rest. Each rank reads its shards only.
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
from toolkit.data.tokenizers.files import vocabulary_size
from toolkit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, DataError, Problem
from toolkit.finetune.adapter import Adapter
from toolkit.finetune.open_adapter import open_adapted, open_adapter_on
from toolkit.generation.adapters import Adapters
from toolkit.generation.compiled import compiler_for
from toolkit.generation.cpu_prepack import can_pack, pack
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
class Loaded:
    """``mesh`` is None for a model in one process, ``tokenizer`` where none was found. ``seq_len`` are the
    tokens of a row of the training, where a checkpoint tells. ``adapters`` are those that can be selected.
    ``note`` is what a user should know of the weights and the speed. ``eos_ids`` end a text beside the
    tokenizer's, as generation_config.json, or config.json, beside the weights tells.
    ``chat_template_kwargs`` are those with which a checkpoint was trained."""

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
        """Use another of ``adapters``, or the base alone; collective. Generators of before are done with.

        Raises:
            DataError, CheckpointError: weights can no longer be read.
        """
        assert self.adapters is not None, "the model was loaded with adapters"
        if self.mesh is not None and self.mesh.dp_size > 1:
            from toolkit.generation.gathered import free_gathered

            free_gathered(self.model)
        self.adapters.select(self.model, adapter, self.mesh.tp if self.mesh else None)

    def generator(self, *, compiled: bool = False) -> Generator:
        """Generates ids of the tokenizer, on all ranks alike; ``compiled`` is worth its half minute for long
        texts.

        On a CPU matrices are reordered for it, and the model's blocks hand them out no more; not where
        another adapter may be merged into them. Compiled code has them once more.

        Raises:
            ConfigError: a sharded model is not compiled, nor is one for a CPU without a C++ compiler.
        """
        if compiled and self.mesh is not None:
            rule = "a model is compiled in one process"
            raise ConfigError(Problem(rule, "leave --compile out, or start one process", "--compile", True))
        device = next(self.model.parameters()).device
        if compiled and device.type == "cpu" and (lacks := lacks_cpp_compiler()):
            fix = "install g++, name another in CXX, or leave --compile out"
            raise ConfigError(Problem(lacks, fix, "--compile", True))
        plain = self.mesh is None and not compiled and self.adapters is None
        if plain and can_pack(self.model):
            pack(self.model)
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
    adapters: Mapping[str, Path | str] | None = None,
    check: Callable[[Tokenizer | None, ModelArgs], object] | None = None,
) -> Loaded:
    """The model at ``path``, in any form that :func:`toolkit.weights.open.open_weights` opens, or an adapter,
    PEFT's folder or a checkpoint of ours, with the base that it names.

    Its parameters are of ``dtype`` and have no gradients. Of ``adapters`` on it, by name, the first is used
    until another is selected.

    Sharded over all ranks where there is a process group. What FSDP gathers in the first forward stays where
    all ranks have room for it. With ``verify`` a checkpoint is compared with its hashes, of which each rank
    takes its share. The tokenizer is that at ``tokenizer_path``, else the one
    beside the weights, else the one that the checkpoint was trained with; ``add_bos`` says whether plain
    texts begin with BOS, else the checkpoint's run, else the tokenizer's files. ``check`` raises what is
    wrong with the tokenizer, on every rank alike, before weights are read.

    Raises:
        ConfigError: ``tp`` does not divide the ranks, or a dimension of the model; or a user's decoder has
            buffers or other parameters than the toolkit's.
        DataError: weights or tokenizer cannot be used; on every rank alike.
    """
    source, of_base = _open(path, adapters or {}, verify)
    if source.args.classifier:
        raise DataError(
            f"{path} is a classifier of {len(source.args.classifier.labels)} classes, which has no logits of "
            "tokens\n  fix:  name a language model"
        )
    mesh = _mesh(device, source.args, tp)
    trained = of_base.adapters.get(_OWN, source)
    run = run_of(trained)
    settings = saved_settings(run)
    beside = next((it for it in (trained, source) if tokenizer_of(it)), source)
    tokenizer = _tokenizer(beside, tokenizer_path, configured_add_bos(run) if add_bos is None else add_bos)
    if check:
        check(tokenizer, source.args)
    prefix = any(it.options.adapter == "prefix_tuning" for it in of_base.adapters.values())
    attention = choose_attention(
        "auto",
        "",
        device=device.type,
        documents=False,
        prefix=prefix,
        cpu_fast_paths=cpu.is_enabled(),
    )
    model = meta_decoder(source.args, attention=attention).to(dtype)
    notes = [note_of(source), _shard(model, mesh, device, dtype) if mesh is not None else ""]
    model.to_empty(device=device).requires_grad_(False)
    of_base.load(model, next(iter(of_base.adapters), None), mesh.tp if mesh else None)
    return Loaded(
        model.eval(),
        source.args,
        tokenizer,
        mesh,
        settings.get("training.seq_len"),
        adapters=of_base if adapters else None,
        note="\n".join(filter(None, notes)),
        eos_ids=Ranks().on_rank_0(partial(eos_ids, source)),
        chat_template_kwargs={
            name.removeprefix(_KWARGS): value for name, value in settings.items() if name.startswith(_KWARGS)
        },
    )


_OWN = ""
"""Name of the adapter that a model at a path is itself."""
_KWARGS = "data.chat_template_kwargs."


def _open(path: Path | str, named: Mapping[str, Path | str], verify: bool) -> tuple[WeightSource, Adapters]:
    """The base at ``path`` and its adapters, the same on every rank."""
    found: dict[str, Adapter] = {}

    def opened() -> WeightSource:
        base, own = open_adapted(path, verify=verify, ranks=Ranks())
        if own is not None and named:
            raise DataError(f"{path} is an adapter itself: name the base in its place, and it with --adapter")
        found.update({} if own is None else {_OWN: own})
        return base

    base = open_on_all_ranks(opened)
    assert base is not None
    for name, folder in named.items():
        adapter = open_on_all_ranks(partial(open_adapter_on, folder, base, verify=verify, ranks=Ranks()))
        assert isinstance(adapter, Adapter)
        found[name] = adapter
    return base, Adapters(base, found)


def _mesh(device: torch.device, args: ModelArgs, tp: int) -> Mesh | None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if tp < 1 or ranks % tp:
        rule = f"it must be at least 1, and the {ranks} ranks of this start must divide by it"
        raise ConfigError(Problem(rule, "start a multiple of tp ranks, with torchrun", "tp", tp))
    split = {"n_heads": args.n_heads, "n_kv_heads": args.n_kv_heads, "ffn_dim": args.ffn_dim}
    for name, size in {**split, "vocab_size": args.vocab_size}.items():
        if size % tp:
            rule = f"the model's {name}, {size}, must divide by it"
            raise ConfigError(Problem(rule, "take a smaller tp; FSDP shards over the other ranks", "tp", tp))
    return build_mesh(device, dp_shard=ranks // tp, tp=tp) if ranks > 1 else None


def _shard(model: Decoder, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> str:
    """Shard ``model``, which is of ``dtype``, and return what a user should know of its speed."""
    if mesh.tp:
        from toolkit.parallel.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, table(model.args).tensor_plan(), mesh.tp, split_sequence=False)
    if mesh.dp_size == 1:
        return ""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from toolkit.generation.gathered import fits_gathered
    from toolkit.parallel.fsdp import apply_fsdp, fsdp_units

    fits, note = fits_gathered(model, device)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    options = Parallelism(fsdp_reshard_after_forward="never" if fits else "always")
    apply_fsdp(model, fsdp_units(model), mesh.fsdp, options, precision=precision)
    return note


def _tokenizer(source: WeightSource, given: Path | str | None, add_bos: bool | None) -> Tokenizer | None:
    """The same on every rank.

    Raises:
        DataError: it failed on some rank, or the ranks do not find the same; alike on every rank.
    """
    ranks, tokenizer, problems = Ranks(), None, []
    try:
        place = given or tokenizer_of(source)
        tokenizer = load_tokenizer(place, add_bos=add_bos) if place else None
        if tokenizer and given:
            _refuse_smaller(tokenizer, tokenizer_of(source))
    except DataError as error:
        problems = [str(error)]
    if not (failures := ranks.gather_problems(problems)):
        found = tokenizer.fingerprint if tokenizer else None
        same = found == ranks.on_rank_0(lambda: found)
        failures = ranks.gather_problems(
            [] if same else [f"rank {ranks.rank} has not the tokenizer of rank 0"]
        )
    if failures:
        raise DataError("\n".join(failures))
    return tokenizer


def _refuse_smaller(tokenizer: Tokenizer, own: Path | None) -> None:
    """Refuse a tokenizer smaller than the model's ``own``: most likely it is another.

    Raises:
        DataError: ``tokenizer`` is smaller.
    """
    try:
        entries = vocabulary_size(own) if own else 0
    except DataError:
        return  # it is damaged, and another was named for that
    if tokenizer.n_words < entries:
        raise DataError(
            f"the tokenizer {tokenizer.path} has {tokenizer.n_words:,} entries, and the model's, in {own}, "
            f"has {entries:,}\n  fix:  leave --tokenizer out, or name one with at least as many"
        )


def needed_tokenizer(loaded: Loaded) -> Tokenizer:
    """The tokenizer of ``loaded``, as :func:`fitting_tokenizer`."""
    return fitting_tokenizer(loaded.tokenizer, loaded.args)


def fitting_tokenizer(tokenizer: Tokenizer | None, args: ModelArgs) -> Tokenizer:
    """Return ``tokenizer``.

    Raises:
        DataError: there is none, or it has more entries than the model.
    """
    if tokenizer is None:
        raise DataError("no tokenizer lies beside the weights: name its folder or file with --tokenizer")
    if tokenizer.n_words > args.vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.path} has {tokenizer.n_words:,} entries and the model "
            f"{args.vocab_size:,}: name the one it was trained with, with --tokenizer"
        )
    return tokenizer
