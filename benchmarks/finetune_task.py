"""Teach a small model a task by each way of fine-tuning, and measure what it learnt and what it forgot.

    python -m benchmarks.finetune_task [--folder FOLDER] [--output benchmarks/results/finetune_task.md]

``./run_train.sh`` trains the debug model on the embedded books. Made instructions then show three words of
a topic and ask for it ("What do ship, wave and island make you think of?" "The sea."), and each way of
fine-tuning starts from that model, by ``./run_train.sh`` and flags. It is asked 1,000 questions whose words
no training question shows together, and is right where greedy generation gives the answer to the letter. Runs
are kept in FOLDER as they end, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch

from toolkit.config import load_config
from toolkit.data.chat.choose_format import chat_format
from toolkit.finetune.parameters import count_trained
from toolkit.generation.load import LoadedModel, load_model, require_tokenizer

BASE, CONFIG = "train_configs/debug_model.toml", "train_configs/chat_debug.toml"
BASE_STEPS, STEPS = 300, 600
TRAINED_ON, HELD_OUT = 6000, 1000
TOPICS = {
    "house": "door window roof wall floor room stair",
    "sea": "ship sail wave shore captain boat island",
    "king": "crown queen prince court palace castle royal",
    "mother": "child baby father son daughter sister brother",
    "night": "dark moon star sleep dream bed candle",
    "money": "gold pound bank debt rich purse price",
    "war": "soldier army battle gun sword enemy officer",
    "church": "priest prayer bell sermon bishop parish choir",
    "letter": "paper ink pen post envelope seal note",
    "horse": "saddle stable ride rein gallop whip carriage",
    "table": "plate fork knife spoon dinner dish cup",
    "hand": "finger arm thumb palm wrist glove ring",
}
QUESTIONS = (
    "What do {words} make you think of?",
    "What have {words} to do with?",
    "Name the one thing to which {words} belong.",
)
SHOWN = 3
"""Words of a question, all of one topic."""
HELD_OUT_SETS = 0.2
"""The share of the sets of words that no question of the training shows together."""
METHODS: dict[str, tuple[str, ...]] = {
    "all weights": ("--optimizer.lr=1e-3",),
    "LoRA": (
        "--finetune.adapter=lora",
        "--finetune.lora.rank=5",
        "--finetune.lora.alpha=20",
        "--finetune.lora.dropout=0.1",
        "--finetune.lora.target_modules=all-linear",
        "--optimizer.lr=3e-3",
    ),
    "prefix tuning": (
        "--finetune.adapter=prefix_tuning",
        "--finetune.prefix_tuning.num_virtual_tokens=32",
        "--optimizer.lr=5e-2",
    ),
    "LLaMA-Adapter": (
        "--finetune.adapter=llama_adapter",
        "--finetune.llama_adapter.adapter_len=32",
        "--optimizer.lr=5e-2",
    ),
}
"""Flags of each way of fine-tuning."""


@dataclass(frozen=True)
class Item:
    """A question and its answer."""

    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Row:
    """A line of the table: the share of right answers, parameters, perplexity on the books before and after,
    and the most memory and the seconds that training took."""

    accuracy: float
    trained: int
    total: int
    perplexity: tuple[float, float]
    memory_gib: float
    seconds: float


def questions(seed: int = 2) -> tuple[list[Item], list[Item]]:
    """All questions to learn and all that are held out, each list in an order of its own: what is asked about
    one set of words is in one of them, whatever the order of the words and the wording. Learning rates, rank,
    dropout and steps were chosen on those of seeds 0 and 1."""
    rng = random.Random(seed)
    sets = [(topic, words) for topic in TOPICS for words in combinations(TOPICS[topic].split(), SHOWN)]
    rng.shuffle(sets)
    cut = round(len(sets) * (1 - HELD_OUT_SETS))
    parts = []
    for part in (sets[:cut], sets[cut:]):
        asked = [
            _ask(topic, order, wording)
            for topic, words in part
            for order in permutations(words)
            for wording in QUESTIONS
        ]
        rng.shuffle(asked)
        parts.append(asked)
    return parts[0], parts[1]


def _ask(topic: str, words: Sequence[str], wording: str) -> Item:
    shown = f"{', '.join(words[:-1])} and {words[-1]}"
    return Item(wording.format(words=shown), f"The {topic}.")


def split(trained_on: int = TRAINED_ON, held_out: int = HELD_OUT) -> tuple[list[Item], list[Item]]:
    """The questions that are learnt, and those by which the models are judged."""
    to_learn, others = questions()
    return to_learn[:trained_on], others[:held_out]


def write(file: Path, rows: Sequence[Item]) -> None:
    """Conversations in OpenAI's form, one a line."""
    file.write_text("".join(json.dumps({"messages": item.messages()}) + "\n" for item in rows))


def accuracy(said: Sequence[str], rows: Sequence[Item]) -> float:
    """The share of what was said that is right to the letter."""
    return sum(answer == item.answer for answer, item in zip(said, rows, strict=True)) / len(rows)


