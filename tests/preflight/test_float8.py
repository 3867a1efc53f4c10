"""float8 is refused where torchao is missing, and told of at start-up."""

from __future__ import annotations

import pytest

from tests.preflight.bad_runs import CPU, H100, configure
from toolkit.preflight import check, notes
from toolkit.preflight.rules import float8

EMULATED = ["--model.converters=float8", "--quantize.linear.float8.emulate"]


def test_torchao_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(EMULATED)
    assert check(config, world_size=1, hardware=CPU) == []
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    [problem] = check(config, world_size=1, hardware=CPU)
    assert "torchao is not installed" in problem.rule
    assert "pip install -c constraints.txt -e '.[float8]'" in problem.fix


def test_the_layers_are_counted() -> None:
    flags = [*EMULATED, "--quantize.linear.float8.filter_fqns=output,attention.wk"]
    said = "\n".join(notes(configure(flags), world_size=1, hardware=CPU))
    assert "36 of the blocks' 42 linear layers compute in float8, emulated" in said
    assert "training.local_batch_size" in said
    exact = [*EMULATED, "--quantize.linear.float8.recipe_name=rowwise_with_gw_hp"]
    assert "local_batch_size" not in "\n".join(notes(configure(exact), world_size=1, hardware=CPU))


def test_what_is_not_gathered_in_float8_is_named() -> None:
    flags = ["--model.converters=float8", "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
    assert "not in float8" not in "\n".join(notes(configure(flags), world_size=2, hardware=H100))
    said = "\n".join(notes(configure(flags), world_size=12, hardware=H100))
    assert "layers.0.attention.wq, layers.0.attention.wk and 28 more are gathered in bfloat16" in said
