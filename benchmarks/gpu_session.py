"""Run what a GPU that is at hand for minutes should tell, the most valuable pieces first.

    python benchmarks/gpu_session.py run [--seconds 540] [--out FOLDER] [--only NAME …] [--again] [--list]
    python benchmarks/gpu_session.py run --small --device cpu        (a rehearsal: its numbers mean nothing)

The pieces of one group run at the same time, all others alone. Each is a process with a limit in seconds,
and keeps what it printed until then where the limit stops it. A gate that fails ends the run: nothing can be
measured without it. ``run`` records what is done in outputs/gpu_session, so that the same command resumes
there; ``--again`` forgets it. A report with the command, the machine, all rows and the ends of failed logs
goes to benchmarks/results/<gpu>, or to --out. The exit code is 0 if all pieces ran.

Forecasts of memory and time are made on the machine's processors while correctness is tested. The aim is 5%
for memory and 20% for time; the report says how far each is off. Only the standard library is imported
here: a piece that needs packages which are not there fails alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "outputs" / "gpu_session"
PRINTED = 9500
"""Characters of the report that are printed at the end."""
MEMORY_AIM, TIME_AIM = 0.05, 0.20

# The plan


def flags(text: str) -> list[str]:
    return text.split()


COMMON = flags(
    "--training.dataset embedded --metrics.enable_tensorboard false --metrics.log_freq 1 "
    "--lr_scheduler.warmup_steps 2"
)
NO_ASSETS = flags(
    "--model.hf_assets_path embedded --training.dataset_path None --checkpoint.enable false "
    "--checkpoint.initial_load_in_hf false --checkpoint.last_save_in_hf false"
)
EAGER = flags("--compile.enable false")
PROFILED = flags("--training.steps 14 --profiling.enable_profiling --profiling.profile_freq 14")
PLAIN = flags("--training.steps 12")
LENGTH_4096 = flags("--training.seq_len 4096 --training.local_batch_size 1 --training.global_batch_size 1")
SIZE_1B = flags(
    "--model.name llama3.2 --model.flavor 1B --training.seq_len 4096 --training.local_batch_size 2 "
    "--training.global_batch_size 8"
)
SMALL = flags(
    "--model.dim 256 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 "
    "--model.vocab_size 4352 --training.seq_len 32 --training.steps 2 --training.local_batch_size 1 "
    "--training.global_batch_size 1 --compile.backend aot_eager --quantize.linear.float8.emulate"
)
DENSE = flags("--model.ffn_dim 256")
# A model whose update takes as long as the backward of its blocks: if gradients are overwritten while the
# update on FSDP's stream still reads them, losses differ from those of the run on one stream at a time. All
# kernels are deterministic, so that nothing else makes them differ.
RACE = flags(
    "--model.name llama3.1 --model.flavor 8B --model.n_layers 4 --model.vocab_size 8192 "
    "--data.document_mask false --optimizer.name AdamW8bit --optimizer.early_step_in_backward "
    "--training.max_norm inf --training.seq_len 512 --training.local_batch_size 1 --debug.deterministic "
    "--training.global_batch_size 1 --training.steps 8 --activation_checkpoint.mode none "
    "--parallelism.fsdp_skip_on_one_rank false"
)
GPU_TESTS = ["tests/integration/test_gpu.py", *(f"tests/{it}.py" for it in (
    "optim/test_grad_clip", "optim/test_muon", "metrics/test_logger"))]  # fmt: skip


def preset(name: str) -> list[str]:
    return ["--job.config_file", f"train_configs/{name}.toml", *NO_ASSETS]


def tests() -> list[str]:
    """The tests that want a GPU, with what pytest has here: a machine may lack its plugins. Each is named as
    it ends, so that a limit hides none that failed."""
    command = flags("-m pytest -v --tb short -p no:cacheprovider -p no:benchmark -m gpu")
    workers = min(12, os.cpu_count() or 1)  # each imports torch
    command += flags(f"-n {workers} --dist worksteal") if find_spec("xdist") else []
    command += flags("--timeout 100") if find_spec("pytest_timeout") else flags("-o timeout=0")
    return [*command, *GPU_TESTS]


def piece_of(name: str) -> list[str]:
    return ["-m", "benchmarks.gpu_pieces", name]


@dataclass(frozen=True)
class Piece:
    """A process of the session.

    Attributes:
        limit, expected: seconds, at most and as estimated for an H100.
        command: the arguments of Python, or with ``train`` those of a training run whose steps are timed.
        group: pieces that follow one another and have the same group run at the same time.
        gate: nothing after it can be measured without it.
        least_gib: memory of a GPU without which it is left out.
    """

    name: str
    limit: int
    expected: int
    command: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    group: str = ""
    gate: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    least_gib: float = 0.0


DEFAULT_RUN = flags(
    "-m toolkit.train --job.config_file train_configs/debug_model.toml --training.steps 40 "
    "--validation.freq 40 --checkpoint.interval 20"
)
ONE_GPU, LORA = preset("llama3_8b_one_gpu"), preset("llama3_8b_lora_one_gpu")
# Both moments in bfloat16, a step of one row, and each parameter updated in backward: no gradients are kept.
EARLY_STEP = ONE_GPU + flags(
    "--optimizer.name AdamW --optimizer.early_step_in_backward --training.global_batch_size 1 "
    "--training.max_norm inf --activation_checkpoint.selective_ac_option op"
)
# Blocks of Qwen3 30B-A3B, as many as fit with weights and moments.
MOE_30B = ONE_GPU + flags(
    "--model.name qwen3_moe --model.flavor 30B-A3B --model.n_layers 8 --training.global_batch_size 1 "
    "--moe.aux_loss_coeff 1e-3"
)
MOE_RUN = [*DEFAULT_RUN, "--job.config_file", "train_configs/debug_moe.toml"]
PIECES = [
    # 1. Whether anything works, and what the ceilings are.
    Piece("probe", 60, 10, piece_of("probe"), gate=True),
    # 2. Correctness, at the same time: nothing here is timed.
    Piece("default_run", 120, 65, DEFAULT_RUN, group="A", gate=True),
    Piece("exact", 140, 75, piece_of("exact"), group="A"),
    Piece("moe_run", 120, 70, MOE_RUN, group="A"),
    Piece("tests", 200, 145, tests(), group="A"),
    Piece("race_streams", 100, 60, train=RACE, group="A"),
    Piece("race_blocking", 100, 60, train=RACE, group="A", environment={"CUDA_LAUNCH_BLOCKING": "1"}),
    # 3. Speed, one at a time. A step of one_gpu is 8 micro-batches, of lora 16.
    Piece("8b_compiled", 150, 80, train=ONE_GPU + flags("--training.steps 5")),
    Piece("8b_lora", 110, 65, train=LORA + flags("--training.steps 3")),
    Piece("8b_early_step", 100, 60, train=EARLY_STEP + PROFILED),
    Piece("micro", 60, 30, piece_of("micro")),
    Piece("1b_default", 80, 40, train=SIZE_1B + PROFILED),
    Piece("8b_qlora", 80, 50, train=LORA + EAGER + LENGTH_4096 + PROFILED
          + flags("--finetune.lora.quantize_base nf4")),
    Piece("attention", 60, 30, piece_of("attention")),
    # 4. For a second command, or the time that is left.
    Piece("experts", 60, 35, piece_of("experts")),
    Piece("moe_30b", 110, 70, train=MOE_30B + PROFILED),
    Piece("8b_float8", 130, 80, train=ONE_GPU + flags("--training.steps 4 --model.converters float8")),
    Piece("8b_eager", 100, 65, train=ONE_GPU + EAGER + flags("--training.steps 4")),
    Piece("generate", 80, 45, piece_of("generate")),
    Piece("8b_h200", 150, 110, train=preset("llama3_8b_one_h200") + PLAIN, least_gib=130),
    Piece("1b_compiled", 100, 60, train=SIZE_1B + PLAIN + flags("--compile.enable")),
]  # fmt: skip
FIRST = [it.name for it in PIECES[: PIECES.index(next(p for p in PIECES if p.name == "8b_qlora"))]]
"""Pieces of the first command, of 480 s; docs/gpu.md."""
SECOND = ["experts", "moe_30b", "8b_qlora", "attention"]
"""Pieces of the second command, of 195 s."""


def groups(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces that run at the same time, one group after the other."""
    for at, found in groupby(enumerate(pieces), lambda it: it[1].group or it[0]):
        del at
        yield [piece for _, piece in found]


