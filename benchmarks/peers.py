"""Speed and memory beside transformers and PEFT under torch's FSDP2, and packing beside padding.

    python -m benchmarks.peers --part pretrain|lora|experts|experts_lora|packing [--steps 7]
                               [--shapes 125M] [--dtypes bfloat16] [--results benchmarks/results]
                               [--write-docs]

Each side of a comparison has processes of its own, so that neither has memory or caches warm that the other
left; both take the same tokens and weights (benchmarks/peer_models.py) and step in turns, one waiting while
the other steps, so that whatever else the machine does hits both. A turn is two steps: the first has the
caches that the other side left, and is not timed, nor is the first turn. A comparison whose losses are not
the same at every step is refused.

The matmul ceiling is what the processes of either side reach in products of 2048 x 2048 at the same time,
before the steps or after them, whichever is most. Ours keeps freed memory, as its trainer does; the peer's
malloc is as glibc has it. Memory is measured in other processes: after two
steps, which make the optimizer's state, the peak of resident memory (VmHWM) is reset, and it is that of two
more steps, less what the process held before it made the model: what was imported. Of a page that ranks share
(`training.cpu_fast_paths`) each has a part. It is that of the rank that has most. There malloc gives
freed blocks of a MiB and more back at once, else holes in the heap hide what is held.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import peer_models, peer_packing, peer_split
from benchmarks.machine import describe
from benchmarks.peer_models import EXPERTS, SHAPES, Case
from tests.helpers import run_world
from toolkit.distributed.process_group import DTYPES
from toolkit.metrics.flops_finetune import fine_tuning_flops
from toolkit.metrics.memory import resident_bytes
from toolkit.models.parameters import parameter_count

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
WARM_UP = 2
LIMIT_SECONDS = 420.0
"""For a world of ranks."""
SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
"""Relative; rounding makes a tenth of it. Another scale of the adapter, or other tokens, make more."""
SIDES = {"ours": peer_models.ours, "theirs": peer_models.theirs}
PARTS = {
    "pretrain": "Pre-training beside transformers",
    "lora": "LoRA beside PEFT and transformers",
    "experts": "Experts beside transformers",
    "experts_lora": "LoRA of experts beside PEFT and transformers",
    "packing": "Packing beside padding",
}
WITH_PEFT = ("lora", "experts_lora")
DTYPES_HERE = ("bfloat16", "float32")

Result = dict[str, Any]


class NotComparable(Exception):
    """Two sides that do not compute the same."""


def cases(part: str, shapes: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """The comparisons of a part, of ``shapes`` in ``dtypes``."""
    found = []
    for dtype in dtypes:
        for shape in shapes:
            layouts = [(2, 1), (1, 2)] if part == "pretrain" else [(2, 1)]
            rows, length = (2, 256) if shape == "125M" else (4, 512) if shape == "33.6M" else (4, 256)
            for ranks, threads in layouts:
                local = rows * 2 // ranks
                for compiled in (False, True) if part == "pretrain" and ranks == 2 else (False,):
                    lora = part in WITH_PEFT
                    found.append(Case(shape, ranks, threads, dtype, local, length, lora, compiled))
    return found


# In the ranks


def time_side(case: Case, side: str, steps: int, turns: Turns) -> Result:
    """Seconds and losses of each step of a side, where a step's time goes, and the GFLOP/s of its matmuls."""
    torch.set_num_threads(case.threads)
    with turns.mine():
        ceilings = [matmul_rate(DTYPES[case.dtype])]
        step = SIDES[side](case)
    seconds, losses = [], []
    *given, last = peer_models.batches(case, 2 * (steps + 1) + 1)
    for number, pair in enumerate(zip(given[::2], given[1::2], strict=True)):
        with turns.mine():
            (_, first), (took, second) = (time_step(step, batch) for batch in pair)
        losses += [first, second]
        if number:
            seconds.append(took)
    with turns.mine():
        ceilings.append(matmul_rate(DTYPES[case.dtype]))
        split = peer_split.split(partial(step, *last))
    return {"seconds": seconds, "losses": losses, "ceiling": max(ceilings), "split": split}


def time_step(step: Callable[..., tuple[float, float]], batch: Sequence[Any]) -> tuple[float, float]:
    """Seconds that all ranks of this world take for a step, and its loss."""
    dist.barrier()
    started = time.perf_counter()
    loss, _ = step(*batch)
    dist.barrier()
    return time.perf_counter() - started, loss


