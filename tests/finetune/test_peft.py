"""Adapters go to PEFT and come from it with the same logits, and merged they are the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.finetune.adapters import ARGS, KINDS, TOKENS, OfModel, adapted, adapter_of, check_close, logits
from tests.models.families import FAMILIES, read, save_transformers
from tests.models.small_llama import build, small
from tests.models.test_transformers import theirs
from toolkit.config.finetune import Finetune
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapter, open_adapter_on
from toolkit.finetune.peft_config import unsupported_by_peft
from toolkit.finetune.peft_folder import write_peft
from toolkit.models.common.args import Classifier
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TARGETS_TOO = {"trainable": ["layers.0.attention.wq.weight", "layers.1.feed_forward.w2.weight"]}
MERGED = {kind: KINDS[kind] for kind in KINDS if KINDS[kind]["adapter"] == "lora"} | {
    f"{kind}, targets too": KINDS[kind] | TARGETS_TOO for kind in ("lora", "dora")
}


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_is_written(kind: str, tmp_path: Path) -> None:
    options = Finetune.model_validate(KINDS[kind])
    adapter = adapter_of(options, ARGS, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    base = theirs(build(ARGS, torch.float32))
    found = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    expected = logits(adapted(adapter))
    check_close(logits(found), expected)
    assert (logits(build(ARGS, torch.float32)) - expected).abs().max() > 0.05 * expected.abs().max()


EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, family in FAMILIES.items()
        for kind in ("lora", "dora", "prefix")
        if kind != "prefix"
        or not {"sliding_window", "attention_chunk_size", "kv_lora_rank"} & family.options.keys()
        if kind != "dora"
        or not {"num_experts", "num_local_experts", "n_routed_experts"} & family.options.keys()
    ],
)
def test_peft_reads_what_is_written_for_other_families(name: str, kind: str, tmp_path: Path) -> None:
    """Heads of another size than dim gives, norms of heads, biases beside the weights that are updated."""
    reference = save_transformers(tmp_path / "base", name, tied=True)
    args = read(tmp_path / "base").args
    adapter = adapter_of(Finetune.model_validate(KINDS[kind]), args, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    found = peft.PeftModel.from_pretrained(reference, str(tmp_path / "peft"))
    expected = logits(adapted(adapter, lambda model: read(tmp_path / "base")))
    check_close(logits(found), expected)
    assert (logits(read(tmp_path / "base")) - expected).abs().max() > 0.05 * expected.abs().max()


def test_peft_has_no_format_for_what_it_would_apply_to_experts() -> None:
    args = resolve("qwen3_moe", "debugmodel")
    assert args.moe is not None
    partly_dense = replace(args, moe=replace(args.moe, first_dense=1))
    lora = Finetune.model_validate(KINDS["lora"])
    dora = Finetune.model_validate(KINDS["dora"])
    assert not unsupported_by_peft(args, lora)
    assert not unsupported_by_peft(partly_dense, lora)
    assert "it has no DoRA of model.layers.0.mlp.down_proj.weight" in unsupported_by_peft(partly_dense, dora)
    trained = ["layers.0.moe.router.gate.weight", "layers.0.moe.experts.w1"]
    assert not unsupported_by_peft(args, lora, trained[:1])
    assert "cannot save experts, such as layers.0.moe.experts.w1" in unsupported_by_peft(args, lora, trained)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_peft_writes_for_other_families_is_read_and_merged(name: str, kind: str, tmp_path: Path) -> None:
    config = their_config(kind)
    if "kv_lora_rank" in FAMILIES[name].options:
        config.target_modules = {"q_a_proj", "q_b_proj", "q_proj", "kv_b_proj", "o_proj"}
    found = peft.get_peft_model(save_transformers(tmp_path / "base", name), config).eval()
    _train_and_save(found, tmp_path / "peft")
    base = SafetensorsFolder(tmp_path / "base")
    adapter = open_adapter_on(tmp_path / "peft", base)
    check_close(logits(adapted(adapter, lambda model: read(tmp_path / "base"))), logits(found))
    merged, model = Merged(base, adapter), read(tmp_path / "base")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(merged.read(parameter_name))
    # Each merged weight is rounded once more, which these updates, as large as the weights, show.
    check_close(logits(model), logits(found), 3e-5)


def their_config(kind: str) -> Any:
    task = {"task_type": "CAUSAL_LM"}
    if kind == "prefix":
        return peft.PrefixTuningConfig(num_virtual_tokens=5, **task)
    if kind == "adaption prompt":
        return peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **task)
    targets = {"rslora": "all-linear", "some blocks": r".*layers\.1\..*(q|down)_proj"}
    targets["head and embedding"] = ["q_proj", "lm_head", "embed_tokens"]
    return peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_dora=kind == "dora",
        use_rslora=kind == "rslora",
        target_modules=targets.get(kind, ["q_proj", "k_proj", "v_proj"]),
        modules_to_save=["model.norm"] if kind == "norms too" else None,
        **task,
    )


def _train_and_save(model: Any, folder: Path) -> None:
    """Give all that PEFT would train other values, and have it write them."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.abs() + torch.rand_like(parameter) * 0.3)
    model.save_pretrained(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_writes_is_read(kind: str, tmp_path: Path) -> None:
    model = build(ARGS, torch.float32)
    found = peft.get_peft_model(theirs(model), their_config(kind)).eval()
    _train_and_save(found, tmp_path / "peft")
    adapter = open_adapter_on(tmp_path / "peft", OfModel(model, tmp_path))
    check_close(logits(adapted(adapter)), logits(found))


CLASSIFIER = replace(ARGS, classifier=Classifier(("calm", "glad", "sad")))


def _their_classifier() -> transformers.LlamaForSequenceClassification:
    """One with the backbone of the others, and a head of its own that an adapter replaces."""
    base = theirs(build(ARGS, torch.float32))
    base.config.num_labels, base.config.pad_token_id = 3, 0
    classifier = transformers.LlamaForSequenceClassification(base.config)
    classifier.model.load_state_dict(base.model.state_dict())
    return classifier


def _check_scores(found: Any, ours: Decoder) -> None:
    check_close(logits(found, TOKENS.clamp(min=1)), logits(ours, TOKENS.clamp(min=1))[:, -1])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_classifier_beside_its_adapter_goes_to_peft(kind: str, tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(KINDS[kind]), CLASSIFIER, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    base = _their_classifier()
    before = logits(base, TOKENS.clamp(min=1))
    found = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    assert type(found).__name__ == "PeftModelForSequenceClassification"
    _check_scores(found, adapted(adapter, _with_backbone))
    assert (logits(found, TOKENS.clamp(min=1)) - before).abs().max() > 0.05 * before.abs().max()
    with pytest.raises(DataError, match="is the adapter of a classifier"):
        open_adapter(tmp_path / "peft", ARGS)


def _with_backbone(model: Decoder) -> Decoder:
    state = build(ARGS, torch.float32).state_dict()
    model.load_state_dict({name: it for name, it in state.items() if "output" not in name}, strict=False)
    return model


def test_a_classifier_of_peft_is_read(tmp_path: Path) -> None:
    config = their_config("dora")
    config.task_type = "SEQ_CLS"
    found = peft.get_peft_model(_their_classifier(), config).eval()
    _train_and_save(found, tmp_path / "peft")
    adapter = open_adapter(tmp_path / "peft", CLASSIFIER)
    assert adapter.options.trainable == [] and adapter.values["output.weight"].shape == (3, ARGS.dim)
    _check_scores(found, adapted(adapter, _with_backbone))


@pytest.mark.parametrize("kind", MERGED)
def test_merged_is_unmerged(kind: str, tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(MERGED[kind]), ARGS, tmp_path)
    model = build(ARGS, torch.float32)
    merged: WeightSource = Merged(OfModel(model, tmp_path), adapter)
    for name, parameter in model.named_parameters():
        rows, columns = (*parameter.shape, 1)[:2]
        region = [slice(1, rows - 1), slice(3, columns - 2)][: parameter.ndim]
        whole = merged.read(name)
        torch.testing.assert_close(merged.read(name, region), whole[tuple(region)], rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            parameter.copy_(whole)
    check_close(logits(model), logits(adapted(adapter)))


def test_a_prefix_goes_there_and_back(tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(KINDS["prefix"]), ARGS, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    back = open_adapter_on(tmp_path / "peft", OfModel(build(ARGS, torch.float32), tmp_path))
    assert back.options == adapter.options
    for name, value in adapter.values.items():
        torch.testing.assert_close(back.values[name], value, rtol=1e-5, atol=1e-6)


def _change(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _saved_twice(folder: Path) -> None:
    (folder / "adapter_model.bin").touch()


def _integers(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.model.position_ids": torch.arange(9)}, path)


def _half_a_head(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, path)


def _renamed(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name.replace("layers.", "blocks.")] = tensors.pop(name)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_change(peft_type="IA3"), 'peft_type = "IA3"'),
        (_change(r=0), "r = 0: must be a positive integer"),
        (_change(lora_alpha="x"), 'lora_alpha = "x": must be a positive number'),
        (_change(bias="all"), 'bias = "all"'),
        (_change(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (_change(init_lora_weights="pissa_niter_4"), "path_initial_model_for_weight_conversion"),
        (_change(r=8), "of another shape"),
        (_change(use_dora=True), "missing"),
        (_pickled, "has a pickle"),
        (
            _saved_twice,
            "an adapter in two formats, adapter_model.safetensors and adapter_model.bin\n  fix:  keep",
        ),
        (_integers, "position_ids as I64; an adapter's tensors must be one of F64, F32, F16, BF16"),
        (_half_a_head, "missing: base_model.model.lm_head.lora_B.weight"),
        (_renamed, "tensors that this model lacks"),
    ],
)
def test_bad_folders_are_one_message(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(KINDS["lora"]), ARGS, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    spoil(tmp_path / "peft")
    with pytest.raises(DataError, match=said) as raised:
        open_adapter_on(tmp_path / "peft", OfModel(build(ARGS, torch.float32), tmp_path))
    assert "peft" in str(raised.value)


def test_a_tied_embedding_that_is_trained_has_no_form_there(tmp_path: Path) -> None:
    """They would train, and keep, the embedding apart from the head."""
    reference = save_transformers(tmp_path / "base", "mistral-nemo", tied=True)
    args = read(tmp_path / "base").args
    options = Finetune.model_validate(KINDS["lora"] | {"trainable": ["tok_embeddings.weight"]})
    adapter = adapter_of(options, args, tmp_path / "step")
    with pytest.raises(DataError, match="not train the head, which is tied"):
        write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    config = their_config("lora")
    config.modules_to_save = ["embed_tokens"]
    _train_and_save(peft.get_peft_model(reference, config), tmp_path / "theirs")
    with pytest.raises(DataError, match="without the head, but they are tied"):
        open_adapter(tmp_path / "theirs", args)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = adapter_of(Finetune.model_validate(KINDS["lora"]), ARGS, tmp_path / "step")
    write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    wider = build(replace(ARGS, ffn_dim=104), torch.float32)
    with pytest.raises(DataError, match="is of another model"):
        open_adapter_on(tmp_path / "peft", OfModel(wider, tmp_path))


def test_a_gate_for_each_head_has_no_form_there(tmp_path: Path) -> None:
    options = Finetune.model_validate({"adapter": "llama_adapter"})
    adapter = adapter_of(options, ARGS, tmp_path / "step")
    with pytest.raises(DataError, match="finetune.llama_adapter.gate"):
        write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))


def test_a_prefix_before_a_window_has_no_form_there(tmp_path: Path) -> None:
    """Their tokens lose sight of a prefix after the window, ours never."""
    reference = save_transformers(tmp_path / "base", "mistral0.1")
    args = read(tmp_path / "base").args
    adapter = adapter_of(Finetune.model_validate(KINDS["prefix"]), args, tmp_path / "step")
    with pytest.raises(DataError, match="it would apply the model's sliding window"):
        write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    _train_and_save(peft.get_peft_model(reference, their_config("prefix")), tmp_path / "peft")
    with pytest.raises(DataError, match="PEFT applies the model's sliding window to the prefix"):
        open_adapter(tmp_path / "peft", args)


def test_halves_of_layers_targets_of_their_own_and_prompts_beside_biases_have_no_form_there(
    tmp_path: Path,
) -> None:
    args = small("qwen2.5", head_dim=8)
    for kind, change, said in (
        ("lora", {"trainable": ["*.wq.bias"]}, "only the bias of layers.0.attention.wq is trained"),
        (
            "lora",
            {"trainable": ["*.wk.weight"], "lora": {"target_modules": ["w2"]}},
            "only the weight of layers.0.attention.wk is trained",
        ),
        ("lora", TARGETS_TOO, "such as layers.0.attention.wq"),
        ("adaption prompt", {}, "without norms and biases"),
    ):
        adapter = adapter_of(Finetune.model_validate(KINDS[kind] | change), args, tmp_path / kind)
        with pytest.raises(DataError, match=said):
            write_peft(adapter, tmp_path / "peft", dtype=torch.float32, others={}, ranks=Ranks(alone=True))
