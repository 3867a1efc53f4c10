"""Weights go between formats without a changed bit, also after kills, and mistakes leave nothing behind."""

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import run_world
from tests.models.families import save_transformers as save_moe
from tests.weights.folders import FAMILY, save_meta, save_transformers
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.cli import run_command
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import EXIT_DATA, EXIT_FINISHED, CheckpointError, DataError
from toolkit.generation.load import load_model
from toolkit.io.locks import claim
from toolkit.weights import convert as conversion_module
from toolkit.weights import dcp_write, folder_write, hf_write
from toolkit.weights import source as source_module
from toolkit.weights.convert import convert, mapping, prepare
from toolkit.weights.folder_write import no_progress
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.open import CheckpointWeights, open_weights
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource

ASSETS = Path(__file__).parents[1] / "assets"


def _convert(way: str, source: Path, out: Path, *, verify: bool = False, **options: Any) -> Path:
    conversion = prepare(way, source, out, **options)
    convert(conversion, verify=verify)
    return conversion.out


def _safetensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].equal(right[name]) for name in left
    )


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is several files."""
    monkeypatch.setattr(dcp_write, "FILE_BYTES", 10_000)


@pytest.mark.parametrize(("name", "files"), [("llama2", 1), ("llama3", 2), ("llama3.1", 3), ("llama3.2", 1)])
def test_round_trips_change_no_bit(name: str, files: int, tmp_path: Path, small_files: None) -> None:
    dtype = torch.bfloat16 if files == 2 else torch.float32
    save_transformers(name, tmp_path / "hf", files=files, dtype=dtype)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == files
    original = _safetensors(tmp_path / "hf")
    size = sum(tensor.nbytes for tensor in original.values())
    step = _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "dcp")
    assert step == tmp_path / "dcp" / "step-0" and len(list(step.glob("*.distcp"))) > 1
    _convert("dcp-to-hf", tmp_path / "dcp", tmp_path / "hf2", verify=True, max_bytes=size // files + 20_000)
    _convert("hf-to-meta", tmp_path / "hf2", tmp_path / "meta")
    _convert("meta-to-hf", tmp_path / "meta", tmp_path / "hf3")
    for folder in ("hf2", "hf3"):
        assert _same(_safetensors(tmp_path / folder), original)
    assert len(list((tmp_path / "hf2").glob("*.safetensors"))) == min(files, 2)
    index = tmp_path / "hf2" / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        assert json.loads(index.read_text())["metadata"]["total_size"] == size


@pytest.mark.parametrize("name", FAMILY)
def test_transformers_loads_what_comes_out(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = save_transformers(name, tmp_path / "hf", files=2)
    _convert("hf-to-meta", tmp_path / "hf", tmp_path / "meta")
    _convert("meta-to-dcp", tmp_path / "meta", tmp_path / "dcp")
    _convert("dcp-to-hf", tmp_path / "dcp", tmp_path / "out", max_bytes=20_000)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.randint(96, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # 150 positions feel the scaling of RoPE: the config must have come through as well
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


_PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 16, "n_kv_heads": 4, "vocab_size": 64, "multiple_of": 64,
    "ffn_dim_multiplier": 1.0, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


def _meta_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"tok_embeddings": (64, 64), "norm": (64,), "output": (64, 64)}
    for layer in range(2):
        blocks = {
            "attention.wq": (64, 64), "attention.wk": (16, 64), "attention.wv": (16, 64),
            "attention.wo": (64, 64),
            "feed_forward.w1": (192, 64), "feed_forward.w2": (64, 192), "feed_forward.w3": (192, 64),
            "attention_norm": (64,), "ffn_norm": (64,),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in blocks.items()}
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


@pytest.mark.parametrize(("parts", "embedding_dim"), [(1, 0), (2, 1), (4, 1), (8, 0), (16, 0)])
def test_meta_parts_become_one(parts: int, embedding_dim: int, tmp_path: Path) -> None:
    tensors = _meta_tensors()
    save_meta(tensors, _PARAMS, tmp_path / "meta", parts=parts, embedding_dim=embedding_dim)
    _convert("meta-to-dcp", tmp_path / "meta", tmp_path / "dcp", verify=True)
    _convert("dcp-to-meta", tmp_path / "dcp", tmp_path / "one", verify=True)
    found = torch.load(tmp_path / "one" / "consolidated.00.pth", weights_only=True)
    assert _same(found, tensors) and len(list((tmp_path / "one").iterdir())) == 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scalings_of_rope_that_meta_does_not_have(
    rope: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILY, "scaled", {"num_attention_heads": 4, "rope_parameters": rope})
    theirs = save_transformers("scaled", tmp_path / "hf")
    for way, start, end in (("hf-to-dcp", "hf", "dcp"), ("dcp-to-hf", "dcp", "back")):
        assert run_command("convert", [way, str(tmp_path / start), str(tmp_path / end)]) == EXIT_FINISHED
    checkpoint = tmp_path / "dcp" / "step-0"
    sources = [open_weights(place) for place in (tmp_path / "hf", checkpoint, tmp_path / "back")]
    assert len({source.args for source in sources}) == 1
    tokens = torch.arange(90)[None]
    loaded = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(loaded.model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    assert run_command("convert", ["hf-to-meta", str(tmp_path / "hf"), str(tmp_path / "meta")]) == EXIT_DATA
    assert "which Meta's format does not support" in capsys.readouterr().err


def test_a_tied_head_is_in_metas_file_and_takes_no_room(tmp_path: Path) -> None:
    save_transformers("llama3.2", tmp_path / "hf")
    _convert("hf-to-meta", tmp_path / "hf", tmp_path / "meta")
    path = tmp_path / "meta" / "consolidated.00.pth"
    found = torch.load(path, weights_only=True)
    assert found["output.weight"].equal(found["tok_embeddings.weight"])
    assert path.stat().st_size < (tmp_path / "hf" / "model.safetensors").stat().st_size * 1.2


@pytest.mark.parametrize(("parts", "embedding_dim"), [(1, 0), (2, 1), (4, 0)])
def test_a_stored_head_is_compared_with_the_embedding_to_the_last_value(
    parts: int, embedding_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows at a time."""
    monkeypatch.setattr(source_module, "BUFFER_BYTES", 3 * 64 * 2)
    tensors, params = _meta_tensors(), _PARAMS | {"tied_embeddings": True}
    tensors["tok_embeddings.weight"][5, 5] = float("nan")  # is equal to itself
    tensors["output.weight"] = tensors["tok_embeddings.weight"].clone()
    save_meta(tensors, params, tmp_path / "meta", parts=parts, embedding_dim=embedding_dim)
    _convert("meta-to-hf", tmp_path / "meta", tmp_path / "hf")
    assert "lm_head.weight" not in _safetensors(tmp_path / "hf")
    tensors["output.weight"][-1, -1] += 1
    save_meta(tensors, params, tmp_path / "differs", parts=parts, embedding_dim=embedding_dim)
    hf = _safetensors(tmp_path / "hf")
    hf["lm_head.weight"] = tensors["output.weight"]
    save_file(hf, tmp_path / "hf" / "model.safetensors")
    ways = {"hf": "hf-to-meta hf-to-dcp", "differs": "meta-to-hf meta-to-dcp"}
    for folder, key in {"hf": "tie_word_embeddings", "differs": "tied_embeddings"}.items():
        for way in ways[folder].split():
            assert f'set "{key}" to false' in _refused(way, tmp_path / folder, tmp_path)


