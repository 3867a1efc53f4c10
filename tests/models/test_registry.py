"""Which model a configuration means, and that its weights are looked at before a run."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.preflight.bad_runs import CPU, TOKENIZER, save
from tests.preflight.bad_weights import SHAPE, write_config, write_model
from toolkit.config import Config, load_config
from toolkit.models.common.args import RopeScaling
from toolkit.models.from_config import config_folder, model_args, weights_folder
from toolkit.models.llama.args import PRESETS
from toolkit.models.parameters import parameter_shapes, table
from toolkit.preflight import check, notes, summary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(*flags: str) -> Config:
    short = ["--training.seq_len=256", "--data.cache_folder=cache", f"--model.tokenizer_path={TOKENIZER}"]
    return load_config([*short, *(f"--{flag}" for flag in flags)])


@pytest.mark.parametrize("inside", ["checkpoint", "a/b", "/absolute"])
def test_a_checkpoint_stands_for_the_hugging_face_folder_that_its_run_wrote(
    inside: str, folder: Path
) -> None:
    """torchtitan's second command names the step-N folder in which its first wrote the safetensors."""
    inside = inside.replace("/absolute", str(folder / "elsewhere"))
    first = load_config(["--job.dump_folder=first", f"--checkpoint.folder={inside}"])
    step = folder / "first" / inside / "step-10"
    step.parent.mkdir(parents=True)
    save(folder, 10, config=first.to_toml(origins=False)).rename(step)
    flags = [f"checkpoint.initial_load_path={step.relative_to(folder)}/", "checkpoint.initial_load_in_hf"]
    second = configure("checkpoint.enable", "job.dump_folder=second", *flags)
    said = "\n".join(map(str, check(second, world_size=1, hardware=CPU)))
    assert "contains a checkpoint of this toolkit, not a Hugging Face model" in said
    (folder / "first" / "hf").mkdir(parents=True)
    written = write_model(folder / "first" / "hf", "step-10")
    assert weights_folder(second) == config_folder(second) == written.relative_to(folder)
    assert check(second, world_size=1, hardware=CPU) == []
    [note] = [said for said in notes(second, world_size=1, hardware=CPU) if "initial_load_path" in said]
    assert note.endswith("folder first/hf/step-10, which its run exported at that step, is loaded")
    assert model_args(second, tokenizer_vocab=4096) == SHAPE


def test_a_folder_alone_says_what_the_model_is(folder: Path) -> None:
    write_model(folder)
    config = configure("model.hf_assets_path=m")
    assert model_args(config, tokenizer_vocab=4096) == SHAPE
    assert check(config, world_size=1, hardware=CPU) == []
    assert "model  m/config.json, " in summary(config, world_size=1, hardware=CPU)


def test_keys_change_what_config_json_says_and_the_rest_stays(folder: Path) -> None:
    write_model(folder)
    config = configure(
        "model.hf_assets_path=m", "model.dim=64", "model.rope_scaling_factor=8", "model.tie_embeddings=true"
    )
    args = model_args(config, tokenizer_vocab=4096)
    assert (args.dim, args.head_dim, args.ffn_dim, args.tie_embeddings) == (64, 16, SHAPE.ffn_dim, True)
    assert args.rope_scaling == RopeScaling(8.0, original_max_seq_len=SHAPE.max_seq_len)
    assert (args.vocab_size, args.n_layers) == (SHAPE.vocab_size, SHAPE.n_layers)


@pytest.mark.parametrize("flag", ["model.name=llama3.1", "model.flavor=debugmodel"])
def test_a_name_goes_before_config_json(flag: str, folder: Path) -> None:
    """As with torchtitan's files, which name a flavor and take the tokenizer of such a folder."""
    write_model(folder)
    config = configure("model.hf_assets_path=m", flag)
    args = model_args(config, tokenizer_vocab=4096)
    assert (args.dim, args.n_layers, args.vocab_size) == (256, 6, 4096)
    assert config_folder(config) is None


def test_without_either_it_is_the_debug_model(folder: Path) -> None:
    config = configure(f"model.hf_assets_path={TOKENIZER}")
    expected = PRESETS["llama3"]["debugmodel"]
    assert model_args(config, tokenizer_vocab=expected.vocab_size) == expected


def test_the_folder_of_the_weights_goes_before_that_of_the_tokenizer(folder: Path) -> None:
    write_model(folder, "weights", rms_norm_eps=1e-6)
    write_model(folder, "assets")
    flags = (
        "model.hf_assets_path=assets",
        "checkpoint.enable",
        "checkpoint.initial_load_path=weights",
        "checkpoint.initial_load_in_hf",
    )
    assert model_args(configure(*flags), tokenizer_vocab=4096).norm_eps == 1e-6
    # Only rank 0's node sees the weights: every node has the assets.
    broadcast = configure(*flags, "checkpoint.initial_load_broadcast")
    assert model_args(broadcast, tokenizer_vocab=4096).norm_eps == 1e-5
    assert weights_folder(broadcast) == Path("weights")


