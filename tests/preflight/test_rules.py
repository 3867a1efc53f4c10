"""Every rule by a run that breaks it: what it says, and that nothing else is said."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.preflight import (
    bad_adamw_8bit,
    bad_attention,
    bad_bitwise,
    bad_chat,
    bad_classification,
    bad_data,
    bad_distillation,
    bad_evaluation,
    bad_experts,
    bad_finetune,
    bad_float8,
    bad_fsdp,
    bad_health,
    bad_memory,
    bad_metrics,
    bad_mixture,
    bad_muon,
    bad_nf4,
    bad_optim,
    bad_phases,
    bad_pipeline,
    bad_pipeline_stages,
    bad_streaming,
    bad_tensor_context_parallel,
    bad_weights,
)
from tests.preflight.bad_runs import (
    CPU,
    OLD_CPU,
    REPLICATE,
    ROOT,
    SHARD,
    TP,
    V100,
    Bad,
    bad,
    configure,
    save,
    write,
    write_protect,
)
from toolkit.config import Config
from toolkit.errors import CheckpointError, ConfigError, DataError, Problem
from toolkit.hardware import Hardware
from toolkit.preflight import check, notes, raise_problems, rules, rules_of
from toolkit.preflight.planned_run import RULES, PlannedRun, rule


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that "outputs" is new."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


OPTIONS = [
    bad("device_available", "training.device=cuda", "nvidia-smi lists no GPU"),
    bad("options_act", "training.dataloader.prefetch_factor=2", "num_workers = 0"),
    bad(
        "validation_has_one_length",
        "validation.steps=5 validation.enable validation.dataset=embedded_validation validation.samples=9",
        "batches per rank",
        "remove one of the two",
    ),
    bad("supported_options", "model.converters=mx", "compute capability 10.0"),
    bad("supported_options", "model.converters=quantize.linear.mx", "compute capability 10.0"),
    bad(
        "supported_options",
        "model.converters=quantize.grouped_mm.mx",
        "matmuls of experts have no low precision",
    ),
    bad("options_act", "debug.deterministic_warn_only", "with debug.deterministic = false"),
]

MODEL = [
    bad("model_exists", "model.name=lama3", "llama3.1", "did you mean"),
    bad("model_exists", "model.flavor=8b", "8B"),
    bad("model_exists", "model.name=meta-llama/Llama-3-8B", "did you mean Meta-Llama-3-8B", '"llama3.0"'),
    bad("model_exists", "model.name=Llama-3-3B", "did you mean Llama-3.2-3B", '"llama3.2"', '"3B"'),
    bad("model_exists", "model.dim=250", "multiple of n_heads"),
    bad("model_exists", "model.head_dim=15", "even"),
    bad("model_exists", "model.n_kv_heads=3", "multiple of n_kv_heads"),
    bad("tokenizer_readable", "model.hf_assets_path=no/such", "no/such", "tokenizer.model"),
    bad("tokenizer_readable", "model.hf_assets_path=~no-one-here/a", "~no-one-here/a", "tokenizer.model"),
    bad(
        "tokenizer_readable",
        "model.tokenizer_path=empty",
        "it contains nothing",
        prepare=lambda folder: (folder / "empty").mkdir(),
    ),
    bad(
        "tokenizer_readable",
        "model.hf_assets_path=meta-llama/Llama-3-8B",
        "did you mean Meta-Llama-3-8B? hf download meta-llama/Meta-Llama-3-8B --local-dir ./Meta-Llama-3-8B",
        "gated",
    ),
    bad("tokenizer_readable", "model.hf_assets_path=meta-llama/Llama-3-3B", "did you mean Llama-3.2-3B?"),
    bad("vocabulary_fits", "model.vocab_size=1000", "4096", "model.vocab_size = 4096"),
    bad("sequence_fits_model", "training.seq_len=4096 model.max_seq_len=2048", "at most 2048"),
    bad(
        "sequence_fits_model",
        "validation.seq_len=5000 validation.enable model.max_seq_len=4096",
        "at most 4096",
    ),
    bad(
        "device_has_dtype",
        "training.mixed_precision_param=bfloat16",
        "Tesla V100 does not support bfloat16",
        '"float32"',
        hardware=V100,
    ),
    bad("device_has_dtype", "training.dtype=bfloat16", "Tesla V100", '"float32"', hardware=V100),
]

MESHES = "parallelism.elastic_meshes"
MESH = [
    bad(
        "world_fills_mesh",
        f"{SHARD}=4",
        "dp_shard 4",
        "is not the world size 6",
        "start 4 processes",
        "for 6 use one of: dp_shard 6",
        world=6,
    ),
    bad(
        "world_fills_mesh",
        f"{REPLICATE}=4",
        "does not divide the world size 6",
        "start a multiple of 4 processes",
        "dp_replicate 3 × dp_shard 2",
        world=6,
    ),
    bad("world_fills_mesh", f"{TP}=4", "tp 4", "dp_shard 3 × tp 2", world=6),
    bad("elastic_meshes_are_meshes", f"{MESHES}=dp_shard=2,dp=3", "'dp=3' is not a mesh", "dp_shard=3 tp=2"),
    bad(
        "batch_divides",
        "training.global_batch_size=16",
        "data-parallel degree 3",
        "global_batch_size to 15",
        world=3,
    ),
    bad("batch_divides", "training.global_batch_size=2", "global_batch_size to 4", "of 1 or 2", world=4),
]

FILES = [
    bad("corpus_readable", "training.dataset=c5", "embedded"),
    bad("unused_dataset_names_exist", "validation.dataset=c5", "no dataset of this name"),
    bad("corpus_readable", "training.dataset_path=none.txt", "no such file"),
    bad("corpus_readable", "training.dataset_path=~no-one-here/a.txt", "no such file"),
    bad("corpus_readable", "training.dataset_path=", "contains no file name"),
    bad(
        "corpus_readable",
        "training.dataset_path=a.jsonl",
        "not valid JSON",
        "one JSON object",
        prepare=write("a.jsonl", "{\n"),
    ),
    bad(
        "corpus_readable",
        "validation.dataset_path=*.jsonl validation.enable validation.seq_len=256",
        "no file matches",
    ),
    bad(
        "corpus_readable",
        "training.dataset_path=a.jsonl",
        "data.text_column = 'text': ",
        "'input'",
        prepare=write("a.jsonl", '{"input": "x"}\n'),
    ),
    bad("folders_writable", "job.dump_folder=a/b/run", "a is not a folder", prepare=write("a", "")),
    bad("folders_writable", "data.cache_folder=a/cache", "is not writable", prepare=write_protect),
    bad("folders_writable", "job.dump_folder=", "is empty"),
    bad(
        "folders_writable",
        "profiling.save_traces_folder=/dev/null profiling.enable_profiling",
        "is not a folder",
    ),
    bad(
        "folders_writable",
        "profiling.save_memory_snapshot_folder=/dev/null profiling.enable_memory_snapshot",
        "is not a folder",
        also="options_act",
    ),
    bad("folders_writable", "comm.save_traces_folder=/dev/null/x", "/dev/null is not a folder", world=2),
    bad("folders_writable", "metrics.prometheus_file=/dev/null/a.prom", "/dev/null is not a folder"),
    bad("folders_writable", "job.save_config_file=/dev/null/a.toml", "/dev/null is not a folder"),
    bad(
        "saved_config_name_usable",
        "job.save_config_file=a job.dump_folder=.",
        "a is a folder",
        prepare=lambda folder: (folder / "a").mkdir(),
    ),
    bad("saved_config_name_usable", "job.save_config_file=metrics.jsonl", "the run itself writes"),
    bad("folders_writable", "job.dump_folder=~no-one-here/run", "no user no-one-here"),
    bad(
        "folders_writable",
        "checkpoint.folder=a checkpoint.enable job.dump_folder=.",
        "a is not a folder",
        prepare=write("a", ""),
    ),
    bad(
        "folders_writable",
        "metrics.save_tb_folder=a job.dump_folder=.",
        "a is not a folder",
        prepare=write("a", ""),
    ),
]


def _saved_finetune(**finetune: Any) -> str:
    """The config that a manifest holds of a run that fine-tuned so."""
    return Config.model_validate({"finetune": finetune}).to_toml(origins=False)


CHECKPOINT = [
    bad("options_act", "checkpoint.load_step=5", "with checkpoint.enable = false"),
    bad("options_act", "checkpoint.initial_load_path=x", "with checkpoint.enable = false"),
    bad("options_act", "checkpoint.last_save_in_hf", "with checkpoint.enable = false"),
    bad(
        "options_act",
        "checkpoint.push_to_hub=me/x checkpoint.enable",
        "with checkpoint.last_save_in_hf = false",
    ),
    bad("options_act", "checkpoint.hf_export_interval=500", "with checkpoint.enable = false"),
    bad("options_act", "job.time_limit=60", "with checkpoint.enable = false"),
    bad(
        "checkpoints_can_be_saved",
        "checkpoint.keep_every_n=700 checkpoint.interval=200 checkpoint.enable",
        "checkpoint.interval, which is 200",
        "the nearest is 800",
    ),
    bad("checkpoints_can_be_saved", "checkpoint.keep_best checkpoint.enable", "there is no validation"),
    bad(
        "checkpoints_can_be_saved",
        "checkpoint.keep_best checkpoint.enable checkpoint.interval=4 validation.enable validation.freq=6",
        "saves every 4 steps",
        "multiple of 4",
    ),
    bad(
        "checkpoints_can_be_saved",
        "checkpoint.async_mode=async_with_pinned_mem checkpoint.enable",
        "this device is a CPU",
        'set it to "async"',
    ),
    bad(
        "options_act",
        "checkpoint.create_seed_checkpoint checkpoint.load_only checkpoint.enable",
        "checkpoint.load_only = true",
    ),
    bad(
        "checkpoints_can_be_saved",
        "checkpoint.create_seed_checkpoint checkpoint.enable",
        "already has step 6",
        "remove it",
        prepare=lambda folder: (save(folder, 4), save(folder, 6)),
    ),
    bad("checkpoint_complete", "checkpoint.load_step=5 checkpoint.enable", "step-5", "are: none"),
    bad(
        "checkpoint_complete",
        "checkpoint.load_step=5 checkpoint.enable",
        "step-5",
        "are: 4, 6",
        prepare=lambda folder: (save(folder, 4), save(folder, 6)),
    ),
    bad("checkpoint_complete", "checkpoint.initial_load_path=no/step-5 checkpoint.enable", "no such folder"),
    bad("checkpoint_complete", "checkpoint.initial_load_path= checkpoint.enable", "is not a checkpoint"),
    bad(
        "checkpoint_complete",
        "checkpoint.enable",
        "checkpoint.load_step = -1: ",
        "0 bytes instead of 1",
        prepare=lambda folder: (save(folder, 5) / "__0_0.distcp").write_bytes(b""),
    ),
    bad(
        "checkpoint_has_full_model",
        "checkpoint.initial_load_path=outputs/checkpoint/step-5 checkpoint.enable job.dump_folder=other",
        "contains an adapter but no model",
        "convert merge",
        prepare=lambda folder: save(folder, 5, model={}, base={"place": "m", "fingerprint": ""}),
    ),
    bad(
        "checkpoint_has_full_model",
        "checkpoint.initial_load_path=outputs/checkpoint/step-5 checkpoint.initial_load_model_only=false "
        "finetune.adapter=lora checkpoint.enable job.dump_folder=other",
        "finetune.adapter_path = outputs/checkpoint/step-5",
        "in both cases set checkpoint.initial_load_model_only = true, because optimizer, step",
        prepare=lambda folder: save(
            folder, 5, base={"place": "m", "fingerprint": ""}, config=_saved_finetune(adapter="lora")
        ),
    ),
    bad(
        "checkpoint_has_adapter",
        "finetune.adapter=lora checkpoint.enable",
        "a run with finetune.adapter = none",
        prepare=lambda folder: save(folder, 5, model={}),
    ),
    bad(
        "checkpoint_trains_the_same",
        "finetune.lora.rank=4 finetune.adapter=lora checkpoint.enable",
        "is from a run with finetune.lora.rank = 16",
        "set it as in that run",
        prepare=lambda folder: save(folder, 5, config=_saved_finetune(adapter="lora", lora={"rank": 16})),
    ),
    bad(
        "checkpoint_trains_the_same",
        "finetune.lora.alpha=4 finetune.adapter=lora checkpoint.enable",
        "finetune.lora.alpha = 16",
        prepare=lambda folder: save(folder, 5, config=_saved_finetune(adapter="lora")),
    ),
    bad(
        "checkpoint_trains_the_same",
        "finetune.lora.quantize_base=none finetune.adapter=lora checkpoint.enable",
        "finetune.lora.quantize_base = 'nf4'",
        prepare=lambda folder: save(
            folder, 5, config=_saved_finetune(adapter="lora", lora={"quantize_base": "nf4"})
        ),
    ),
    bad(
        "checkpoint_trains_the_same",
        "finetune.freeze_first_layers=0 checkpoint.enable",
        "finetune.freeze_first_layers = 2",
        'checkpoint.exclude_from_loading = ["optimizer"]',
        prepare=lambda folder: save(folder, 5, config=_saved_finetune(freeze_first_layers=2)),
    ),
    bad(
        "checkpoint_trains_the_same",
        "finetune.trainable=norm.weight finetune.adapter=lora checkpoint.enable",
        "finetune.trainable = []",
        prepare=lambda folder: save(folder, 5, config=_saved_finetune(adapter="lora")),
    ),
    bad(
        "checkpoint_fits_model",
        "checkpoint.enable",
        "dim 512 (this model: 256)",
        prepare=lambda folder: save(folder, 5, model={"dim": 512, "n_layers": 6}),
    ),
    bad(
        "checkpoint_fits_model",
        "model.norm_eps=1e-4 checkpoint.enable",
        "rope_theta 10000.0 (this model: 500000.0), rope_scaling {'factor': 4.0} (this model: ",
        "set model.rope_theta, model.rope_scaling_factor to change it on purpose",
        key="checkpoint.enable",
        prepare=lambda folder: save(
            folder, 5, model={"rope_theta": 1e4, "rope_scaling": {"factor": 4.0}, "norm_eps": 1e-5}
        ),
    ),
    bad(
        "checkpoint_has_optimizer",
        "checkpoint.enable",
        "contains only the model",
        "initial_load_path",
        prepare=lambda folder: save(folder, 5, model_only=True, loader=None),
    ),
    bad(
        "checkpoint_has_this_optimizer",
        "optimizer.name=Muon checkpoint.enable",
        "a run with optimizer.name = AdamW",
        'exclude_from_loading = ["optimizer"]',
        prepare=lambda folder: save(folder, 5, config=configure([]).to_toml(origins=False)),
    ),
    bad(
        "data_position_fits",
        "debug.seed=7 checkpoint.enable",
        "counted with 3",
        "exclude_from_loading",
        prepare=lambda folder: save(folder, 5, loader={"seed": 3, "seq_len": 256, "packing": True}),
    ),
    bad(
        "data_position_fits",
        "data.streaming checkpoint.enable",
        "counted with False",
        "exclude_from_loading",
        key="data.streaming",
        prepare=lambda folder: save(folder, 5, loader={"seed": 0, "seq_len": 256, "packing": True}),
    ),
    bad(
        "data_position_fits",
        "checkpoint.exclude_from_loading=optimizer checkpoint.enable",
        "step-0 has no position in the data",
        'set it to ["optimizer", "dataloader"]',
        prepare=lambda folder: save(folder, 0, model_only=True, loader=None),
    ),
    bad(
        "stream_resumable",
        "data.streaming training.dataset_path=a.txt,b.txt training.global_batch_size=9 checkpoint.enable",
        "splits 2 files into 1 shards",
        "global_batch_size to 8",
        key="training.global_batch_size",
        prepare=lambda folder: [
            *((folder / name).write_text("a text") for name in ("a.txt", "b.txt")),
            save(folder, 5, loader={"seed": 0, "shards": 2}),
        ],
    ),
    bad(
        "batch_resumable",
        "training.global_batch_size=-1 checkpoint.enable",
        "degree 1, this run has 2",
        "global_batch_size to 8",
        world=2,
        prepare=lambda folder: save(folder, 5),
    ),
    bad(
        "steps_are_counted_on",
        "checkpoint.exclude_from_loading=train_state checkpoint.enable",
        "next to step-5",
        'initial_load_path = "outputs/checkpoint/step-5"',
        prepare=lambda folder: save(folder, 5),
    ),
    bad(
        "data_position_fits",
        "debug.seed=7 checkpoint.enable checkpoint.exclude_from_loading=dataloader",
        "counted with 3",
        'in another job.dump_folder, with checkpoint.initial_load_path = "outputs/checkpoint/step-5"',
        prepare=lambda folder: save(
            folder, 5, loader={"seed": 3}, config='[checkpoint]\nexclude_from_loading = ["dataloader"]\n'
        ),
    ),
]

PARTS = (
    bad_tensor_context_parallel,
    bad_pipeline_stages,
    bad_pipeline,
    bad_fsdp,
    bad_memory,
    bad_muon,
    bad_optim,
    bad_phases,
    bad_adamw_8bit,
    bad_chat,
    bad_classification,
    bad_data,
    bad_distillation,
    bad_evaluation,
    bad_mixture,
    bad_streaming,
    bad_finetune,
    bad_float8,
    bad_nf4,
    bad_health,
    bad_metrics,
    bad_attention,
    bad_bitwise,
    bad_experts,
    bad_weights,
)
BAD = [*OPTIONS, *MODEL, *MESH, *FILES, *CHECKPOINT, *(case for part in PARTS for case in part.CASES)]


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case.rule}-{case.flags[0][2:]}-{case.world}")
def test_rule(case: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.prepare(folder)
    # Whoever runs the tests as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o200))
    monkeypatch.setattr("toolkit.preflight.planned_run.torch_version", lambda: case.torch)
    config = configure(case.flags)
    run = PlannedRun(config, case.world, case.hardware)
    checks = [rule.check for rule in rules_of(run)]
    found = {check.__name__: problems for check in checks if (problems := check(run))}
    assert set(found) == {case.rule} | case.also
    said = "\n".join(map(str, found[case.rule]))
    for part in case.says:
        assert part in said
    for problem in found[case.rule]:
        assert problem.key == case.key and problem.rule and problem.fix
        assert "fix:" not in problem.rule
        assert problem.value == config.value(case.key)
        assert problem.origin == config.origin(case.key)


def test_every_rule_has_a_bad_input() -> None:
    for file in rules.FILES:
        import_module(f"{rules.__name__}.{file}")
    registered = {"schedule_has_values"}  # tests/extensions/test_extensions.py
    assert {case.rule for case in BAD} | registered == {rule.check.__name__ for rule in RULES.values()}


def test_a_rule_of_a_user_may_have_the_name_of_another() -> None:
    run = PlannedRun(configure([]), 1, CPU)
    with patch.dict(RULES):

        @rule()
        def one_length(run: PlannedRun) -> list[Problem]:
            return []

        assert [each.check.__name__ for each in rules_of(run)].count("one_length") == 2


def test_a_good_run_breaks_no_rule(folder: Path) -> None:
    for world in (1, 2, 4, 16):
        assert (
            check(
                configure(["--validation.enable", "--validation.seq_len=256"]), world_size=world, hardware=CPU
            )
            == []
        )


def test_a_rank_is_compared_with_what_is_updated(folder: Path) -> None:
    flags = ["--model.n_kv_heads=1", "--finetune.adapter=lora", "--finetune.lora.rank=100"]
    assert (
        check(configure([*flags, "--finetune.lora.target_modules=wq,w2"]), world_size=1, hardware=CPU) == []
    )
    [problem] = check(configure(flags), world_size=1, hardware=CPU)
    assert "layers.0.attention.wv.weight is 16" in problem.rule


def test_a_run_that_resumes_breaks_no_rule(folder: Path) -> None:
    save(folder, 5, model={"dim": 256})
    config = configure(["--checkpoint.enable"])
    assert check(config, world_size=2, hardware=CPU) == []


def test_what_changes_no_shape_is_changed_on_purpose(folder: Path) -> None:
    save(folder, 5, model={"norm_eps": 1e-6, "rope_theta": 1e4})
    flags = ["--checkpoint.enable", "--model.norm_eps=1e-4"]
    assert len(check(configure(flags), world_size=1, hardware=CPU)) == 1
    assert check(configure([*flags, "--model.rope_theta=2e4"]), world_size=1, hardware=CPU) == []


@pytest.mark.parametrize(
    ("run", "part"), [({"model_only": True}, "optimizer"), ({"loader": {"seq_len": 9}}, "dataloader")]
)
def test_what_is_not_loaded_need_not_be_there(run: dict[str, Any], part: str, folder: Path) -> None:
    save(folder, 5, **run)
    flags = ["--checkpoint.enable"]
    assert len(check(configure(flags), world_size=1, hardware=CPU)) == 1
    flags.append(f"--checkpoint.exclude_from_loading={part}")
    assert check(configure(flags), world_size=1, hardware=CPU) == []


def test_a_batch_that_follows_the_mesh_goes_on_elsewhere_where_the_data_starts_anew(folder: Path) -> None:
    """As torchtitan's own optional-checkpoint test does."""
    save(folder, 5)  # at data-parallel degree 1
    flags = ["--checkpoint.enable", "--training.global_batch_size=-1"]
    [problem] = check(configure(flags), world_size=2, hardware=CPU)
    assert problem.key == "training.global_batch_size" and '["dataloader"]' in problem.fix
    flags.append("--checkpoint.exclude_from_loading=lr_scheduler,dataloader,optimizer")
    assert check(configure(flags), world_size=2, hardware=CPU) == []