def test_experts_are_spread_over_files_of_limited_size(
    tmp_path: Path,
) -> None:
    """One matrix of experts, stacked, is larger than a file."""
    save_moe(tmp_path / "hf", "mixtral")
    _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", verify=True)
    stacked = open_weights(tmp_path / "dcp").tensors["layers.2.moe.experts.w2"]
    assert stacked.shape == (8, 64, 96)
    limit = stacked.nbytes // 2
    conversion = prepare("dcp-to-hf", tmp_path / "dcp", tmp_path / "back", max_bytes=limit)
    lines = dict(line.split(" ", 1) for line in mapping(conversion))
    assert lines["layers.2.moe.experts.w2"].startswith(
        "(8, 64, 96) float32 -> model.layers.2.block_sparse_moe.experts.{0..7}.w2.weight (64, 96) float32 in "
    )
    convert(conversion, verify=True)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert all(sum(it.nbytes for it in load_file(file).values()) <= limit for file in files)
    assert _same(_safetensors(tmp_path / "back"), _safetensors(tmp_path / "hf"))
    weight_map = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {name: file.name for file in files for name in load_file(file)}
    where = {weight_map[f"model.layers.2.block_sparse_moe.experts.{it}.w2.weight"] for it in range(8)}
    assert len(where) > 1 and lines["layers.2.moe.experts.w2"].endswith(", ".join(sorted(where)))