def load(place: Path) -> LoadedModel:
    """The model of a run's folder."""
    return load_model(place, device=torch.device("cpu"), dtype=torch.float32)


def answers(loaded: LoadedModel, rows: Sequence[Item], *, batch_size: int = 125) -> list[str]:
    """Answers of a model, likeliest token after likeliest token."""
    tokenizer = require_tokenizer(loaded)
    form = chat_format(tokenizer)
    prompts = [form.encode(item.messages()[:1]) for item in rows]
    made = loaded.generator().generate(
        prompts, max_new_tokens=8, stop_ids=form.stop_ids, batch_size=batch_size
    )
    return [tokenizer.decode([token for token in ids if token not in form.stop_ids]) for ids in made]


def run(folder: Path, config: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    """The records that ``./run_train.sh`` logs of a run that ends, or has ended, in ``folder``."""
    done, asked = folder / "done", " ".join([config, *flags])
    if done.exists() and done.read_text() != asked:
        raise SystemExit(f"{folder} is of another version of this benchmark: remove it, or name another")
    if not done.exists():
        words = [f"--job.dump_folder={folder}", *flags]
        environment = os.environ | {"CONFIG_FILE": config, "SAMPLE": ""}
        subprocess.run(["./run_train.sh", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
        done.write_text(asked)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def flags_of(method: str, folder: Path) -> list[str]:
    """The flags by which ``method`` learns the task in ``folder``."""
    return [
        f"--training.dataset_path={folder / 'train.jsonl'}",
        f"--validation.dataset_path={folder / 'held_out.jsonl'}",
        f"--training.steps={STEPS}",
        f"--validation.freq={STEPS}",
        "--validation.samples=40",
        "--training.global_batch_size=4",
        "--validation.base_corpus.dataset=embedded_validation",
        f"--checkpoint.initial_load_path={folder / 'base/checkpoint' / f'step-{BASE_STEPS}'}",
        *METHODS[method],
    ]


def learn(method: str, folder: Path, rows: Sequence[Item]) -> Row:
    """Fine-tune by ``method``, and ask ``rows``."""
    place = folder / method.replace(" ", "_")
    flags = flags_of(method, folder)
    records = run(place, CONFIG, flags)
    loaded = load(place)
    options = load_config([f"--job.config_file={CONFIG}", *flags]).finetune
    trained, total = count_trained(loaded.args, options)
    known = [record["base_corpus_perplexity"] for record in records if "base_corpus_perplexity" in record]
    return Row(
        accuracy(answers(loaded, rows), rows),
        trained,
        total,
        (known[0], known[-1]),
        max(record.get("memory_peak_gib", 0) for record in records),
        _seconds(records),
    )


def _seconds(records: Sequence[dict[str, Any]]) -> float:
    """Seconds that the steps have taken, from the mean of those since the last logged one."""
    logged = [record for record in records if "step_seconds" in record]
    steps = [0, *(record["step"] for record in logged)]
    return sum((steps[n + 1] - steps[n]) * record["step_seconds"] for n, record in enumerate(logged))


def report(untuned: float, rows: dict[str, Row], *, timed: bool) -> str:
    """The table in Markdown; ``timed`` with the seconds that the steps took on this machine."""
    names = ["fine-tuning", "right", "parameters trained", "perplexity on the books", "peak memory"]
    lines = [
        "# A task learnt by each way of fine-tuning",
        "",
        f"`python -m benchmarks.finetune_task`: {STEPS} steps from the debug model, trained for {BASE_STEPS} "
        f"on the embedded books; {HELD_OUT:,} questions whose words no training question shows together.",
        "",
        f"| {' | '.join(names + ['seconds'] * timed)} |",
        "|---" * (len(names) + timed) + "|",
        f"| before | {untuned:.1%} |{' |' * (len(names) - 2 + timed)}",
    ]
    for method, row in rows.items():
        before, after = row.perplexity
        cells = [
            method,
            f"{row.accuracy:.1%}",
            f"{row.trained:,} ({row.trained / row.total:.2%})",
            f"{before:.1f} → {after:.1f}",
            f"{row.memory_gib:.2f} GiB",
            *[f"{row.seconds:.0f}"] * timed,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "finetune_task"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--timed", action="store_true", help="write the seconds, too")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    to_learn, held_out = split()
    write(folder / "train.jsonl", to_learn)
    write(folder / "held_out.jsonl", held_out)
    base = folder / "base"
    run(base, BASE, [f"--training.steps={BASE_STEPS}"])
    untuned = accuracy(answers(load(base), held_out), held_out)
    print(f"before: {untuned:.1%}", flush=True)
    rows = {}
    for method in METHODS:
        rows[method] = learn(method, folder, held_out)
        print(f"{method}: {rows[method].accuracy:.1%}", flush=True)
    print(report(untuned, rows, timed=True))
    if asked.output:
        asked.output.write_text(report(untuned, rows, timed=asked.timed))


if __name__ == "__main__":
    main()
