"""The package of docs/extending.md, as it stands there: what it registers, in runs and in messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = dict(
    (name, text) for text, name in re.findall(r"^```python\n(# (my_package/\S+)\n.*?)^```", PAGE, re.M | re.S)
)
LIMITS = {"lion": 40, "z_loss": 20, "arithmetic": 20, "gemma*": 150}
MODULE = "--job.custom_import=my_package"


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_examples_are_short(name: str, limit: int) -> None:
    chosen = [text for file, text in BLOCKS.items() if Path(file).match(f"{name}.py")]
    assert chosen and sum(text.count("\n") for text in chosen) <= limit


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository that holds the package."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in BLOCKS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def python(package: Path, *words: str, code: int = 0, **environ: str) -> str:
    """Run ``python -m``, or ``-c``, in a folder that is not the repository's, and return what it prints."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{package}", "OMP_NUM_THREADS": "1"} | environ
    command = [sys.executable, *([] if words[0] == "-c" else ["-m"]), *words]
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


CONFIG = f"""
[job]
custom_import = "my_package"
[model]
name = "gemma"
flavor = "debugmodel"
hf_assets_path = "{ROOT}/tests/assets/tokenizer"
vocab_size = 4352
converters = ["clipped", "prefetch"]
[model.clipped]
limit = 0.05
[optimizer]
name = "Lion"
lr = 1e-3
[optimizer.lion]
beta2 = 0.98
[loss]
name = "z_cross_entropy"
[lr_scheduler]
decay_type = "inverse_sqrt"
warmup_steps = 0
[training]
dataset = "sums"
seq_len = 64
local_batch_size = 2
global_batch_size = 8
dtype = "float64"
mixed_precision_param = "float64"
mixed_precision_reduce = "float64"
steps = 6
device = "cpu"
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 3
[data]
cache_folder = "cache"
"""


