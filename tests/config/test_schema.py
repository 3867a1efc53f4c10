"""The schema against torchtitan's option list, and what is generated from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from toolkit.config import Config
from toolkit.config.help import help_text
from toolkit.config.schema import Field, fields, fields_by_key
from tools import config_schema
from tools.config_schema import json_schema

ROOT = Path(__file__).parents[2]

# Where our default differs from torchtitan's on purpose; docs/configuration.md says why.
OUR_DEFAULTS = {
    "model.name": None,
    "model.flavor": None,
    "metrics.enable_tensorboard": True,
    "checkpoint.last_save_model_only": False,
    "training.mixed_precision_param": "auto",
}


# benchmarks/results/h100/report.md
RAN_ON_A_GPU = {
    "parallelism.fsdp_skip_on_one_rank",
    "activation_checkpoint.offload_prefetch",
    "training.fused_parts",
}


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.key)
def test_every_key_is_described(field: Field) -> None:
    assert field.description.endswith("."), "a sentence under the field"
    assert f"--{field.key} " in help_text(field.table)


def test_defaults_that_torchtitan_does_not_share_are_as_documented() -> None:
    for key, default in OUR_DEFAULTS.items():
        assert fields_by_key()[key].default == default
        assert f"`{key}`" in (ROOT / "docs" / "configuration.md").read_text()


def test_the_readme_says_which_options_have_never_run_on_a_gpu() -> None:
    readme = (ROOT / "README.md").read_text()
    untried = readme.partition("## What no GPU has run yet\n")[2].partition("\n## ")[0]
    of_a_gpu = {field.key for field in fields() if re.search("CUDA|GPU", field.description)}
    of_a_gpu -= {"comm.mode", "training.device"}  # how to do without
    of_a_gpu -= RAN_ON_A_GPU
    assert "checkpoint.async_mode" in of_a_gpu
    assert {key for key in of_a_gpu if f"{key.rpartition('.')[2]}`" not in untried} == set()


def test_committed_json_schema_is_up_to_date() -> None:
    committed = json.loads((ROOT / "train_configs" / "schema.json").read_text())
    assert committed == json_schema(), "run python -m tools.config_schema"


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--output", 2)])
def test_the_json_schema_is_not_written_beside_words(
    word: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_schema, "SCHEMA", tmp_path / "schema.json")
    with pytest.raises(SystemExit) as ended:
        config_schema.main([word])
    assert ended.value.code == code and not config_schema.SCHEMA.exists()


def test_a_boolean_is_no_number_and_an_integer_is_a_float() -> None:
    assert Config.model_validate({"optimizer": {"lr": 1}}).optimizer.lr == 1.0
    for table, key in (("training", "steps"), ("optimizer", "lr")):
        with pytest.raises(ValidationError):
            Config.model_validate({table: {key: True}})


def test_configs_are_values() -> None:
    config = Config()
    assert config == Config() != Config.model_validate({"training": {"steps": 7}})
    with pytest.raises(ValidationError):
        config.training.steps = 3  # type: ignore[misc]


def test_the_order_of_parts_of_a_mixture_is_no_value() -> None:
    parts = {"a": {"weight": 1}, "b": {"weight": 2}}
    turned = dict(reversed(parts.items()))
    assert Config.model_validate({"data": {"mixture": parts}}) == Config.model_validate(
        {"data": {"mixture": turned}}
    )


def test_editors_know_the_keys_of_a_part() -> None:
    mixture = json_schema()["$defs"]["Data"]["properties"]["mixture"]
    assert mixture["patternProperties"] == {"^[A-Za-z0-9_-]+$": {"$ref": "#/$defs/MixtureCorpus"}}
    assert mixture["additionalProperties"] is False
