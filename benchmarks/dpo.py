"""Measure DPO with a stored reference beside SFT on the same tokens, and beside trl's DPOTrainer.

    python -m benchmarks.dpo [--rounds 1] [--output benchmarks/results/dpo.md]

A Llama of 33.6M parameters on two ranks takes 4 pairs a rank and step: a prompt and two answers of words from
the text that ships with the toolkit, at most 480 tokens in all. SFT takes each prompt with each answer as a
conversation of its own. Both read rows of 512 tokens, of one pair or two conversations. trl, with DDP, pads
to its longest sequence, and precomputes the reference's log-probabilities, too. Runs take turns, and the
medians are over the steps after the first ones of all rounds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.peer_models import SHAPES
from toolkit.hardware import cores

ROOT = Path(__file__).parents[1]
SHAPE, PAIRS, RANKS, STEPS, SKIPPED = "33.6M", 4, 2, 12, 3
LENGTH = 512
PROMPT, ANSWER = 20, 110
"""Words of a prompt and of each answer."""
DTYPES = ("float32", "bfloat16")
KINDS = {
    "DPO": ("--finetune.objective=dpo", "--data.format=preference", "--data.packing=false"),
    "SFT": ("--data.format=messages", "--data.packing=true"),
}


def write_data(folder: Path) -> None:
    """Write pairs for each step, as trl and the toolkit read them, and as conversations for SFT.

    A prompt with its answer has at most 240 tokens, so that nothing is cut.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with gzip.open(ROOT / "toolkit/data/embedded/train.jsonl.gz", "rt", encoding="utf-8") as text:
        words = " ".join(json.loads(line)["text"] for line in text).split()
    rng = random.Random(0)

    def say(count: int) -> str:
        first = rng.randrange(len(words) - count)
        return " ".join(words[first : first + count])

    rows: list[dict[str, str]] = []
    while len(rows) < PAIRS * RANKS * STEPS:
        row = {"prompt": say(PROMPT), "chosen": say(ANSWER), "rejected": say(ANSWER)}
        sizes = {name: len(tokenizer.encode(text)) for name, text in row.items()}
        if sizes["prompt"] + max(sizes["chosen"], sizes["rejected"]) <= 240:
            rows.append(row)
    turns = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row[name]},
            ]
        }
        for row in rows
        for name in ("chosen", "rejected")
    ]
    for name, lines in (("DPO", rows), ("SFT", turns)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(folder: Path) -> None:
    """Write a Hugging Face folder with random weights and the tests' tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shape = SHAPES[SHAPE]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["dim"],
        intermediate_size=shape["ffn_dim"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tests/assets/tokenizer").save_pretrained(folder)


def ours(folder: Path, kind: str, dtype: str, number: int) -> list[float]:
    """Return the seconds of the steps of a run of the toolkit."""
    place = folder / f"{kind}_{dtype}_{number}"
    flags = [
        f"--job.dump_folder={place}",
        f"--model.hf_assets_path={folder / 'model'}",
        f"--model.tokenizer_path={ROOT / 'tests/assets/tokenizer'}",
        f"--checkpoint.initial_load_path={folder / 'model'}",
        "--checkpoint.initial_load_in_hf=true",
        "--checkpoint.enable=true",
        f"--training.dataset_path={folder / f'{kind}.jsonl'}",
        f"--training.seq_len={LENGTH}",
        f"--training.local_batch_size={PAIRS}",
        f"--training.global_batch_size={PAIRS * RANKS}",
        f"--training.steps={STEPS}",
        f"--training.mixed_precision_param={dtype}",
        "--activation_checkpoint.mode=none",
        "--metrics.log_freq=1",
        "--optimizer.lr=1e-5",
        *KINDS[kind],
    ]
    (config := folder / "run.toml").touch()
    environment = os.environ | {"CONFIG_FILE": str(config), "NGPU": str(RANKS)}
    subprocess.run(["./run_train.sh", *flags], env=environment, check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [it["step_seconds"] for it in records if "step_seconds" in it][SKIPPED:]


def trl(folder: Path, dtype: str) -> list[float]:
    """Return the seconds of the steps of trl's trainer, by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command = [*launcher, "-m", "benchmarks.dpo", "--folder", str(folder), "--trl", dtype]
    environment = os.environ | {"OMP_NUM_THREADS": str(cores() // RANKS)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[") and line.endswith("]")]
    return json.loads(line)[SKIPPED:]


def train_by_trl(folder: Path, dtype: str) -> None:
    """Train on this rank, and print the seconds of each step on rank 0."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **others: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            seconds[-1] += time.perf_counter()

    data = load_dataset(
        "json", data_files=str(folder / "DPO.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    options = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        max_length=LENGTH // 2,
        learning_rate=1e-5,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        precompute_ref_log_probs=True,
        gradient_checkpointing=False,
        bf16=dtype == "bfloat16",
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens(dict.fromkeys(("pad_token", "eos_token"), "<|end_of_text|>"))
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=options,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps(seconds))


def report(seconds: dict[tuple[str, str], list[float]], machine: str) -> str:
    """Return the table in Markdown."""
    lines = [
        "# DPO with a stored reference",
        "",
        f"`python -m benchmarks.dpo`: a Llama of {SHAPE} parameters, {RANKS} ranks with {PAIRS} pairs each; "
        f"medians of {len(next(iter(seconds.values())))} steps, and in brackets the middle half. {machine}",
        "",
        "| dtype | DPO, s a step | SFT on the same tokens | times SFT | trl, s a step | times trl's pairs |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        dpo, sft, trls = (seconds[kind, dtype] for kind in (*KINDS, "trl"))
        ratios = [
            statistics.median(dpo) / statistics.median(sft),
            statistics.median(trls) / statistics.median(dpo),
        ]
        cells = [dtype, _spread(dpo), _spread(sft), f"{ratios[0]:.2f}", _spread(trls), f"{ratios[1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--trl", choices=DTYPES, help="what one rank of trl runs")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    if options.trl:
        train_by_trl(options.folder, options.trl)
        return
    machine = describe()
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"))
        write_data(Path(folder))
        for number in range(options.rounds):
            for dtype in DTYPES:
                for kind in KINDS:
                    seconds.setdefault((kind, dtype), []).extend(ours(Path(folder), kind, dtype, number))
                seconds.setdefault(("trl", dtype), []).extend(trl(Path(folder), dtype))
    text = report(seconds, machine)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