class Turns:
    """Turns of the worlds of two sides, whose ranks read whose turn it is in a file that they share.

    A turn that comes is waited for in sleep, so that what the other side measures has the cores.
    """

    def __init__(self, file: Path, number: int):
        self.file, self.number = file, number

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for this side's turn, and hand it to the other at the end."""
        while self.file.read_text() != str(self.number):
            time.sleep(0.1)
        dist.barrier()
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            self.file.write_text(str(1 - self.number))
        dist.barrier()


def time_in_turns(
    made: dict[str, Callable[..., tuple[float, float]]], given: Sequence[Any], dtype: str
) -> Result:
    """Steps of all in the same processes, in turns, the first one of a turn last in the next."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, list[float]] = {name: [] for name in made}
    ceilings = [matmul_rate(DTYPES[dtype])]
    order = list(made)
    for number, batch in enumerate(given):
        for name in order:
            took, loss = time_step(made[name], batch)
            losses[name].append(loss)
            if number >= WARM_UP:
                seconds[name].append(took)
        order.reverse()
    ceilings.append(matmul_rate(DTYPES[dtype]))
    return {"seconds": seconds, "losses": losses, "ceiling": max(ceilings)}


def time_packing(folder: str, dtype: str, steps: int) -> Result:
    """Steps on packed and on padded conversations in turns, and how either fills its rows."""
    forms = {name: peer_packing.Form(Path(folder), name, dtype) for name in peer_packing.FORMS}
    result = time_in_turns(dict(forms), [()] * (WARM_UP + steps), dtype)
    return result | {"facts": {name: form.facts for name, form in forms.items()}}


def matmul_rate(dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s that all ranks reach at the same time, the best of some tries."""
    a, b, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    best = 0.0
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2 * size**3 / (time.perf_counter() - started) / 1e9)
    total = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def size_one(case: Case, side: str) -> int:
    """Bytes that the steps of one side take at most on this rank."""
    torch.set_num_threads(case.threads)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"  # so that ours leaves malloc as it is
    give_back()
    SIDES[side](replace(case, shape="5.2M", rows=1, length=8))  # imports what it needs
    before = resident_bytes()[0]
    step = SIDES[side](case)
    given = list(peer_models.batches(case, 4))
    for batch in given[:2]:
        step(*batch)
    Path("/proc/self/clear_refs").write_text("5")
    for batch in given[2:]:
        step(*batch)
    return resident_bytes()[1] - before - counted_twice()


def counted_twice() -> int:
    """Bytes of resident shared memory beyond this rank's part of it; all ranks call."""
    dist.barrier()
    status, rollup = (Path(f"/proc/self/{it}").read_text() for it in ("status", "smaps_rollup"))
    whole, own = (
        int(text.split(f"{name}:")[1].split()[0])
        for text, name in ((status, "RssShmem"), (rollup, "Pss_Shmem"))
    )
    dist.barrier()
    return 1024 * (whole - own)


def give_back() -> None:
    """Have malloc map blocks of a MiB and more one by one, and give them back when they are freed."""
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20) == 1


# Here