def test_the_home_folder_is_where_checkpoints_are_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 5)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir("/")
    flags = ["--data.cache_folder=~/cache", "--checkpoint.enable"]
    own = configure([*flags, "--job.dump_folder=~/outputs", "--checkpoint.load_step=5"])
    other = configure(
        [*flags, "--job.dump_folder=~/new", "--checkpoint.initial_load_path=~/outputs/checkpoint/step-5"]
    )
    for config in (own, other):
        assert check(config, world_size=1, hardware=CPU) == []
        assert PlannedRun(config, 1, CPU).start.manifest is not None


def test_a_cache_that_someone_else_keeps_may_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache" / "tokens").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "cache")
    assert check(configure([]), world_size=1, hardware=CPU) == []


def test_hsdp_and_multiples_fit(folder: Path) -> None:
    config = configure(["--parallelism.data_parallel_replicate_degree=2"])
    assert check(config, world_size=4, hardware=CPU) == []


def test_each_folder_that_cannot_be_made_is_named_but_for_those_inside_it(folder: Path) -> None:
    inside = [
        "--metrics.save_tb_folder=tb",
        "--metrics.enable_tensorboard",
        "--job.dump_folder=/dev/null/run",
    ]
    flags = [
        *inside,
        "--checkpoint.enable",
        "--checkpoint.folder=/dev/null/saved",
        "--data.cache_folder=/dev/null/cache",
    ]
    problems = check(configure(flags), world_size=2, hardware=CPU)
    keys = ["job.dump_folder", "data.cache_folder", "checkpoint.folder"]
    assert [problem.key for problem in problems if problem.key in [*keys, "metrics.save_tb_folder"]] == keys