def expected_seconds(names: list[str]) -> int:
    """Seconds that the pieces are expected to take: of a group, the longest."""
    chosen = [it for it in PIECES if it.name in names]
    return sum(max(it.expected for it in group) for group in groups(chosen))


# The session


class Session:
    """Runs the pieces that are asked for and not done, and reports."""

    def __init__(self, options: argparse.Namespace):
        self.small, self.only = options.small, options.only
        self.end = time.monotonic() + options.seconds
        self.gpu, self.gib = ("", 0.0) if options.device == "cpu" else find_gpu()
        folder = ROOT / "benchmarks" / "results" / slug(self.gpu) if self.gpu else STATE / "report"
        self.out = Path(options.out) if options.out else folder
        for path in (self.out, STATE):
            path.mkdir(parents=True, exist_ok=True)
        self.state_file = STATE / ("small.json" if self.small else "state.json")
        known = self.state_file.exists() and not options.again
        self.state: dict[str, Any] = json.loads(self.state_file.read_text()) if known else {}
        self.threads = ThreadPoolExecutor(4)
        self.forecasts: dict[str, Future[dict[str, float]]] = {}
        self.kernels: list[Future[None]] = []

    def run(self) -> int:
        pieces = [it for it in PIECES if not self.only or it.name in self.only]
        pieces = [it for it in pieces if self.state.get(it.name, {}).get("how") != "ran"]
        for group in groups(pieces):
            if group[0].group and not self.small:
                self.forecast(pieces)
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(self.one, group))
            if failed := [it.name for it in group if it.gate and self.state[it.name]["how"] != "ran"]:
                print(f"STOPPED: nothing can be measured without {', '.join(failed)}", flush=True)
                break
        for job in self.kernels:
            job.result()
        self.race()
        return self.report()

    def forecast(self, pieces: list[Piece]) -> None:
        """Begin the forecasts of all pieces that are timed."""
        pool = ThreadPoolExecutor(6)
        for piece in pieces:
            if piece.train and not piece.group:
                self.forecasts[piece.name] = pool.submit(forecast_of, piece)

    def one(self, piece: Piece) -> None:
        limit = piece.limit * (3 if self.small else 1)  # a rehearsal may run on a slow CPU
        limit = min(limit, self.end - time.monotonic() - 6)
        if limit < 15:
            return self.note(piece, "no time left", 0, "")
        if piece.least_gib > self.gib and not self.small:
            return self.note(piece, "ran", 0, f"left out: needs a GPU of {piece.least_gib:.0f} GiB")
        folder, log = STATE / "runs" / piece.name, self.out / f"{piece.name}.log"
        shutil.rmtree(folder, ignore_errors=True)
        started = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *self.command(piece, folder)], cwd=ROOT, env=self.environment(piece),
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait() or -9
        seconds = time.monotonic() - started
        how = "ran" if code == 0 else "out of time" if seconds >= limit - 1 else f"failed ({code})"
        if piece.name == "tests" and code == 5 and not self.gpu:
            how = "ran"  # pytest's code where all tests are left out, as without a GPU they are
        self.note(piece, how, seconds, self.timed(piece, folder) if piece.train else last_line(log))
        if piece.train and (traces := sorted(folder.rglob("*_trace.json"))):
            self.kernels.append(self.threads.submit(self.kernel_table, piece.name, traces[-1]))

    def command(self, piece: Piece, folder: Path) -> list[str]:
        if not piece.train and "toolkit.train" not in piece.command:
            own = self.small and "benchmarks.gpu_pieces" in piece.command
            return [*piece.command, *(["--small"] if own else [])]
        command = ["-m", "toolkit.train", *COMMON, *piece.train] if piece.train else list(piece.command)
        folders = {"data.cache_folder": STATE / "tokens", "compile.cache_folder": STATE / "compiled"}
        for key, path in {"job.dump_folder": folder, **folders}.items():
            command += [f"--{key}", str(path)]
        if self.small:
            small = SMALL if "qwen3_moe" in piece.train else SMALL + DENSE
            default = flags("--training.steps 2 --validation.freq 2 --model.dim 64")
            command += small if piece.train else default
        return command

    def environment(self, piece: Piece) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        ours = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        return os.environ | ours | ({} if self.gpu else {"CUDA_VISIBLE_DEVICES": ""}) | piece.environment

    def note(self, piece: Piece, how: str, seconds: float, told: str) -> None:
        self.state[piece.name] = {"how": how, "seconds": round(seconds), "told": told}
        self.state_file.write_text(json.dumps(self.state, indent=1))
        print(f"| {piece.name} | {how} | {seconds:.0f} s | {told[:230]} |", flush=True)

    def timed(self, piece: Piece, folder: Path) -> str:
        """Describe the steps of a run, beside its forecast."""
        try:
            lines = [json.loads(it) for it in (folder / "metrics.jsonl").read_text().splitlines()]
        except OSError:
            lines = []
        steps = [it for it in lines if "tokens_per_second" in it]
        if not steps:
            return "no step"
        self.state.setdefault("losses", {})[piece.name] = [it["loss"] for it in steps]
        steady = steps[3:10] or steps[-1:]
        rate = statistics.median(it["tokens_per_second"] for it in steady)
        times = [it["step_seconds"] for it in steady]
        step, memory, mfu = (
            statistics.median(times),
            max(it["memory_gib"] for it in steps),
            steady[-1].get("mfu"),
        )
        told = [f"{rate:,.0f} tokens/s", *([f"MFU {mfu:.1%}"] if mfu else [])]
        told += [f"step {step:.3f} s (spread {max(times) / min(times) - 1:.1%})", f"peak {memory:.1f} GiB"]
        job = self.forecasts.get(piece.name)
        forecast = job.result() if job else {}
        for what, found, unit, aim in (
            ("memory", memory, "GiB", MEMORY_AIM),
            ("seconds", step, "s", TIME_AIM),
        ):
            if expected := forecast.get(what):
                off = found / expected - 1
                told.append(f"forecast {expected:.3g} {unit}: {off:+.1%}{'' if abs(off) <= aim else ' (!)'}")
        if compiling := sum(it.get("compile_seconds", 0) for it in steps):
            told.append(f"compiling {compiling:.0f} s")
        return ", ".join(
            [*told, f"loss {steps[0]['loss']:.3f} → {steps[-1]['loss']:.3f} in {len(steps)} steps"]
        )

    def race(self) -> None:
        losses = self.state.get("losses", {})
        if losses.get("race_streams") and losses.get("race_blocking"):
            pairs = zip(losses["race_streams"], losses["race_blocking"], strict=False)
            worst = max(abs(a / b - 1) for a, b in pairs)
            verdict = "the same" if worst == 0 else "GRADIENTS ARE OVERWRITTEN"
            self.state["race"] = (
                f"Losses with and without overlapping streams differ by {worst:.1e}: {verdict}."
            )
            print(self.state["race"], flush=True)

    def kernel_table(self, name: str, trace: Path) -> None:
        """Write milliseconds of a step by kernel, the longest first."""
        events = json.loads(trace.read_text())["traceEvents"]
        spent: dict[str, tuple[float, int]] = {}
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                name_of = event["name"].replace("void ", "").replace("(anonymous namespace)::", "")
                kernel = re.sub(r"<.*|\(.*", "", name_of)[:70]
                time_of, count = spent.get(kernel, (0.0, 0))
                spent[kernel] = time_of + event["dur"] / 1e3, count + 1
        rows = sorted(spent.items(), key=lambda it: -it[1][0])[:40]
        text = "\n".join(f"{ms:9.2f} ms {count:6} × {kernel}" for kernel, (ms, count) in rows)
        (self.out / f"{name}.kernels.txt").write_text(text + "\n")
        trace.unlink()

    def report(self) -> int:
        """Write report.md, and print its end."""
        where = self.gpu or "a CPU: a rehearsal, whose numbers mean nothing"
        asked = " ".join(["python", "benchmarks/gpu_session.py", *sys.argv[1:]])
        text = [f"# {where}", "", f"`{asked}`", "", "| piece | | seconds | |", "|---|---|---|---|"]
        ends = []
        rows = {name: it for name, it in self.state.items() if isinstance(it, dict) and "how" in it}
        for name, it in rows.items():
            told = it["told"].replace("|", " ")
            text.append(f"| {name} | {it['how']} | {it['seconds']} | {told} |")
            log = self.out / f"{name}.log"
            if it["how"] not in ("ran", "no time left") and log.exists():
                ends += [f"## {name}", "```", log.read_text(errors="replace")[-1400:], "```"]
        for kernels in sorted(self.out.glob("*.kernels.txt")):
            ends += [f"## {kernels.name}", "```", *kernels.read_text().splitlines()[:14], "```"]
        text += ["", self.state.get("race", ""), *ends]
        (self.out / "report.md").write_text("\n".join(text) + "\n")
        print("\n" + "\n".join(text)[-PRINTED:], flush=True)
        return int(any(it["how"] != "ran" for it in rows.values()))