def compare(case: Case, steps: int) -> Result:
    """Measure a case.

    Raises:
        NotComparable: the two sides have other losses.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as worlds:
        turn = Path(folder, "turn")
        turn.write_text("0")
        run = partial(run_world, time_side, case.ranks, case, timeout=LIMIT_SECONDS)
        timed = {
            side: worlds.submit(run, side, steps, Turns(turn, number)) for number, side in enumerate(SIDES)
        }
        found = {side: future.result()[0] for side, future in timed.items()}
    result = {key: {side: found[side][key] for side in SIDES} for key in ("seconds", "losses", "split")}
    result["ceiling"] = max(found[side]["ceiling"] for side in SIDES)
    refuse_other_losses(case, result["losses"])
    memory = {side: max(run_world(size_one, case.ranks, case, side, timeout=LIMIT_SECONDS)) for side in SIDES}
    return {"case": asdict(case), "memory": memory, **result}


def pack(dtype: str, steps: int) -> Result:
    """Measure packing beside padding, on two ranks.

    Raises:
        NotComparable: the model has another loss on the conversations in one form than in the other.
    """
    with tempfile.TemporaryDirectory() as folder:
        peer_packing.write_conversations(Path(folder, "chats.jsonl"))
        [result, *_] = run_world(time_packing, 2, folder, dtype, steps, timeout=LIMIT_SECONDS)
    packed, padded = (result["facts"][name]["loss"] for name in peer_packing.FORMS)
    if not abs(packed - padded) <= SAME_LOSS[dtype] * padded:
        raise NotComparable(f"{dtype}: the loss of all conversations is {packed} packed and {padded} padded")
    return {"dtype": dtype, "ranks": 2, **result}


def packing_lines(result: Result) -> list[str]:
    """Rows of the table of packing."""
    places = result["ranks"] * peer_packing.ROWS * peer_packing.LENGTH
    ratios = [
        padded / packed
        for packed, padded in zip(result["seconds"]["packed"], result["seconds"]["padded"], strict=True)
    ]
    filled = {name: facts["filled"] for name, facts in result["facts"].items()}
    times = spread([ratio * filled["packed"] / filled["padded"] for ratio in ratios], 2)
    lines = []
    for name, facts in result["facts"].items():
        rates = [places / second for second in result["seconds"][name]]
        cells = [
            f"{name}, {result['dtype']}",
            f"{facts['rows']}",
            f"{1 - facts['filled']:.1%}",
            spread(rates),
            *(spread([rate * facts[what] for rate in rates]) for what in ("filled", "learnt")),
            times if name == "packed" else "1",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PACKING_HEAD = (
    "| | rows | padding | places/s | tokens/s that are no padding | tokens/s that are learnt | times padded |"
)


def refuse_other_losses(case: Case, losses: dict[str, list[float]]) -> None:
    """Raise NotComparable where the two sides' differ at a step."""
    for step, (mine, other) in enumerate(zip(losses["ours"], losses["theirs"], strict=True), 1):
        if not abs(mine - other) <= SAME_LOSS[case.dtype] * abs(other):
            raise NotComparable(
                f"{case}: at step {step} the loss is {mine} here and {other} there, which is more than "
                f"{SAME_LOSS[case.dtype]:g} apart: the sides do not compute the same"
            )


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and between which values the middle half lies."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def name(case: Case) -> str:
    """A comparison in the words of the table."""
    ranks = "2 ranks" if case.ranks == 2 else "2 threads"
    return f"{case.shape}, {ranks}, {case.dtype}{', compiled' if case.compiled else ''}"


def relative(result: Result) -> list[float]:
    """How many times as fast as the peer each step was."""
    seconds = result["seconds"]
    return [other / mine for mine, other in zip(seconds["ours"], seconds["theirs"], strict=True)]


def line(result: Result) -> str:
    """A row of the table."""
    case = Case(**result["case"])
    seconds, memory = result["seconds"], result["memory"]
    finetune = peer_models.configuration(case).finetune
    rates = {side: [case.tokens / second for second in seconds[side]] for side in SIDES}
    ratios = relative(result)
    work = fine_tuning_flops(case.args, finetune, seq_len=case.length) / 1e9
    shares = [statistics.median(rates[side]) * work / result["ceiling"] for side in SIDES]
    mebibytes = [memory[side] / 2**20 for side in SIDES]
    cells = [
        name(case),
        f"{case.ranks * case.rows} × {case.length}",
        *(spread(rates[side]) for side in SIDES),
        spread(ratios, 2),
        *(f"{size:,.0f}" for size in mebibytes),
        f"{mebibytes[0] / mebibytes[1]:.2f}",
        *(f"{share:.0%}" for share in shares),
        f"{result['ceiling']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| | samples × tokens | tokens/s | theirs | times theirs | peak MiB | theirs | times theirs "
    "| of the ceiling | theirs | ceiling, GFLOP/s |"
)


def table(part: str, results: Sequence[Result]) -> list[str]:
    """The lines of a part's table."""
    head = PACKING_HEAD if part == "packing" else HEAD
    rows: list[str] = []
    for result in results:
        rows += packing_lines(result) if part == "packing" else [line(result)]
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def report(part: str, results: Sequence[Result], command: str, machine: str) -> str:
    """The results in Markdown."""
    tell = packing_text if part == "packing" else peers_text
    text = f"`{command}`: {tell(part, results)} {machine}"
    lines = [f"# {PARTS[part]}", "", text, "", *table(part, results), ""]
    if part != "packing":
        splits = {name(Case(**result["case"])): result["split"] for result in results}
        lines += [peer_split.TEXT, "", *peer_split.table(splits), ""]
    return "\n".join(lines)


