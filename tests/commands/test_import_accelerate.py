"""``import-accelerate``: files, launch lines, and the strategies, by what each rank stores in a run."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.commands.test_accelerate_keys import explained
from tests.helpers import in_layout, run_world
from tests.parallel.sharded import STRATEGIES, gathered_bytes
from tests.training import small_trainer
from toolkit.cli import run_command
from toolkit.commands.accelerate.read import read_file
from toolkit.commands.import_accelerate import launch_lines, toml_text, translate
from toolkit.config import Config, load_config
from toolkit.models.common.decoder import Decoder
from toolkit.optim.optimizer_state import optimizer_tensors

ROOT = Path(__file__).parents[2]
EXAMPLE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
CORRECTED = EXAMPLE.replace("BertLayer", "TransformerBlock")
VERSION_2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 4
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
"""


def _import(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = run_command("import-accelerate", [str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def _file(folder: Path, text: str, name: str = "accelerate.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# Strategies

REPLICAS = {"HYBRID_SHARD": 2, "HYBRID_SHARD_ZERO2": 2}
RANKS = {name: 2 * REPLICAS.get(name, 1) for name in STRATEGIES}
VARIANTS = [
    (name, written) for place, name in enumerate(STRATEGIES, 1) for written in (str(place), name.lower())
]


def _variant(written: str, name: str) -> str:
    """The example with another strategy; a hybrid one on two machines, of two ranks each."""
    text = CORRECTED.replace("fsdp_sharding_strategy: 1", f"fsdp_sharding_strategy: {written}")
    if name in REPLICAS:
        text = text.replace("num_machines: 1", "num_machines: 2").replace("processes: 2", "processes: 4")
    return text


def _small(toml: str, folder: Path) -> Config:
    """The TOML's run, of a tiny model, for one step on the CPU, as the tool says that it can be tried."""
    return load_config(
        shlex.split(
            f"--job.config_file {toml} --job.dump_folder {folder} --training.enable_cpu_offload false "
            f"--data.cache_folder {folder.parent / 'cache'} --training.dataset embedded_validation "
            "--model.dim 64 --model.n_layers 2 --model.n_heads 8 --model.n_kv_heads 2 --model.ffn_dim 160 "
            "--training.seq_len 64 --training.global_batch_size 16 --training.local_batch_size 4 "
            "--training.steps 1 --metrics.log_freq 1 --metrics.no-enable_tensorboard"
        )
    )


def _run(toml: str, folder: Path) -> dict[str, Any]:
    """A step of what the TOML says: its loss, and the bytes that this rank holds."""
    trainer = small_trainer(_small(toml, folder))
    (model,) = trainer.model_parts.models
    gathered: list[int] = []
    model.register_forward_hook(lambda *_: gathered.append(gathered_bytes(model)))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    state = optimizer_tensors(trainer.model_parts.named_parameters(), trainer.optimizer)
    moments = [tensor for key, tensor in state.items() if not key.endswith(".step")]
    return {
        "loss": trainer.history[0]["loss"],
        "parameters": _local_bytes(model.parameters()),
        "moments": _local_bytes(moments),
        "gathered after forward": gathered[0],
        "expected": _expected(trainer),
    }


def _local_bytes(tensors: Any) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _expected(trainer: Any) -> dict[int, tuple[int, int, int]]:
    """By the number of shards, for this model on this rank: bytes of the parameters stored, and, gathered in
    bf16 with equal shards, of all of them and of root and last block, which backward needs at once."""
    with torch.device("meta"):
        model = Decoder(trainer.model_parts.models[0].args)
    rank, found = torch.distributed.get_rank(), {}
    for shards in (1, 2):
        stored = whole = last = 0
        for name, parameter in model.named_parameters():
            rows, width = parameter.shape[0], parameter.numel() // parameter.shape[0]
            part = -(-rows // shards)
            stored += max(0, min(part, rows - rank % shards * part)) * width
            whole += part * shards * width
            last += 0 if name.startswith("layers.0.") else part * shards * width
        found[shards] = (4 * stored, 2 * whole, 2 * last)
    return found


def _world(tomls: dict[str, str], folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, toml in tomls.items():
        with in_layout(name):
            found[name] = _run(toml, Path(folder) / name.replace(" ", "_"))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Findings of each rank of each variant, imported from its file."""
    folder = tmp_path_factory.mktemp("variants")
    worlds: dict[int, dict[str, str]] = {2: {}, 4: {}}
    for name, written in VARIANTS:
        key = f"{name} {written}"
        output = folder / f"{key.replace(' ', '_')}.toml"
        assert (
            run_command(
                "import-accelerate", [str(_file(folder, _variant(written, name))), "--output", str(output)]
            )
            == 0
        )
        worlds[RANKS[name]][key] = str(output)
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, tomls in worlds.items():
        results = run_world(_world, ranks, tomls, str(folder))
        found |= {key: [result[key] for result in results] for key in tomls}
    return found


@pytest.mark.parametrize(("name", "written"), VARIANTS)
def test_each_strategy_by_number_and_name_stores_what_it_means(
    runs: dict[str, list[dict[str, Any]]], name: str, written: str
) -> None:
    shards = 1 if name == "NO_SHARD" else 2
    keeps = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    for rank, found in enumerate(runs[f"{name} {written}"]):
        stored, whole, last = found["expected"][shards]
        assert found["parameters"] == stored, f"rank {rank}"
        assert found["moments"] == 2 * stored
        assert found["gathered after forward"] == (whole if keeps else last)
        assert found["loss"] == pytest.approx(runs["FULL_SHARD 1"][0]["loss"], rel=1e-3)  # bf16 rounds


@pytest.mark.parametrize(("written", "plain"), [("4", "FULL_SHARD"), ("HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP")])
def test_a_hybrid_strategy_of_one_machine_is_the_plain_one_or_has_the_replicas_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, plain: str
) -> None:
    file = _file(tmp_path, CORRECTED.replace("strategy: 1", f"strategy: {written}"))
    code, said = _import(capsys, file)
    assert code == 0 and f'sharding_strategy = "{plain}"' in said
    assert "on one machine" in said and "--replicas N" in said
    code, said = _import(capsys, file, "--replicas", 2)
    assert code == 0 and 'sharding_strategy = "HYBRID_SHARD' in said
    assert "data_parallel_replicate_degree = 2" in said


def test_replicas_without_a_hybrid_strategy_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = _import(capsys, _file(tmp_path, VERSION_2.split("parallelism_config:")[0]), "--replicas", 2)
    assert code == 2 and "HYBRID_SHARD and HYBRID_SHARD_ZERO2 alone" in said


# Files


def test_the_example_names_the_right_class_and_with_it_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "run.toml"
    code, said = _import(capsys, _file(tmp_path, EXAMPLE), "--output", output)
    assert code == 2 and not output.exists()
    assert "accelerate.yaml:14: fsdp_transformer_layer_cls_to_wrap = 'BertLayer'" in said
    assert "did you mean TransformerBlock?" in said
    code, said = _import(capsys, _file(tmp_path, CORRECTED), "--output", output)
    assert code == 0
    lines = said.splitlines()
    keys = [line.split(" = ")[0].strip() for line in lines[: lines.index("")]]
    assert keys == [
        line.split(":")[0].strip() for line in CORRECTED.splitlines() if "fsdp_config" not in line
    ]
    config = load_config(["--job.config_file", str(output)])
    assert config.parallelism.sharding_strategy == "FULL_SHARD"
    assert config.parallelism.fsdp_wrap_classes == ["TransformerBlock"]
    assert config.training.enable_cpu_offload and config.training.mixed_precision_param == "bfloat16"
    assert config.checkpoint.enable and not config.checkpoint.last_save_in_hf
    code, said = _import(capsys, _file(tmp_path, CORRECTED), "--output", output)
    assert code == 2 and "cannot be written: File exists" in said


@pytest.mark.parametrize("text", [EXAMPLE, VERSION_2])
def test_the_files_are_such_as_accelerate_reads(tmp_path: Path, text: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(_file(tmp_path, text)))
    assert config.fsdp_config and config.distributed_type == "FSDP"


def test_version_2_with_its_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.toml"
    base = ROOT / "train_configs" / "llama3_1b.toml"
    assert _import(capsys, _file(tmp_path, VERSION_2), "--output", output, "--extends", base)[0] == 0
    config = load_config(["--job.config_file", str(output)])
    parallelism = config.parallelism
    assert (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree) == (2, 2)
    assert parallelism.fsdp_reshard_after_forward == "never" and parallelism.sharding_strategy is None
    assert config.activation_checkpoint.mode == "full" and not config.training.enable_cpu_offload
    assert config.training.mixed_precision_param == "float32"
    assert config.model.flavor == "1B"


def test_a_trainers_words_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "min_num_params": 0,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "backward_prefetch": "backward_pre",
        "cpu_ram_efficient_loading": "true",
        "xla": False,
    }
    file, output = _file(tmp_path, json.dumps(settings), "fsdp.json"), tmp_path / "run.toml"
    words = ["--fsdp", "hybrid_shard auto_wrap offload", "--fsdp_config", file, "--bf16"]
    code, said = _import(capsys, *words, "--num_processes", 16, "--num_machines", 2, "--output", output)
    assert code == 0
    config = load_config(["--job.config_file", str(output)])
    assert config.parallelism.sharding_strategy == "HYBRID_SHARD"
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.fsdp_wrap_policy == "class" and config.training.enable_cpu_offload
    assert config.training.mixed_precision_param == "bfloat16"
    assert "NGPU=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=first-host MASTER_PORT=29500" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fsdp", "full_shrad"], "did you mean full_shard?"),
        (["--fsdp", "full_shard shard_grad_op"], "is given twice"),
        (["--fsdp", "full_shard", "--fp16"], "bf16, or no, which is fp32"),
        (["--fsdp", "full_shard", "--fsdp_config", "absent.json"], "cannot be read"),
        (["--fsdp", "full_shard", "--extends", "absent.toml"], "there is no such file"),
    ],
)
def test_what_is_wrong_with_a_trainers_options(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, found = _import(capsys, *words)
    assert code == 2 and said in found


def test_a_trainers_file_is_nearer_than_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _file(tmp_path, '{"version": 2, "reshard_after_forward": false}', "fsdp.json")
    code, said = _import(capsys, "--fsdp", "full_shard auto_wrap", "--fsdp_config", file)
    assert code == 0 and 'fsdp_reshard_after_forward = "never"' in said and "sharding_strategy" not in said
    words = ["--fsdp_config", file, "--replicas", 2, "--fsdp"]
    code, said = _import(capsys, *words, "hybrid_shard auto_wrap")
    assert code == 2 and "fsdp_sharding_strategy is HYBRID_SHARD, which frees" in said
    code, said = _import(capsys, *words, "hybrid_shard_zero2 auto_wrap")
    assert code == 0 and 'sharding_strategy = "HYBRID_SHARD_ZERO2"' in said


@pytest.mark.parametrize("key", ["", "mixed_precision:\n"])
def test_where_no_precision_is_given_it_is_that_of_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    code, said = _import(capsys, _file(tmp_path, CORRECTED.replace("mixed_precision: bf16\n", key)))
    assert code == 0 and 'mixed_precision_param = "float32"' in said.partition("[training]")[2]
    assert "mixed_precision, not given" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("- a\n- b\n", "has no keys"),
        ("debug: [false\n", "not valid YAML"),
        ("debug: !!python/object:os.system x\n", "accelerate.yaml:1: not valid YAML"),
        ("debug: false\n", "asks for no FSDP"),
        ('debug: "\x01"\n', "not valid YAML"),
        ("distributed_type: FSDP\ndebug: false\ndebug: true\n", "is given twice"),
        ("distributed_type: FSDP\nfsdp_config: 3\n", "must be a table of keys"),
        ("distributed_type: FSDP\nfsdp_config:\n  version: 1\n  fsdp_version: 2\n", "accelerate.yaml:3"),
    ],
)
def test_a_file_that_is_none_of_accelerates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    code, found = _import(capsys, _file(tmp_path, text))
    assert code == 2 and said in found and "Traceback" not in found


def test_a_trainers_switch_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _import(capsys, "--bf16", "--fsdp")
    assert code == 0 and said.startswith('mixed_precision = "bf16" -> ')


def test_yaml_without_its_library_is_a_message_and_json_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, said = _import(capsys, _file(tmp_path, CORRECTED))
    assert code == 2 and "PyYAML, which is not installed" in said and "pip install" in said
    settings = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}}
    code, said = _import(capsys, _file(tmp_path, json.dumps(settings), "accelerate.json"))
    assert code == 0 and 'sharding_strategy = "SHARD_GRAD_OP"' in said


def test_all_that_is_refused_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.replace("bf16\n", "fp16\n").replace("tpu_use_sudo: false", "tpu_use_sudo: true")
    code, said = _import(capsys, _file(tmp_path, text))
    assert code == 2 and said.count("  rule: ") == 3
    assert 'mixed_precision = "fp16" rejected: ' in said


# Launching


def test_launch_lines_of_one_machine() -> None:
    script, torchrun = launch_lines(explained(num_processes=2, gpu_ids="0,3", debug=True), "my run.toml")
    environment = "CUDA_VISIBLE_DEVICES=0,3 TORCH_DISTRIBUTED_DEBUG=DETAIL "
    assert script == f"{environment}NGPU=2 CONFIG_FILE='my run.toml' ./run_train.sh"
    assert torchrun == (
        f"{environment}torchrun --nproc_per_node=2 --nnodes=1 --rdzv_id=101 --rdzv_backend=c10d "
        "--rdzv_endpoint=localhost:29500 -m toolkit.train --job.config_file 'my run.toml'"
    )


def test_launch_lines_of_several_machines() -> None:
    keys = {"num_processes": 16, "num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    found = explained(**keys, main_process_port=2222, rdzv_backend="static")
    script, torchrun, note = launch_lines(found, "run.toml")
    machine = "NGPU=8 NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=2222"
    assert script == f"{machine} CONFIG_FILE=run.toml ./run_train.sh"
    assert torchrun == (
        "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --rdzv_id=101 --rdzv_backend=static "
        "--rdzv_endpoint=10.0.0.1:2222 -m toolkit.train --job.config_file run.toml"
    )
    assert "machine 1" in note


@pytest.fixture
def written(tmp_path: Path) -> Iterator[list[str]]:
    """The lines that start the corrected example, of which the last is for a machine without GPUs."""
    found = translate(read_file(_file(tmp_path, CORRECTED)))
    output = tmp_path / "run.toml"
    output.write_text(toml_text(found.settings, source="test"))
    yield launch_lines(found, str(output))


def test_the_line_for_a_machine_without_gpus_passes_the_checks_and_the_other_says_what_to_do(
    written: list[str],
) -> None:
    def check(line: str) -> subprocess.CompletedProcess[str]:
        config, flags = line.split("CONFIG_FILE=")[1].split(" ./run_train.sh")
        command = ["-m", "toolkit.preflight", config, "--world-size", "2", *shlex.split(flags)]
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)

    if torch.cuda.is_available():
        pytest.skip("there is a GPU to offload from")
    refused, tried = check(written[0]), check(written[-1])
    assert (
        refused.returncode == 2
        and "enable_cpu_offload" in refused.stderr
        and "has no effect without a GPU" in refused.stderr
    )
    assert tried.returncode == 0 and "FULL_SHARD" in tried.stdout
