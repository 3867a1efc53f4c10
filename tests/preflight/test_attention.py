"""Which attention a run takes, and what its notes say of it."""

from __future__ import annotations

import pytest

from tests.preflight.bad_attention import H100
from tests.preflight.bad_runs import CPU, configure
from toolkit.hardware import lacks_c_compiler
from toolkit.models.common.attention_choice import choose_attention
from toolkit.preflight import check, notes


@pytest.mark.parametrize(
    ("flavor", "documents", "cpu", "cuda"),
    [
        ("8B", False, "blockwise", "sdpa"),
        ("8B", True, "blockwise", "flex"),
        ("8B_flex", False, "blockwise", "flex"),
        ("debugmodel_flex_attn", True, "blockwise", "flex"),
        ("8B_varlen", True, "blockwise", "varlen"),
        ("debugmodel_varlen_attn", False, "blockwise", "varlen"),
    ],
)
def test_auto_takes_what_the_flavor_names_and_the_device_can_train(
    flavor: str, documents: bool, cpu: str, cuda: str
) -> None:
    assert choose_attention("auto", flavor, device="cpu", documents=documents) == cpu
    assert choose_attention("auto", flavor, device="cuda", documents=documents) == cuda
    for asked in ("sdpa", "flex", "varlen", "flash"):
        assert choose_attention(asked, flavor, device="cuda", documents=documents) == asked


@pytest.mark.parametrize(
    ("flags", "hardware", "note"),
    [
        (
            ["--model.flavor=debugmodel_flex_attn"],
            CPU,
            "this run uses blockwise: FlexAttention has no backward",
        ),
        (
            ["--model.flavor=debugmodel_varlen_attn"],
            CPU,
            "this run uses blockwise: varlen needs the flash kernel",
        ),
        (
            ["--model.flavor=debugmodel_flex_attn", "--model.attention=varlen"],
            H100,
            "this run uses varlen: model.attention overrides it",
        ),
        (["--model.attention=sdpa"], H100, "dense mask of seq_len² bytes per sample for the documents, and"),
        (
            ["--model.attention=sdpa", "--model.name=mistral0.1", "--data.no-document_mask"],
            H100,
            "dense mask of seq_len² bytes per sample for the model's window, and",
        ),
    ],
)
def test_note(flags, hardware, note) -> None:
    config = configure(flags)
    said = notes(config, world_size=1, hardware=hardware)
    assert len([line for line in said if note in line]) == 1
    assert check(config, world_size=1, hardware=hardware) == []


@pytest.mark.parametrize("flags", [[], ["--model.attention=sdpa", "--data.document_mask=false"]])
def test_a_clean_run_on_a_gpu_has_no_notes(flags) -> None:
    assert notes(configure(flags), world_size=1, hardware=H100) == []


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([], "model.attention"),  # flex, for the documents
        (["--model.attention=sdpa", "--compile.enable"], "compile.enable"),
        (["--model.attention=sdpa"], "training.fused_parts"),
        (["--model.attention=sdpa", "--training.fused_parts="], ""),
        (
            [
                "--model.attention=varlen",
                "--compile.enable",
                "--compile.backend=eager",
                "--training.fused_parts=",
            ],
            "",
        ),
    ],
)
def test_kernels_of_triton_need_a_compiler(flags, key, monkeypatch) -> None:
    config = configure(flags)
    assert check(config, world_size=1, hardware=H100) == []
    monkeypatch.setenv("CC", "no-such-compiler")
    found = check(config, world_size=1, hardware=H100)
    assert [problem.key for problem in found] == ([key] if key else [])
    assert all("no no-such-compiler here" in it.rule and "install gcc" in it.fix for it in found)


def test_without_cc_triton_takes_gcc_or_clang(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no gcc or clang here" in str(lacks_c_compiler())
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert lacks_c_compiler() is None