def test_all_problems_are_reported_at_once_and_config_comes_first(folder: Path) -> None:
    config = configure(["--training.dataset=c5", "--comm.mode=local_tensor"])
    with pytest.raises(ConfigError) as caught:
        raise_problems(config, world_size=1, hardware=CPU)
    assert [problem.key for problem in caught.value.problems] == [
        "comm.mode",
        "training.dataset",
    ]


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--training.dataset=c5", DataError),
        ("--model.hf_assets_path=none", DataError),
        ("--checkpoint.load_step=3", CheckpointError),
    ],
)
def test_what_cannot_be_used_ends_in_3(flag: str, error: type[Exception], folder: Path) -> None:
    with pytest.raises(error, match=flag.partition("=")[0]) as caught:
        raise_problems(configure([flag, "--checkpoint.enable"]), world_size=1, hardware=CPU)
    assert caught.value.exit_code == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "world", "hardware", "note"),
    [
        (["--training.global_batch_size=-1"], 2, CPU, "which is 16 on this mesh"),
        (["--training.global_batch_size=14"], 1, CPU, "split into micro-batches of 7"),
        (["--training.mixed_precision_param=bfloat16"], 1, OLD_CPU, "float32 is faster"),
        (["--training.steps=10"], 1, CPU, "warmup_steps 200 is shortened to the 10 steps"),
        (["--training.steps=400", "--lr_scheduler.decay_ratio=0.8"], 1, CPU, "shortened to the 200 after"),
        (["--parallelism.fsdp_wrap_policy=size"], 2, CPU, "a block has 852,480"),
        (["--parallelism.fsdp_sync_each_batch=false"], 2, CPU, "no effect without several micro-batches"),
        (["--training.cpu_fast_paths=false"], 1, V100, "cpu_fast_paths has no effect without a CPU"),
        (
            ["--parallelism.fsdp_backward_prefetch=2"],
            1,
            CPU,
            "fsdp_backward_prefetch has no effect without parameters sharded",
        ),
        (["--training.mixed_precision_output=float32"], 1, CPU, "training returns no logits"),
        (["--training.dataset=c4_test"], 1, CPU, "c4_test is not C4 here but a stand-in, the included books"),
        (["--validation.enable", "--validation.seq_len=256"], 1, CPU, "also named embedded_validation"),
        (
            [f"--training.dataset_path={ROOT}/toolkit/data/embedded", "--training.dataset=c4"],
            1,
            CPU,
            "training.dataset c4 (--training.dataset) is overridden by training.dataset_path",
        ),
        (
            [
                "--data.streaming",
                "--training.dataloader.num_workers=1",
                "--training.dataloader.prefetch_factor=2",
            ],
            1,
            CPU,
            "training.dataloader.prefetch_factor has no effect with data.streaming",
        ),
        (["--compile.enable"], 1, CPU, "the first step compiles"),
        ([f"--{MESHES}=dp_shard=2"], 1, CPU, "has no effect without NNODES=MIN:MAX"),
        (
            ["--validation.enable", "--validation.dataset=embedded_validation", "--validation.steps=3"],
            2,
            CPU,
            "48 samples in total on this mesh",
        ),
    ],
)
def test_note(flags: list[str], world: int, hardware: Hardware, note: str, folder: Path) -> None:
    said = notes(configure(flags), world_size=world, hardware=hardware)
    assert len([line for line in said if note in line]) == 1
    assert check(configure(flags), world_size=world, hardware=hardware) == []


def test_meshes_of_a_fixed_number_of_nodes_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, noted in (("2:2", True), ("1:2", False)):
        monkeypatch.setenv("NNODES", nodes)
        said = notes(configure([f"--{MESHES}=dp_shard=2"]), world_size=1, hardware=CPU)
        assert any("has no effect without NNODES=MIN:MAX" in line for line in said) == noted


def test_a_clean_run_has_no_notes(folder: Path) -> None:
    assert notes(configure([]), world_size=2, hardware=CPU) == []