def test_dtype_and_vocabulary_change_on_the_way(tmp_path: Path, small_files: None) -> None:
    save_transformers("llama2", tmp_path / "hf")
    before = open_weights(tmp_path / "hf")
    for size in (101, 90):
        out = _convert(
            "hf-to-dcp",
            tmp_path / "hf",
            tmp_path / str(size),
            dtype=torch.bfloat16,
            vocab_size=size,
            verify=True,
        )
        after = open_weights(out)
        assert after.args.vocab_size == size and after.tensors.keys() == before.tensors.keys()
        for name in before.tensors:
            was, now = before.read(name), after.read(name)
            kept = min(len(was), len(now))
            assert now.dtype == torch.bfloat16 and now[:kept].equal(was[:kept].bfloat16())
            if name in ("tok_embeddings.weight", "output.weight"):
                assert len(now) == size
                torch.testing.assert_close(
                    now[kept:], was.mean(0).bfloat16().expand(size - kept, -1), rtol=2**-8, atol=1e-6
                )
            else:
                assert now.shape == was.shape


def test_a_converted_checkpoint_loads_as_any_other(tmp_path: Path, small_files: None) -> None:
    save_transformers("llama3", tmp_path / "hf")
    step = _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "step-7")
    assert step == tmp_path / "step-7"
    source = open_weights(tmp_path / "hf")
    target = {f"model.{name}": torch.zeros(it.shape) for name, it in source.tensors.items()}
    manifest = CheckpointManager(tmp_path).load(7, target)
    assert all(target[f"model.{name}"].equal(source.read(name)) for name in source.tensors)
    assert manifest["run"]["model_only"] and manifest["run"]["model"]["n_kv_heads"] == 2


