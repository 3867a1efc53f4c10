"""Pictures of a run that is not made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.cli import run_command

pytest.importorskip("matplotlib")
SMALL = [
    "train_configs/debug_model.toml",
    "--gpu=h100",
    "--model.hf_assets_path=tests/assets/tokenizer",
    "--model.n_layers=4",
    "--training.seq_len=128",
    "--training.device=auto",
]
PIPELINE = ["--gpus=8", "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]


def test_a_page_has_three_pictures_and_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.html"
    assert run_command("draw-plan", [*SMALL, *PIPELINE, f"--output={output}"]) == 0
    said, page = capsys.readouterr().out, output.read_text()
    assert "pp 2 × dp_shard 4 on 8 h100" in said and said.endswith(f"{output}\n")
    assert page.count("<svg") == 3 and page.count("<h1>") == 1
    assert not re.search(r"(src|href)=\"(?!#)", page) and "<script" not in page
    peak = re.search(r"peak (\d+\.\d) GiB of 80, in (\w+ of [\w.]+)", said)
    assert peak and all(word in page for word in peak.groups())


def test_a_png_without_a_pipeline(tmp_path: Path) -> None:
    from matplotlib import pyplot as plt

    output = tmp_path / "plan.png"
    assert run_command("draw-plan", [*SMALL, "--gpus=1", "-o", str(output)]) == 0
    height, width, _ = plt.imread(output).shape
    assert width >= 1000 and height >= 700


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus=8", "--parallelism.tensor_parallel_degree=3", "-o", "x.png"], "tensor_parallel_degree"),
        (["--gpus=1", "-o", "no/such/folder/x.png"], "no/such/folder/x.png"),
        (["--gpus=0", "-o", "x.png"], "whole number from 1"),
        (["--gpus=8", "--gpu=h10", "-o", "x.png"], "did you mean"),
    ],
)
def test_mistakes(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run_command("draw-plan", [*SMALL, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    said = capsys.readouterr()
    assert says in said.out + said.err and "Traceback" not in said.err