def train(package: Path, name: str, ranks: int, *flags: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step that a run has logged."""
    (package / "run.toml").write_text(CONFIG)
    words = ["toolkit.launch", "--job.config_file=run.toml", f"--job.dump_folder={name}", *flags]
    python(package, *words, NGPU=str(ranks))
    lines = map(json.loads, (package / name / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


@pytest.fixture(scope="module")
def runs(package: Path) -> dict[str, list[tuple[float, float]]]:
    alone = train(package, "alone", 1)
    train(package, "moved", 2, "--training.steps=3")
    flags = ["--parallelism.tensor_parallel_degree=2", "--parallelism.fsdp_reshard_after_forward=never"]
    return {"alone": alone, "moved": train(package, "moved", 2, *flags)}


def test_a_run_goes_on_on_another_mesh_as_one_process_would_have_gone(runs: dict) -> None:
    assert len(runs["alone"]) == len(runs["moved"]) == 6
    # fp64 rounding; Lion's signs are those of sums of other orders, of which none is near 0 here.
    for ours, other in zip(runs["alone"], runs["moved"], strict=True):
        assert other == pytest.approx(ours, rel=1e-9)
    assert runs["alone"][-1][0] < runs["alone"][0][0] - 0.5


def test_weights_stay_within_the_bound_and_rates_follow_the_schedule(package: Path, runs: dict) -> None:
    from toolkit.weights.safetensors import SafetensorsFolder

    convert(package)
    with pytest.raises(Exception, match=r"model_type = 'gemma'.*custom_import"):
        SafetensorsFolder(package / "hf")  # this process has not imported the module
    from safetensors.torch import load_file

    tensors = load_file(package / "hf" / "model.safetensors")
    blocks = [tensor for name, tensor in tensors.items() if ".layers." in name]
    assert max(tensor.abs().max() for tensor in blocks) == pytest.approx(0.05)
    lines = map(json.loads, (package / "alone" / "metrics.jsonl").read_text().splitlines())
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([1e-3 * step**-0.5 for step in range(1, 7)])


def convert(package: Path) -> None:
    if not (package / "hf").exists():
        words = ["--custom-import=my_package", "dcp-to-hf", "moved/checkpoint/step-6", "hf"]
        python(package, "toolkit", "convert", *words)


NORM = """
import torch
from my_package.gemma_decoder import GemmaDecoder, Norm
from my_package.gemma import SIZES
from my_package.prefetch import Prefetch

norm = Norm(256).bfloat16()
x = torch.randn(8, 256).bfloat16()
with torch.no_grad():
    norm.weight.fill_(0.003)
    exact = torch.nn.functional.rms_norm(x.double(), (256,)) * (1 + norm.weight.double())
    assert norm(x).dtype == torch.bfloat16
    # The result rounds by 2^-9 at most; a weight of 1.003 that rounds to 1 before would add 0.003.
    print(((norm(x).double() - exact) / exact).abs().max() <= 2**-8)
with torch.device("meta"):
    Prefetch(None).connect([GemmaDecoder(SIZES["debugmodel"])], None)
"""


def test_norms_keep_weights_in_16_bits_and_blocks_that_are_no_units_are_left(package: Path) -> None:
    assert python(package, "-c", NORM) == "tensor(True)\n"


LOGITS = """
import torch
import my_package
from toolkit.generation.load import load_model
tokens = torch.arange(3, 63)[None] * 5
loaded = load_model("hf", device=torch.device("cpu"), dtype=torch.float32)
with torch.no_grad():
    logits = loaded.model(tokens)
text = loaded.generator().generate([tokens[0].tolist()], max_new_tokens=30)[0]
torch.save((tokens, logits, text), "logits.pt")
"""


def test_transformers_reads_what_it_has_learnt(package: Path, runs: dict) -> None:
    from transformers import AutoModelForCausalLM

    convert(package)
    theirs = AutoModelForCausalLM.from_pretrained(package / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == "GemmaForCausalLM"
    python(package, "-c", LOGITS)
    tokens, logits, text = torch.load(package / "logits.pt")
    with torch.no_grad():
        expected = theirs(tokens).logits
        out = theirs.generate(tokens, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert out[0, tokens.shape[1] :].tolist() == text
    words = ["toolkit", "generate", "moved", "--custom-import=my_package", "--prompt=12 + 30 =", "--json"]
    assert '"prompt": "12 + 30 ="' in python(package, *words)


MESSAGES = {
    "--optimizer.name=Lyon": "did you mean --optimizer.name Lion?",
    "--optimizer.name=Lion --optimizer.lion.beta3=1": "did you mean optimizer.lion.beta2?",
    "--optimizer.name=Lion --optimizer.lion.beta2=x": "rule: must be a number",
    "--optimizer.lion.beta2=0.9": 'set optimizer.name = "Lion", or beta2 = 0.99, the default',
    "--model.clipped.limit=0.5": 'add "clipped" to model.converters, or limit = 1.0, the default',
    "--model.converters=cliped": "did you mean --model.converters clipped?",
    "--training.dataset=sums --training.dataset_split=test": "training.dataset_split",
    "--model.name=gemna": "did you mean gemma?",
    "--budget.tokens=9": "tokens are more than budget.tokens",
    "--budget.token=9": "did you mean budget.tokens?",
}


def preflight(package: Path, *flags: str, code: int = 2) -> str:
    assets = f"--model.hf_assets_path={ROOT}/tests/assets/tokenizer"
    return python(package, "toolkit.preflight", "--training.device=cpu", assets, *flags, code=code)


@pytest.mark.parametrize(("flags", "said"), MESSAGES.items())
def test_messages(flags: str, said: str, package: Path) -> None:
    assert said in preflight(package, MODULE, *flags.split())


def test_a_schedule_without_a_rate(tmp_path: Path) -> None:
    (tmp_path / "falling.py").write_text(
        "from toolkit.extensions import register_lr_schedule\n"
        "register_lr_schedule('falling', lambda step, total_steps: 5 - step)\n"
    )
    words = [
        "--job.custom_import=falling",
        "--lr_scheduler.decay_type=falling",
        "--training.dataset=embedded",
    ]
    for length in ("--training.steps=9", "--training.steps=1_000_000"):
        told = preflight(tmp_path, *words, length)
        assert "lr_scheduler.decay_type = 'falling'" in told and "of the peak" in told
    preflight(tmp_path, *words, "--training.epochs=9", "--model.vocab_size=4352", code=0)


def test_a_dataset_that_does_not_exist(package: Path) -> None:
    assert "did you mean sums?" in preflight(package, MODULE, "--training.dataset=summs", code=3)


def test_help_and_origins(package: Path) -> None:
    shown = preflight(package, MODULE, "--help", "optimizer", code=0)
    assert "--optimizer.name AdamW|Adam|AdamW8bit" in shown and "|Lion" in shown
    assert "--optimizer.lion.beta2 float  (default 0.99)" in shown and "Decay of the momentum" in shown
    (package / "some.toml").write_text(
        "[job]\ncustom_import = 'my_package'\n[budget]\ntokens = 10_000_000_000\n"
    )
    shown = preflight(package, "--job.config_file=some.toml", "--job.print_config", code=0)
    assert "tokens = 10000000000  # some.toml:4" in shown


ALL = "from toolkit.extensions import *"
WRONG = {
    f"{ALL}\nregister_optimizer('AdamW', None)": (
        "wrong.py:2: ValueError: optimizer.name has a value AdamW already"
    ),
    f"{ALL}\nfor _ in range(2):\n  register_dataset('x', list, version='1')": (
        "wrong.py:3: ValueError: x is registered twice"
    ),
    f"{ALL}\nregister_table('training', Table)": (
        "wrong.py:2: ValueError: the configuration has training already"
    ),
    f"{ALL}\nregister_family('llama', None)": ("wrong.py:2: ValueError: the toolkit has a family llama"),
    f"{ALL}\nregister_optimizer('My Opt', print)": "wrong.py:2: ValueError: 'My Opt' is not a name of",
    f"{ALL}\nregister_loss('x', None)": "wrong.py:2: ValueError: register a function, not",
    f"{ALL}\nregister_loss('x-y', print, Table)": "wrong.py:2: ValueError: 'x-y' is not a name of letters",
    f"{ALL}\nclass A: a = 1\nregister_table('a', A)": "wrong.py:3: ValueError: keys are a class of toolkit",
    f"{ALL}\nclass A(Table):\n  a: int\nregister_table('a', A)": "wrong.py:4: ValueError: A.a has no default",
    f"{ALL}\nclass A(Table):\n  a: int = 'x'\nregister_table('a', A)": (
        "wrong.py:4: ValueError: A.a its default: Input should be a valid integer"
    ),
    f"{ALL}\nclass A(Table):\n  a: list[tuple[int]] = []\nregister_table('a', A)": (
        "wrong.py:4: ValueError: A.a: a key is a bool, int, float, str, Literal, a list of these"
    ),
    f"{ALL}\nregister_table('value', Table)": "wrong.py:2: ValueError: value is a method of tables",
    f"{ALL}\nregister_table('data.mixture', Table)": "ValueError: the configuration has data.mixture already",
    f"{ALL}\nregister_table('experimental', Table)": "ValueError: the configuration has experimental already",
    f"{ALL}\nregister_table('a.b', Table)": "wrong.py:2: ValueError: there is no table a for b",
    f"{ALL}\nregister_dataset('c4', list, version='')": "ValueError: the toolkit has a dataset c4",
    f"{ALL}\nregister_dataset('x', list, version=1)": "wrong.py:2: ValueError: the version of x is a text",
    f"{ALL}\nregister_family('x', 5)": "wrong.py:2: ValueError: a family is a ModelSpec, not a int",
    f"{ALL}\nfrom toolkit.models.common.spec import ModelSpec\nregister_family('x', ModelSpec({{}}))": (
        "wrong.py:3: TypeError: Can't instantiate abstract class ModelSpec"
    ),
    f"{ALL}\nfrom toolkit.models.llama import SPEC\nregister_family('x', SPEC)": (
        "wrong.py:3: ValueError: model.name has a value llama2 already"
    ),
    f"{ALL}\nfrom toolkit.models.llama import SPEC\n"
    "register_family('x', type(SPEC)({'y': SPEC.sizes['llama2']}))": (
        "wrong.py:3: ValueError: ModelArgs of the family x have family = 'llama'"
    ),
    f"{ALL}\nfrom dataclasses import replace\nfrom toolkit.models.mixtral import SPEC\n"
    "size = replace(SPEC.sizes['mixtral']['debugmodel'], family='x')\n"
    "size = replace(size, moe=replace(size.moe, top_k=9))\n"
    "register_family('x', type(SPEC)({'y': {'small': size}}))": (
        "wrong.py:6: ValueError: y small: MoEArgs.top_k = 9 must be at most num_experts, which is 8"
    ),
    "import sys\nsys.exit(0)": "wrong.py:2: SystemExit: 0",
    "import lacking": "wrong.py:1: ModuleNotFoundError: No module named 'lacking'",
    "def f():\n  return 1 / 0\nf()": "wrong.py:2: ZeroDivisionError: division by zero",
    "x = (": "wrong.py:1: SyntaxError: '(' was never closed",
}


@pytest.mark.parametrize(("text", "said"), WRONG.items())
def test_an_error_names_file_and_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(text)
    told = preflight(tmp_path, "--job.custom_import=wrong")
    assert said in told and "Traceback" not in told


MISNAMED = {
    "./wrong": "is not a module name",
    "wrong.py": "is not a module name",
    "types": "is a module of Python's standard library",
    "folder": "folder has no __init__.py",
}


@pytest.mark.parametrize(("name", "said"), MISNAMED.items())
def test_a_name_of_no_module(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert said in preflight(tmp_path, f"--job.custom_import={name}")


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    assert "add the folder that contains it to PYTHONPATH" in preflight(tmp_path, MODULE)
    told = python(tmp_path, "toolkit", "convert", "--custom-import=my_package", "dcp-to-hf", "a", "b", code=2)
    assert "there is no module my_package" in told


def test_a_dataset_that_fails_names_its_document(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "from toolkit.extensions import register_dataset\n"
        "def rows():\n  yield 'one'\n  yield 1 / 0\n"
        "register_dataset('failing', rows, version='1')\n"
        "register_dataset('numbers', lambda: [1], version='1')\n"
    )
    for name, said in {
        "failing": "rows.py:4: ZeroDivisionError: division by zero",
        "numbers": "document 1 is of type int, not a text or a row by columns",
    }.items():
        words = ["--job.custom_import=rows", f"--training.dataset={name}", "--data.cache_folder=cache"]
        assets = f"--model.hf_assets_path={ROOT}/tests/assets/tokenizer"
        told = python(tmp_path, "toolkit.launch", "--training.device=cpu", assets, *words, code=3, NGPU="1")
        assert said in told and "Traceback" not in told
