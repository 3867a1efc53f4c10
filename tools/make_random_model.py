"""Write a Hugging Face folder with the initial weights of a training run.

    python -m tools.make_random_model OUT --flavor 7B [--name llama2] [--dtype bfloat16] [--seed 0]

Use it to test loading, conversion and generation at any size without real weights. The weights are those of a
run with this seed, in any dtype; at most one file of --max-bytes is in memory. --tokenizer adds a tokenizer.
Custom shapes: --set n_layers=2 --set dim=64. Exit codes: 0 done, 2 invalid arguments, 3 unwritable folder or
unreadable tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from toolkit.commands.arguments import flags_named, local_path
from toolkit.config import load_config
from toolkit.config.training import Model
from toolkit.distributed.agreement import Ranks
from toolkit.errors import EXIT_FINISHED, ToolkitError, report
from toolkit.io import standard_streams
from toolkit.io.tensor_file import whole
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import model_args, model_label
from toolkit.models.parameters import init_rule, parameter_count, parameter_shapes
from toolkit.parallel.init_weights import initial_rows
from toolkit.weights.hf_assets import Companions, tokenizer_companions
from toolkit.weights.hf_write import MAX_BYTES, write_hf
from toolkit.weights.source import Region, StoredTensor


class InitialWeights:
    """Initial weights of a model as a :class:`toolkit.weights.source.WeightSource`.

    ``place`` is a path that identifies them.
    """

    def __init__(self, args: ModelArgs, *, dtype: torch.dtype, seed: int, place: Path):
        self.args, self.dtype, self.seed, self.place = args, dtype, seed, place
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(shape, dtype) for name, shape in parameter_shapes(args).items()
        }

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        shape = self.tensors[name].shape
        rows, *columns = whole(shape) if region is None else region
        values = initial_rows(name, self.seed, init_rule(name, self.args), shape, rows)
        index = (slice(None), *columns)
        part = values[index].to(self.dtype).contiguous()
        return part if out is None else out.copy_(part)


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.max_bytes < 0:
        parser.error("--max-bytes is 0 or more")
    try:
        shape = [f"--model.{pair}" for pair in asked.set]
        keys = {*Model.model_fields, *(pair.partition("=")[0] for pair in asked.set)} - {"name", "flavor"}
        flags = {"model.name": "--name", "model.flavor": "--flavor"}
        with flags_named(flags | {f"model.{key}": f"--set {key}" for key in keys}):
            config = load_config([f"--model.name={asked.name}", f"--model.flavor={asked.flavor}", *shape])
            given, add_bos = asked.tokenizer, config.model.add_bos_token
            beside = tokenizer_companions(given, add_bos=add_bos) if given else Companions()
            args = model_args(config, tokenizer_vocab=beside.entries or None)
        place = _placeholder(f"{args} {asked.dtype} {asked.seed}")
        source = InitialWeights(args, dtype=getattr(torch, asked.dtype), seed=asked.seed, place=place)
        total = parameter_count(args) * source.dtype.itemsize
        print(f"{model_label(config)}: {parameter_count(args):,} parameters, {total / 1e9:.2f} GB")
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:

            def advance(count: int, bar: tqdm = bar) -> None:
                bar.update(count)

            write_hf(
                source,
                asked.out,
                tokens=beside.tokens,
                others=beside.files,
                ranks=Ranks(),
                max_bytes=asked.max_bytes,
                progress=advance,
            )
        print(f"wrote {asked.out}")
    except ToolkitError as error:
        return report(error, show=True, debug=asked.debug)
    return EXIT_FINISHED


def _placeholder(what: str) -> Path:
    """A nonexistent path, equal for equal weights, so that a killed conversion can be resumed."""
    return Path(os.devnull, f"random-model-{hashlib.sha256(what.encode()).hexdigest()[:16]}")


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_random_model",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", type=local_path, help="folder to write, new or empty")
    parser.add_argument("--name", default="llama2", help="family, as model.name (default: llama2)")
    parser.add_argument("--flavor", required=True, help="size, as model.flavor")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of model.*"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="as debug.seed (default: 0)")
    parser.add_argument("--tokenizer", type=local_path, help="folder or file of a tokenizer to include")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MAX_BYTES,
        help="maximum size of a file; 0 writes one file (default: 5 GB)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


if __name__ == "__main__":
    standard_streams.protect()
    sys.exit(main(sys.argv[1:]))