def test_few_files_and_tensors_are_in_memory_on_any_number_of_cores(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_transformers("llama3", tmp_path / "hf")
    started: list[tuple[str, int]] = []
    for module in (dcp_write, conversion_module):

        def pool(count: int, where: str = module.__name__.rpartition(".")[2]) -> ThreadPoolExecutor:
            started.append((where, count))
            return ThreadPoolExecutor(count)

        monkeypatch.setattr(module, "ThreadPoolExecutor", pool)
        monkeypatch.setattr(module, "threads", lambda: 64)
    _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", verify=True)
    assert started == [("dcp_write", 4), ("convert", 4)]


# Kills


def _convert_and_die(way: str, source: Path, out: Path, reads: int) -> None:
    """Be killed after so many tensors were read."""
    conversion = prepare(way, source, out, max_bytes=20_000)
    read, calls = type(conversion.source).read, []

    def counted(self: Any, name: str, *rest: Any) -> Tensor:
        if len(calls) == reads:
            os._exit(9)
        calls.append(name)
        return read(self, name, *rest)

    type(conversion.source).read = counted  # type: ignore[method-assign]
    convert(conversion)


@pytest.mark.parametrize("way", ["hf-to-dcp", "hf-to-meta", "dcp-to-hf"])
def test_what_was_killed_leaves_nothing_that_looks_whole_and_is_done_again(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_transformers("llama3", tmp_path / "hf", files=2)
    start = tmp_path / "hf"
    if way.startswith("dcp"):
        start = _convert("hf-to-dcp", start, tmp_path / "start")
    with pytest.raises(RuntimeError, match="died"):
        run_world(_convert_and_die, 1, way, start, tmp_path / "out", 25)
    conversion = prepare(way, start, tmp_path / "out", max_bytes=20_000)
    [work] = [path for path in tmp_path.rglob("*.tmp-*")]
    assert not conversion.out.exists()
    read, calls = type(conversion.source).read, []

    def counted(self: Any, name: str, *rest: Any) -> Tensor:
        calls.append(name)
        return read(self, name, *rest)

    done: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(type(conversion.source), "read", counted)
        convert(conversion, progress=done.append)
    finished = 0 if way != "dcp-to-hf" else len(conversion.source.tensors) - len(calls)
    assert finished > 0 if way == "dcp-to-hf" else len(calls) >= len(conversion.source.tensors)
    assert sum(done) == conversion.bytes and not work.exists()
    anew = prepare(way, start, tmp_path / "anew", max_bytes=20_000)
    convert(anew)
    ours, theirs = open_weights(conversion.out), open_weights(anew.out)
    assert ours.tensors == theirs.tensors
    assert all(ours.read(name).equal(theirs.read(name)) for name in theirs.tensors)
    assert sorted(path.name for path in conversion.out.iterdir()) == sorted(
        p.name for p in anew.out.iterdir()
    )
    assert not list(tmp_path.rglob("*.lock"))


def test_another_source_does_not_go_on_with_what_is_there(tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    conversion = prepare("hf-to-meta", tmp_path / "hf", tmp_path / "out")

    def begin(source: WeightSource) -> Path:
        with ExitStack() as held:
            return folder_write._begin(source, conversion.out, _EMPTY, False, held)

    work = begin(conversion.source)
    (tmp_path / "hf" / "out.lock").touch()  # of an output inside, whose process was killed
    assert begin(conversion.source) == work
    save_transformers("llama3", tmp_path / "hf")
    assert begin(open_weights(tmp_path / "hf")) != work


_EMPTY = folder_write.Folder({}, {}, lambda path, names: None, SafetensorsFolder)


def test_another_tokenizer_goes_on_without_the_files_of_the_one_before(tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    source, out = open_weights(tmp_path / "hf"), tmp_path / "out"

    def write(*names: str, check: Any = None) -> None:
        folder = replace(_EMPTY, others={name: b"" for name in names}, open=lambda _: source)
        ranks = Ranks(alone=True)
        folder_write.write_folder(source, out, folder, ranks=ranks, progress=no_progress, check=check)

    def stop(_: WeightSource) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("tokenizer.json", check=stop)
    write("tokenizer.model")
    assert [path.name for path in out.iterdir()] == ["tokenizer.model"]


@pytest.mark.parametrize("way", ["hf-to-meta", "hf-to-dcp"])
def test_one_process_at_a_time_writes_an_output(way: str, tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    first, second = (prepare(way, tmp_path / "hf", tmp_path / "out") for _ in range(2))
    other = prepare(way, tmp_path / "hf", tmp_path / "out", dtype=torch.bfloat16)
    said: list[str] = []

    def meanwhile(count: int) -> None:
        for conversion in (second, other) if not said else ():
            with pytest.raises(DataError) as refused:
                convert(conversion)
            said.append(str(refused.value))

    convert(first, progress=meanwhile, verify=True)
    assert len(said) == 2 and all(f"process {os.getpid()} on " in one for one in said)
    with pytest.raises(DataError, match="exists: choose"):
        convert(second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    if way == "hf-to-dcp":
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-0"]


def test_a_conversion_waits_for_no_run_that_saves_in_the_same_folder(tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    with claim(tmp_path / "checkpoint"), pytest.raises(DataError, match="is writing .*step-0"):
        _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["run.lock"]


@pytest.mark.parametrize("way", ["meta-to-hf", "hf-to-meta", "hf-to-dcp"])
def test_a_full_disk_is_told_and_the_same_command_goes_on(way: str, tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    start = tmp_path / "hf"
    if way.startswith("meta"):
        start = _convert("hf-to-meta", start, tmp_path / "meta")
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # a file that grows beyond it is an OSError
    try:
        with pytest.raises(
            CheckpointError, match="could not be written: .*(File too large|as on a full disk)"
        ):
            _convert(way, start, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    out = _convert(way, start, tmp_path / "out", verify=True)
    assert out.exists() and {path.name for path in tmp_path.iterdir()} == before | {"out"}


# Mistakes


def _refused(way: str, source: Path, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        _convert(way, source, tmp_path / "out", **options)
    assert not list(tmp_path.glob("out*")), "something was left"
    return str(error.value)


def _changed(folder: Path, change: dict[str, Tensor | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors"
    )


def test_what_does_not_fit_the_config_is_listed_by_name(tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    change: dict[str, Tensor | None] = {
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.9.mlp.up_proj.weight": torch.zeros(48, 32),
        "model.norm.weight": torch.zeros(31),
    }
    _changed(tmp_path / "hf", change)
    said = _refused("hf-to-dcp", tmp_path / "hf", tmp_path)
    assert "missing: layers.1.feed_forward.w3.weight" in said
    assert "unexpected: model.layers.9.mlp.up_proj.weight (not of this model)" in said
    assert "of another shape: norm.weight (31,) instead of (32,)" in said


def test_integers_are_no_weights(tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    run = {"model": asdict(open_weights(tmp_path / "hf").args)}
    _changed(tmp_path / "hf", {"model.norm.weight": torch.zeros(32, dtype=torch.int8)})
    assert "model.norm.weight as I8" in _refused("hf-to-meta", tmp_path / "hf", tmp_path)
    CheckpointManager(tmp_path).save(1, {"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, run)
    said = _refused("dcp-to-hf", tmp_path / "step-1", tmp_path)
    assert "not floating-point: norm.weight int32" in said and "missing: tok_embeddings.weight" in said


def test_a_failure_removes_nothing_but_its_own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_transformers("llama3", tmp_path / "hf")
    read = SafetensorsFolder.read

    def another_comes(self: SafetensorsFolder, *arguments: Any) -> Tensor:
        (tmp_path / "out" / "step-9").mkdir(exist_ok=True)
        if arguments[0] == "norm.weight":
            raise DataError("damaged")
        return read(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(DataError, match="damaged"):
        patched.setattr(SafetensorsFolder, "read", another_comes)
        _convert("hf-to-dcp", tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-9"]


@pytest.mark.parametrize("way", ["hf-to-dcp", "hf-to-meta"])
def test_nan_is_found_by_verify(way: str, tmp_path: Path) -> None:
    save_transformers("llama3", tmp_path / "hf")
    broken = torch.ones(48, 32)
    broken[47, 31] = float("nan")
    _changed(tmp_path / "hf", {"model.layers.2.mlp.up_proj.weight": broken})
    assert "with NaN or infinity: layers.2.feed_forward.w3.weight" in _refused(
        way, tmp_path / "hf", tmp_path, verify=True
    )
    _convert(way, tmp_path / "hf", tmp_path / "out")  # who does not ask gets what is there


def test_verify_finds_a_bit_that_was_written_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_transformers("llama3", tmp_path / "hf")
    save = hf_write.save_file

    def wrong(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        tensors["model.norm.weight"].view(torch.uint8)[40] ^= 1
        save(tensors, *arguments, **options)

    monkeypatch.setattr(hf_write, "save_file", wrong)
    _convert("hf-to-meta", tmp_path / "hf", tmp_path / "meta")
    said = _refused("meta-to-hf", tmp_path / "meta", tmp_path, verify=True)
    assert "different after writing: norm.weight" in said


@pytest.mark.parametrize("way", ["hf-to-meta", "hf-to-dcp"])
def test_verify_finds_a_shape_that_was_written_wrong(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_transformers("llama3", tmp_path / "hf")
    opened = {"hf-to-meta": MetaFolder, "hf-to-dcp": CheckpointWeights}[way]
    init = opened.__init__

    def misread(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.args = replace(self.args, rope_theta=1.0)

    monkeypatch.setattr(opened, "__init__", misread)
    said = _refused(way, tmp_path / "hf", tmp_path, verify=True)
    assert "wrong model args: rope_theta 1.0 instead of 500000.0" in said


def test_what_cannot_be_meant_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_transformers("llama3", tmp_path / "hf")

    def said(*words: object) -> str:
        assert run_command("convert", [str(word) for word in words]) == EXIT_DATA
        return capsys.readouterr().err

    assert "use hf-to-meta or hf-to-dcp" in said("meta-to-hf", tmp_path / "hf", tmp_path / "out")
    assert "does not exist" in said("dcp-to-hf", tmp_path / "none", tmp_path / "out")
    assert "exists: choose" in said("hf-to-meta", tmp_path / "hf", tmp_path / "hf")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert f"is a link: use the folder {tmp_path}/elsewhere" in said(
        "hf-to-meta", tmp_path / "hf", tmp_path / "link"
    )
    assert not list(tmp_path.glob("link.tmp-*"))
    tokenizer = ASSETS / "tokenizer"
    assert "--vocab-size" in said("hf-to-meta", tmp_path / "hf", tmp_path / "out", "--tokenizer", tokenizer)
    assert not (tmp_path / "out").exists()


def test_names_of_folders_may_be_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_transformers("llama3", tmp_path / "hf")
    monkeypatch.chdir(tmp_path / "hf")
    _convert("hf-to-meta", Path("."), Path("../meta/original"))
    (tmp_path / "meta" / "tokenizer.model").symlink_to(ASSETS / "tokenizer" / "tokenizer.model")
    monkeypatch.chdir(tmp_path / "meta" / "original")
    options = {"vocab_size": 4096}
    assert prepare("meta-to-dcp", Path("."), Path("../out"), **options).companions.place == tmp_path / "meta"
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert _convert("hf-to-meta", Path("../hf"), Path(".")) == tmp_path / "new"
    assert (tmp_path / "new" / "params.json").exists()


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("toolkit.weights.convert.open_adapted", lambda path, **_: denied(path))
    assert f"{tmp_path}/hf cannot be read: Permission denied" in _refused(
        "hf-to-dcp", tmp_path / "hf", tmp_path
    )


def test_the_program_tells_the_mapping_and_carries_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_transformers("llama3", tmp_path / "hf")
    tokenizer = ASSETS / "tokenizer"
    words = ["hf-to-dcp", str(tmp_path / "hf"), str(tmp_path / "out")]
    assert run_command("convert", [*words, "--dry-run"]) == EXIT_FINISHED
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "out").exists() and len(lines) == 30
    [line] = [line for line in lines if line.startswith("layers.2.attention.wk.weight")]
    assert line.endswith(
        "(8, 32) float32 -> model.layers.2.attention.wk.weight (8, 32) float32 in step-0, rows reordered"
    )
    words += ["--tokenizer", str(tokenizer), "--vocab-size", "4096", "--verify"]
    assert run_command("convert", words) == EXIT_FINISHED
    assert "--checkpoint.initial_load_path" in capsys.readouterr().out
    assert (
        run_command("convert", ["dcp-to-hf", str(tmp_path / "out"), str(tmp_path / "hf2")]) == EXIT_FINISHED
    )
    for file in tokenizer.iterdir():
        if file.name.startswith("tokenizer"):
            assert (tmp_path / "hf2" / file.name).read_bytes() == file.read_bytes()
    assert "tokenizer.model" not in capsys.readouterr().out
    for given in (tmp_path / "hf2", tmp_path / "hf"):
        out = tmp_path / f"meta-{given.name}"
        assert run_command("convert", ["hf-to-meta", str(given), str(out)]) == EXIT_FINISHED
        there = (given / "tokenizer.model").exists()
        assert (out / "tokenizer.model").exists() == there
        assert ("no tokenizer.model next to it" in capsys.readouterr().out) == (not there)
    config = json.loads((tmp_path / "hf2" / "config.json").read_text())
    assert config["vocab_size"] == 4096
    ids = load_tokenizer(tokenizer)  # in place of those that hf says, which are of another tokenizer
    assert (config["bos_token_id"], config["eos_token_id"]) == (ids.bos_id, [*ids.stop_ids])