def forecast_of(piece: Piece) -> dict[str, float]:
    """The launch's forecast of a run: GiB at the peak and seconds of a step, as far as there are."""
    folder = STATE / "forecasts" / piece.name
    command = [sys.executable, "-m", "toolkit.planner.fit", "1", *COMMON, *piece.train]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    with suppress(OSError, ValueError):
        program = subprocess.Popen(
            [*command, "--job.dump_folder", str(folder)], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            program.wait(170)
        except subprocess.TimeoutExpired:
            program.kill()
        found = json.loads((folder / "forecast.json").read_text())
        return {"memory": found["peak_gib"], "seconds": found["step_seconds"] or 0.0}
    return {}


def last_line(log: Path) -> str:
    lines = [it.strip() for it in log.read_text(errors="replace").splitlines() if it.strip()]
    errors = [it for it in lines if it.startswith(("error", "E ", "Error")) or "Error:" in it]
    return " … ".join([*errors[-1:], *lines[-1:]])[:230]


def find_gpu() -> tuple[str, float]:
    """The first GPU's name and GiB; none is ("", 0)."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        name, memory = subprocess.check_output(asked, text=True).splitlines()[0].rsplit(",", 1)
        return name.strip(), float(memory) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", 0.0


def slug(gpu: str) -> str:
    """A folder's name for a GPU: h100 of NVIDIA H100 80GB HBM3."""
    words = gpu.lower().removeprefix("nvidia ").split()
    return re.sub(r"[^a-z0-9]+", "_", words[0]) if words else "gpu"


def table() -> str:
    """The pieces with their limits and expected seconds, and the sums of the two commands of docs/gpu.md."""
    rows = [
        f"{it.name:16} limit {it.limit:4} s  expected {it.expected:4} s  {'gate' if it.gate else '':4} "
        f"{it.group:1}  {' '.join(it.command or it.train)[:110]}"
        for it in PIECES
    ]
    first, second = expected_seconds(FIRST), expected_seconds(SECOND)
    rows.append(f"first command ({', '.join(FIRST)}): {first} s expected of 480")
    rows.append(f"second command ({', '.join(SECOND)}): {second} s expected of 195")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run"])
    parser.add_argument("--seconds", type=float, default=540, help="for all pieces together")
    parser.add_argument("--out", help="folder of the report and the logs")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[it.name for it in PIECES])
    parser.add_argument("--again", action="store_true", help="forget what is done")
    parser.add_argument("--list", action="store_true", help="print the pieces and run nothing")
    parser.add_argument("--small", action="store_true", help="each piece for seconds, to see that it runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --small")
    options = parser.parse_args()
    if options.list:
        print(table())
        return 0
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu shows that the pieces run, and needs --small")
    if options.device == "cuda" and not find_gpu()[0]:
        parser.error("nvidia-smi shows no GPU here; --small --device cpu rehearses without one")
    return Session(options).run()


if __name__ == "__main__":
    sys.exit(main())
