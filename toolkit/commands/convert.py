"""Convert weights between formats, with at most one file of 5 GB in memory.

    llama-toolkit convert hf-to-dcp   HF_FOLDER    OUT      start training from downloaded weights
    llama-toolkit convert dcp-to-hf   CHECKPOINT   OUT      export a trained model
    llama-toolkit convert meta-to-dcp META_FOLDER  OUT
    llama-toolkit convert dcp-to-meta CHECKPOINT   OUT
    llama-toolkit convert meta-to-hf  META_FOLDER  OUT
    llama-toolkit convert hf-to-meta  HF_FOLDER    OUT
    llama-toolkit convert merge       BASE ADAPTER OUT      a LoRA or DoRA in its base, as HF_FOLDER
    llama-toolkit convert pissa       BASE ADAPTER OUT      PiSSA's initial ADAPTER, and the rest of BASE

HF_FOLDER contains config.json and safetensors, META_FOLDER params.json and consolidated.NN.pth. CHECKPOINT is
a step-N, or a run's folder (its newest checkpoint); a LoRA checkpoint is merged into its base. ADAPTER is
such a checkpoint or a PEFT folder, BASE any of the three. A checkpoint is written as OUT/step-0, for
checkpoint.initial_load_path, unless OUT itself is named step-N. IN and OUT may be URLs of object storage
(s3://bucket/model); OUT is then written to a temporary folder (TMPDIR) first.

pissa divides BASE into OUT, which has all but the principal part of the weights, and that part as a LoRA, the
PEFT folder ADAPTER. Train with checkpoint.initial_load_path = OUT, checkpoint.initial_load_in_hf = true and
finetune.adapter_path = ADAPTER.

OUT appears complete or not at all. After a kill, the same command reuses the finished Hugging Face files; an
OUT that is a URL leaves nothing behind, unless the program is killed by SIGKILL. Exit codes: 0 done, 2
invalid arguments, 3 unusable weights or unwritable OUT.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from toolkit.commands.arguments import (
    add_custom_import,
    add_ema_argument,
    any_path,
    command_parser,
    count,
    local_path,
)
from toolkit.errors import EXIT_FINISHED, one_line
from toolkit.launcher.signals import Stopped

if TYPE_CHECKING:
    from toolkit.finetune.saved_adapter import Adapter

_WAYS = ("merge", "pissa", "hf-to-dcp", "dcp-to-hf", "meta-to-dcp", "dcp-to-meta", "meta-to-hf", "hf-to-meta")
_DTYPES = ("float32", "bfloat16", "float16")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("convert", __doc__)
    add_custom_import(parser)
    parser.add_argument("way", choices=_WAYS, metavar="WAY")
    parser.add_argument("source", type=any_path, metavar="IN")
    parser.add_argument("adapter", type=local_path, metavar="ADAPTER", nargs="?", help="of merge and pissa")
    parser.add_argument("out", type=any_path, metavar="OUT")
    parser.add_argument("--rank", type=count, metavar="R", help="of pissa's adapter (default: 16)")
    parser.add_argument(
        "--target-modules",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="of pissa, as in finetune.lora (default: all-linear)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="default: as in IN")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of embedding and head; new ones are the mean of the old",
    )
    parser.add_argument(
        "--tokenizer",
        type=local_path,
        metavar="PATH",
        help="saved with the weights; default: IN's, or the run's",
    )
    parser.add_argument(
        "--max-bytes", type=int, metavar="N", help="of a Hugging Face file; 0 is one file (default: 5 GB)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all back, compare each bit, and reject NaN and infinity"
    )
    add_ema_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what each tensor becomes, and stop")
    return parser


@contextmanager
def _place(out: Path) -> Iterator[Path]:
    """Yield the folder to write, which is ``out`` or, for a URL, a local folder that is uploaded and removed,
    even after a signal."""
    if isinstance(out, Path):
        yield out
        return
    from toolkit.launcher.signals import stop_at_once
    from toolkit.weights.remote_folder import staged

    with stop_at_once(), staged(out) as work:
        yield work


def _principal(asked: argparse.Namespace) -> Adapter:
    """Decompose the weights of BASE."""
    from toolkit.finetune.pissa import principal_adapter
    from toolkit.io.work_folder import reject_existing
    from toolkit.weights.open import open_weights

    reject_existing(asked.adapter)
    reject_existing(asked.out)
    base = open_weights(asked.source, verify=not asked.dry_run, ema=asked.ema)
    with tqdm(unit="B", unit_scale=True, disable=None, desc="decomposition") as bar:
        return principal_adapter(
            base,
            rank=asked.rank or 16,
            target_modules=asked.target_modules or ["all-linear"],
            progress=bar.update,
        )


def _write_initial(initial: Adapter, folder: Path, base: Path) -> None:
    """Write the ``initial`` adapter of the model in ``base``."""
    import torch

    from toolkit.distributed.agreement import Ranks
    from toolkit.finetune.base import fingerprint
    from toolkit.finetune.peft_folder import write_peft
    from toolkit.weights.open import open_weights

    trained_on = {"place": str(base), "fingerprint": fingerprint(open_weights(base))}
    adapter = replace(initial, base=trained_on)
    write_peft(adapter, folder, dtype=torch.float32, others={}, ranks=Ranks(alone=True))


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.vocab_size is not None and asked.vocab_size < 1:
        parser.error("--vocab-size is at least 1")
    if (asked.way in ("merge", "pissa")) != (asked.adapter is not None):
        parser.error("merge and pissa take BASE ADAPTER OUT, and no other way an adapter")
    if asked.way != "pissa" and (asked.rank or asked.target_modules):
        parser.error("--rank and --target-modules are for pissa")
    if asked.way == "pissa" and asked.vocab_size is not None:
        parser.error("--vocab-size is not for pissa: resize BASE first")
    to_hf = asked.way.endswith("-hf") or asked.adapter is not None
    if asked.max_bytes is not None and (asked.max_bytes < 0 or not to_hf):
        parser.error("--max-bytes is 0 or more, and for Hugging Face's files")
    import torch

    from toolkit.finetune.combine import combine
    from toolkit.weights.convert import convert, mapping, prepare
    from toolkit.weights.hf_write import MAX_BYTES
    from toolkit.weights.views import note_of

    try:
        initial = _principal(asked) if asked.way == "pissa" else None
        conversion = prepare(
            "merge" if initial else asked.way,
            asked.source,
            asked.out,
            adapter=combine([(initial, -1.0)]) if initial else asked.adapter,
            max_bytes=MAX_BYTES if asked.max_bytes is None else asked.max_bytes,
            dtype=getattr(torch, asked.dtype) if asked.dtype else None,
            vocab_size=asked.vocab_size,
            tokenizer=asked.tokenizer,
            hashes=not asked.dry_run and initial is None,
            ema=asked.ema,
        )
        if asked.dry_run:
            for line in mapping(conversion):
                print(one_line(line))
            return EXIT_FINISHED
        bar = tqdm(total=conversion.bytes, unit="B", unit_scale=True, disable=None, desc=asked.way)
        with bar, _place(conversion.out) as out:
            written = replace(conversion, out=out)
            convert(written, verify=asked.verify, progress=bar.update)
        if initial:
            _write_initial(initial, asked.adapter, conversion.out)
    except Stopped as stopped:
        print(f"{stopped.name}: stopped; nothing of {asked.out} is left", file=sys.stderr)
        return 128 + signal.Signals[stopped.name]
    verified = ", each tensor compared" if asked.verify else ""
    print(f"{conversion.out}: {len(conversion.source.tensors)} tensors, {conversion.bytes:,} bytes{verified}")
    if said := note_of(conversion.original):
        print(said)
    if conversion.missing:
        who = "Meta's programs" if conversion.to == "meta" else "transformers"
        lacking = f"no {', no '.join(conversion.missing)}"
        print(f"{who} will find {lacking} next to it: put one there, or give the tokenizer with --tokenizer")
    if conversion.to == "dcp":
        print(f"to train from it: --checkpoint.initial_load_path {conversion.out}")
    if initial:
        lora = initial.options.lora
        print(
            f"{asked.adapter}: its LoRA; to train it: --checkpoint.initial_load_path={conversion.out} "
            "--checkpoint.initial_load_in_hf=true "
            f"--finetune.adapter=lora --finetune.adapter_path={asked.adapter} "
            f"--finetune.lora.rank={lora.rank} --finetune.lora.alpha={lora.rank} "
            f"--finetune.lora.target_modules={','.join(lora.target_modules)}"
        )
    return EXIT_FINISHED