def packing_text(part: str, results: Sequence[Result]) -> str:
    """Tell what the table of packing is of."""
    steps, facts = len(results[0]["seconds"]["packed"]), results[0]["facts"]["packed"]
    counted, lengths, _ = facts["words"].splitlines()
    return (
        f"this toolkit on made conversations ({counted}; {lengths.strip()}), a Llama of "
        f"{peer_packing.SHAPE} parameters on two ranks, {peer_packing.ROWS} rows of {peer_packing.LENGTH} "
        f"tokens a rank, with `data.packing` and without it, {steps} steps each in turns; medians, and in "
        "brackets the "
        "middle half. Padding is that of the whole corpus, whose mean loss is the same in both forms. The "
        "script says how the conversations are made."
    )


def peers_text(part: str, results: Sequence[Result]) -> str:
    """Tell what the table of a comparison with peers is of."""
    import peft
    import transformers

    apart = max(
        abs(mine / other - 1)
        for result in results
        for mine, other in zip(result["losses"]["ours"], result["losses"]["theirs"], strict=True)
    )
    named = {result["case"]["shape"]: Case(**result["case"]).args for result in results}
    shapes = ", ".join(f"{name} has {parameter_count(args):,} parameters" for name, args in named.items())
    adapted = "all linear layers" if part == "lora" else "attention and the experts' down_proj"
    lora = f" and peft {peft.__version__} (rank {peer_models.RANK}, {adapted})"
    steps = len(results[0]["seconds"]["ours"])
    return (
        f"this toolkit and transformers {transformers.__version__}{lora if part in WITH_PEFT else ''} under "
        "`fully_shard`, each without activation checkpointing and eager unless it says compiled, "
        f"{steps} steps each in turns; medians, and in brackets the middle half. The losses of both are the "
        f"same at every step, within {apart:.0e} of them. Memory is the peak of the rank that has most, "
        "imports left out; what ranks share is counted once. The ceiling is what torch's matmuls reach "
        "in the same processes; a model's share of it counts the FLOPs of toolkit/metrics/flops_finetune.py. "
        "There is no MFU, which "
        "is of a data sheet's peak: none is known of this processor."
        f" The script says how each is measured. {shapes}."
    )


LEADS = {
    "lora": "A step of LoRA beside PEFT's, on two CPU ranks ([what was measured]({results})):",
    "packing": "Packing beside padding on conversations, on two CPU ranks ([what was measured]({results})):",
}
"""Sentences before the tables that docs/fine_tuning.md has."""


def write_docs(part: str, lines: Sequence[str], page: Path = DOCS / "fine_tuning.md") -> None:
    """Put a table between the marks of its part in a page."""
    text = page.read_text(encoding="utf-8")
    results = f"benchmarks/results/peers_{part}.md"
    before, mark, after = text.partition(f"<!-- {results} -->\n")
    rest = after[after.index("<!-- end -->") :]
    shown = [LEADS[part].format(results=f"../{results}"), "", *lines, ""]
    page.write_text(before + mark + "\n".join(shown) + rest, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each side, 2 or more")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all of the part; 125M for lora")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES_HERE, default=DTYPES_HERE)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files that are written")
    parser.add_argument(
        "--write-docs", action="store_true", help="fill in docs/fine_tuning.md: lora, packing"
    )
    options = parser.parse_args()
    if options.write_docs and options.part not in LEADS:
        parser.error("--write-docs is for lora and packing")
    machine = describe()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.part != "packing" and (lacks := peer_models.missing(options.part in WITH_PEFT)):
        sys.exit(f"{lacks} is missing: pip install -e '.[test]'")
    with_experts = options.part.startswith("experts")
    possible = [shape for shape in SHAPES if (shape in EXPERTS) == with_experts]
    shapes = options.shapes or (["125M"] if options.part == "lora" else possible)
    if any(shape not in possible for shape in shapes):
        parser.error(f"--shapes of {options.part}: {', '.join(possible)}")
    runs: list[Callable[[], Result]] = [
        partial(compare, case, options.steps) for case in cases(options.part, shapes, options.dtypes)
    ]
    if options.part == "packing":
        runs = [partial(pack, dtype, options.steps) for dtype in options.dtypes]
    command = f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}"
    stem = options.results / f"peers_{options.part}"
    results: list[Result] = []
    for run in runs:
        try:
            results.append(run())
        except NotComparable as error:
            sys.exit(str(error))
        print("\n".join(table(options.part, results)), flush=True)
        # What is measured so far, should the rest not end.
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report(options.part, results, command, machine))
    if options.part != "packing":
        rates = {name(Case(**result["case"])): relative(result) for result in results}
        peer_split.draw(rates, stem.with_suffix(".png"), PARTS[options.part])
    if options.write_docs:
        write_docs(options.part, table(options.part, results))


if __name__ == "__main__":
    main()