def test_a_resolved_config_means_the_same_model(folder: Path) -> None:
    write_model(folder)
    config = configure("model.hf_assets_path=m")
    (folder / "config.toml").write_text(config.to_toml())
    again = load_config(["--job.config_file=config.toml"])
    assert model_args(again, tokenizer_vocab=4096) == model_args(config, tokenizer_vocab=4096)


START = ("model.hf_assets_path=m", "checkpoint.enable", "checkpoint.initial_load_in_hf")


def test_a_good_folder_breaks_no_rule(folder: Path) -> None:
    write_model(folder)
    for more in (
        [],
        ["checkpoint.initial_load_broadcast"],
        ["checkpoint.last_save_in_hf", "checkpoint.hf_export_interval=1000"],
        ["model.max_seq_len=8192", "model.rope_theta=1e6", "model.rope_scaling_factor=4"],
    ):
        assert check(configure(*START, *more), world_size=2, hardware=CPU) == []


def test_a_dropout_that_training_has_not_is_told(folder: Path) -> None:
    file = write_config(folder / "m", SHAPE) / "config.json"
    for value in (0.0, 0.1):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": value}))
        said = "\n".join(notes(configure(*START), world_size=1, hardware=CPU))
        assert ("m/config.json has attention_dropout 0.1" in said) == bool(value)


def test_buffers_that_are_no_weights_are_told(folder: Path) -> None:
    write_model(folder)
    file = folder / "m/model-00001-of-00002.safetensors"
    save_file(load_file(file) | {"model.position_ids": np.arange(9)}, file)
    assert check(configure(*START), world_size=1, hardware=CPU) == []
    said = notes(configure(*START), world_size=1, hardware=CPU)
    assert [line for line in said if "model.position_ids" in line] == [
        "m also stores model.position_ids: ignored, not weights of this model"
    ]


def test_what_only_rank_0_sees_is_left_to_it(folder: Path) -> None:
    flags = ("model.flavor=debugmodel", "checkpoint.enable", "checkpoint.initial_load_path=elsewhere")
    config = configure(*flags, "checkpoint.initial_load_in_hf", "checkpoint.initial_load_broadcast")
    assert check(config, world_size=2, hardware=CPU) == []


def test_of_one_missing_folder_one_message(folder: Path) -> None:
    flags = ("model.hf_assets_path=models/Llama-3.1-8B", "model.tokenizer_path=None", *START[1:])
    problems = check(configure(*flags), world_size=1, hardware=CPU)
    assert [problem.key for problem in problems] == ["model.hf_assets_path"]
    assert (
        "hf download meta-llama/Llama-3.1-8B --local-dir models/Llama-3.1-8B downloads it" in problems[0].fix
    )


def test_a_wrong_name_is_told_the_right_one(folder: Path) -> None:
    write_config(folder / "m", PRESETS["llama3.1"]["8B"])
    flags = (*START, "model.name=llama3", "model.flavor=70B", "model.max_seq_len=4096")
    [problem] = [p for p in check(configure(*flags), world_size=1, hardware=CPU) if "dim 4096" in p.rule]
    assert "n_layers 32 (this model: 80)" in problem.rule and "vocab_size" not in problem.rule
    assert problem.fix.startswith("remove model.name, model.flavor (on the command line")
    assert problem.fix.endswith('its name is model.name = "llama3.1", model.flavor = "8B"')


ASSETS = os.environ.get("TOOLKIT_ASSETS", "")


def seconds_to_check(config: Config) -> float:
    """Seconds of this process: whatever else the machine does, and without waiting for it."""
    begin = time.process_time()
    assert check(config, world_size=64, hardware=CPU) == []
    return time.process_time() - begin


@pytest.mark.skipif(not ASSETS, reason="TOOLKIT_ASSETS is not set")
@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [("stories260K", "stories260K/tok512.model"), ("stories15M", "tokenizers/llama2/tokenizer.model")],
)
def test_a_real_folder_is_checked_within_a_second(name: str, tokenizer: str, folder: Path) -> None:
    flags = (f"model.hf_assets_path={ASSETS}/{name}/hf", *START[1:])
    config = configure(*flags, f"model.tokenizer_path={ASSETS}/{tokenizer}", "training.seq_len=128")
    assert seconds_to_check(config) < 1


def test_70b_in_30_files_are_checked_within_a_second(folder: Path) -> None:
    """Headers as they are, and holes of the size of the weights: 141 GB that nobody reads."""
    args = PRESETS["llama2"]["70B"]
    write_config(folder / "m", args)
    shapes, weight_map = parameter_shapes(args), {}
    for number in range(30):
        file, header, end = f"model-{number}.safetensors", {}, 0
        for name, shape in list(shapes.items())[number::30]:
            begin, end = end, end + 2 * math.prod(shape)
            header[table(args).to_hf(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[table(args).to_hf(name)] = file
        text = json.dumps(header).encode()
        with (folder / "m" / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    (folder / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert seconds_to_check(configure(*START)) < 1
