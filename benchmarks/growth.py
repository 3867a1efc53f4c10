"""How quickly rounding errors grow: train models twice in fp64, once with weights changed by 1e-13 of their
values, and compare the losses.

    python -m benchmarks.growth [--steps 60] [--output benchmarks/results/growth.md]

Both runs are one process, so nothing but the change makes them differ. Where the differences grow, those of
two layouts grow as much. The models train on short rows of the embedded text; all but the last with twice
the learning rate of train_configs/debug_moe.toml and a tenth of its balancing loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

import torch

from benchmarks.machine import describe
from tests.curves import differences
from toolkit import load_config, open_data, start
from toolkit.distributed.dtensor import local
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.trainer import Trainer

CONFIG = "train_configs/debug_moe.toml"
CHANGE = 1e-13
_FAST: dict[str, object] = {"optimizer.lr": 2e-3, "moe.aux_loss_coeff": 1e-2}
_DENSE = _FAST | {"moe.aux_loss_coeff": 0.0}
_QWEN3 = {"model.head_dim": 128}
MODELS: dict[str, dict[str, object]] = {
    "Llama 3, dense": {"model.name": "llama3", **_DENSE},
    "Qwen3, dense, tied head": {"model.name": "qwen3", **_QWEN3, **_DENSE},
    "Qwen3 MoE, tied head": {"model.name": "qwen3_moe", **_QWEN3, **_FAST},
    "Qwen3 MoE": {"model.name": "qwen3_moe", "model.tie_embeddings": False, **_QWEN3, **_FAST},
    "Mixtral": _FAST,
    f"Mixtral, as in {CONFIG}": {},
}
_FP64 = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")


def losses(folder: str, model: dict[str, object], steps: int, change: float) -> tuple[list[float], float]:
    """Return the losses of a run whose initial weights are changed, and its largest gradient norm."""
    overrides = {
        "job.dump_folder": folder, "training.steps": steps, "training.seq_len": 64,
        "training.local_batch_size": 8, "checkpoint.enable": False, "validation.enable": False,
        "metrics.enable_tensorboard": False, "metrics.log_freq": 1, "lr_scheduler.total_steps": 600,
        **dict.fromkeys(_FP64, "float64"), **model,
    }  # fmt: skip
    config = load_config(CONFIG, overrides)
    with start(config) as device, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(config, open_data(config), device, StartupTimer(enabled=False))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in trainer.model_parts.named_parameters():
                values = local(parameter)
                noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
                values.mul_(1 + change * noise)
        trainer.train()
    logged = [it for it in trainer.history if "loss" in it]
    return [it["loss"] for it in logged], max(it["grad_norm"] for it in logged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine = describe()
    every = range(10, options.steps + 1, 10)
    lines = [
        "# Growth of rounding errors",
        "",
        f"`python -m benchmarks.growth --steps {options.steps}`: relative differences of the loss "
        f"between two runs in fp64 of one process, with initial weights that differ by {CHANGE:.0e} of their "
        f"values; the largest of ten steps. {machine}",
        "",
        f"| model | {' | '.join(f'step {step}' for step in every)} | largest gradient norm |",
        "|---" * (len(every) + 2) + "|",
    ]
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            plain, norm = losses(f"{folder}/plain", model, options.steps, 0.0)
            changed, _ = losses(f"{folder}/changed", model, options.steps, CHANGE)
        apart = differences(changed, plain)
        largest = [max(apart[step - 10 : step]) for step in every]
        lines.append(f"| {name} | {' | '.join(f'{it:.0e}' for it in largest)} | {norm:.1f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
