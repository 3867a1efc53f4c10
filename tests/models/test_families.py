"""Other families than Llama: the numbers of transformers' models, which are not ours, and published sizes."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.models.families import FAMILIES, RELEASES, published, read, save_transformers
from tests.models.small_llama import tokens_and_labels
from tests.weights.stories import empty_model
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.config.schema import registry
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.generation.generator import Generator
from toolkit.models.common.args import Classifier
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.parameter_table import Init
from toolkit.models.common.spec import ModelSpec
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import init_rule, parameter_count, parameter_shapes, table
from toolkit.models.registry import presets, resolve, spec
from toolkit.weights.convert import convert, prepare
from toolkit.weights.export import export_hf
from toolkit.weights.load import load_weights
from toolkit.weights.safetensors import SafetensorsFolder

TRL = importlib.util.find_spec("trl")
every_family = pytest.mark.parametrize("name", FAMILIES)
every_model_name = pytest.mark.parametrize("name", [name for name in FAMILIES if name in presets()])
PARAMETERS = {name: family.parameters for name, family in FAMILIES.items()} | RELEASES
SIZES = [(name, flavor) for name, sizes in PARAMETERS.items() for flavor in sizes]


@pytest.mark.parametrize(("name", "flavor"), SIZES)
def test_sizes_are_those_that_were_published(name: str, flavor: str, tmp_path: Path) -> None:
    """And each parameter has name and shape of the one of transformers' model of that config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    args = presets()[name][flavor]
    form, rows = spec(args.family).hf_config(), table(args)
    fields = form.write(args, dtype="bfloat16", bos=None, eos=None, pad=None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_hf_config(tmp_path) == args
    with torch.device("meta"):
        ours = {name: it.shape for name, it in Decoder(args).state_dict().items()}
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    stored = dict(theirs.named_parameters())
    stored |= {key: it for key, it in theirs.named_buffers() if key in theirs.state_dict()}
    named = published(theirs, stored)
    assert ours == rows.shapes and rows.hf_shapes == {name: tuple(it.shape) for name, it in named.items()}
    found = sum(it.numel() for it in theirs.parameters())
    assert parameter_count(args) == found == PARAMETERS[name][flavor]


@pytest.mark.parametrize(
    ("name", "flavor"), [(name, flavor) for name, family in FAMILIES.items() for flavor in family.active]
)
def test_active_parameters_are_those_of_the_chosen_experts(name: str, flavor: str) -> None:
    rows = table(presets()[name][flavor]).values()
    assert sum(row.active_size for row in rows if not row.buffer) == FAMILIES[name].active[flavor]


@pytest.mark.parametrize("tied", [False, True])
@every_family
def test_logits_loss_and_gradients(name: str, tied: bool, tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, name, tied=tied), read(tmp_path)
    tokens, labels = tokens_and_labels(2, 200)
    logits = reference(input_ids=tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    loss = model(tokens, labels=labels) / (labels != -100).sum()
    loss.backward()
    found = model(tokens)
    # fp32 rounding, the reference's fp32 angles above all; logits are of order 3.
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert abs(loss - expected) < 1e-6 * expected
    reference_grads = published(reference, {name: it.grad for name, it in reference.named_parameters()})
    rows = table(model.args)
    for parameter_name, parameter in model.named_parameters():
        row, ours = rows[parameter_name], parameter.grad
        theirs = torch.stack([reference_grads[it] for it in row.hf_names])
        if not row.experts or row.fused:
            [theirs] = theirs
        if row.fused:
            theirs = theirs[..., row.fused.columns(row.shape[1])].movedim(-1, 1)
        if row.rotary:
            pairs = ours.unflatten(0, (-1, model.args.head_dim // 2, 2))
            ours = pairs.transpose(1, 2).reshape(theirs.shape)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), parameter_name


@every_family
def test_documents_of_a_row_are_what_they_are_alone(name: str, tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, name), read(tmp_path)
    tokens, _ = tokens_and_labels(1, 120)
    lengths = (50, 1, 69)  # of which two are longer than the windows of these models
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        found = model(tokens, documents=documents, positions=positions).split(lengths, dim=1)
        alone = [reference(input_ids=part).logits for part in tokens.split(lengths, dim=1)]
    for ours, theirs in zip(found, alone, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@every_family
def test_greedy_text(name: str, tmp_path: Path) -> None:
    reference, model = save_transformers(tmp_path, name), read(tmp_path)
    prompt = tokens_and_labels(1, 9)[0]
    out = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    expected = out[0, prompt.shape[1] :].tolist()
    assert Generator(model).generate([prompt[0].tolist()], max_new_tokens=100)[0] == expected
    assert len(set(expected)) > 20, "a text of few tokens shows no mistake"


@pytest.mark.parametrize("tied", [False, True])
@every_family
def test_files_of_hugging_face_come_back_as_they_were(name: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_transformers(tmp_path / "hf", name, tied=tied)
    before = _there_and_back(tmp_path)
    assert read_hf_config(tmp_path / "back") == read_hf_config(tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again).__name__ == f"{FAMILIES[name].theirs}ForCausalLM"
    after = published(again, again.state_dict())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def _there_and_back(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in ``folder``/hf, once they came back from a checkpoint to the last bit."""
    for step, here, there in (("hf-to-dcp", "hf", "dcp"), ("dcp-to-hf", "dcp", "back")):
        convert(prepare(step, folder / here, folder / there), verify=True)
    return _check_alike(folder)


def _check_alike(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in ``folder``/hf, which are those in ``folder``/back to the last bit."""
    from safetensors.torch import load_file

    before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return before


def _through_a_mesh(folder: str) -> None:
    """Have each family's files read into a model split by tp and FSDP, saved by it, and written again."""
    for name in FAMILIES:
        source = SafetensorsFolder(Path(folder, name, "hf"))
        model = empty_model(source.args, {"tensor_parallel_degree": 2})
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        load_weights(source, named)
        whole = {key: it.full_tensor() if isinstance(it, DTensor) else it for key, it in named.items()}
        assert all(torch.equal(it, source.read(key)) for key, it in whole.items()), name
        tensors = {f"model.{key}": parameter for key, parameter in named.items()}
        step = CheckpointManager(Path(folder, name)).save(1, tensors, {"model": asdict(source.args)})
        back = Path(folder, name, "back")
        export_hf(step, back, dtype=torch.float32, tokenizer_path=None, ranks=Ranks())


def test_files_come_back_as_they_were_from_a_mesh(tmp_path: Path) -> None:
    for name in FAMILIES:
        save_transformers(tmp_path / name / "hf", name, vocab=308)
    run_world(_through_a_mesh, 4, str(tmp_path))
    for name in FAMILIES:
        _check_alike(tmp_path / name)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifies])
def test_a_classifier_gives_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_transformers(tmp_path / "hf", name, kind="SequenceClassification")
    model, tokens = read(tmp_path / "hf"), tokens_and_labels(2, 50)[0].clamp(min=1)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, -1], reference(tokens).logits, atol=1e-5, rtol=1e-5)
    _there_and_back(tmp_path)


def test_a_classifier_that_transformers_lacks_is_not_written() -> None:
    args = replace(resolve("llama4", "debugmodel"), classifier=Classifier(("a", "b")))
    with pytest.raises(DataError, match="transformers has no Llama4ForSequenceClassification"):
        spec("llama4").hf_config().write(args, dtype="float32", bos=None, eos=None, pad=None)


@every_family
def test_metas_files_cannot_hold_it(name: str, tmp_path: Path) -> None:
    save_transformers(tmp_path / "hf", name)
    called = f"is a {FAMILIES[name].theirs}, which Meta's format does not support"
    with pytest.raises(DataError, match=called):
        prepare("hf-to-meta", tmp_path / "hf", tmp_path / "meta")
    convert(prepare("hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", vocab_size=320))
    with pytest.raises(DataError, match="Meta's format does not support"):
        prepare("dcp-to-meta", tmp_path / "dcp", tmp_path / "meta")


def _config_without(folder: Path, name: str, *keys: str, **fields: Any) -> Path:
    """config.json of the family's debug model without ``keys`` and with other ``fields``."""
    args = resolve(name, "debugmodel")
    values = spec(args.family).hf_config().write(args, dtype="float32", bos=None, eos=None, pad=None)
    values = {key: value for key, value in values.items() if key not in keys} | fields
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@every_model_name
def test_an_absent_field_is_what_it_is_for_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    optional = ("head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings")
    absent = (*optional, "num_key_value_heads", "use_sliding_window")  # which leaves the window unused
    without = (
        name in ("mixtral", "llama4") or "kv_lora_rank" in FAMILIES[name].options
    )  # these have no such switch
    window = {} if without else {"sliding_window": 4096}
    folder = _config_without(tmp_path, name, *absent, num_attention_heads=32, **window)
    args, theirs = read_hf_config(folder), AutoConfig.from_pretrained(folder)
    even = theirs.hidden_size // theirs.num_attention_heads
    assert args.rope_dim == (getattr(theirs, "head_dim", None) or even)
    assert args.norm_eps == theirs.rms_norm_eps
    # transformers' default for latent attention is 128, of which nothing depends.
    assert args.n_kv_heads == (args.n_heads if args.mla else theirs.num_key_value_heads)
    assert args.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (args.max_seq_len, args.tie_embeddings) == (
        theirs.max_position_embeddings,
        theirs.tie_word_embeddings,
    )
    windows = [args.window(layer) for layer in range(args.n_layers)]
    local = "chunked_attention" if args.irope else "sliding_attention"
    layer_types = ["full_attention" if window is None else local for window in windows]
    assert getattr(theirs, "layer_types", layer_types) == layer_types


@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5", "qwen3"])
def test_null_key_heads_are_as_many_as_heads(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = _config_without(tmp_path, name, num_key_value_heads=None, num_attention_heads=64)
    assert read_hf_config(folder).n_kv_heads == AutoConfig.from_pretrained(folder).num_key_value_heads == 64


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 64}], ids=str)
def test_the_window_of_a_mistral_is_what_it_is_for_transformers(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    folder = _config_without(tmp_path, "mistral0.1", "sliding_window", **fields)
    args = read_hf_config(folder)
    assert args.sliding_window == AutoConfig.from_pretrained(folder).sliding_window
    written = spec("mistral").hf_config().write(args, dtype="float32", bos=1, eos=2, pad=None)
    assert written["sliding_window"] == args.sliding_window
    (folder / "config.json").write_text(json.dumps(written | {"sliding_window": 0}))
    with pytest.raises(DataError, match="sliding_window = 0: must be a positive integer"):
        read_hf_config(folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = true: must be false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ],
)
@every_model_name
def test_what_would_compute_something_else_is_refused(
    name: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read_hf_config(_config_without(tmp_path, name, **fields))
    assert says in str(caught.value)


def test_a_registered_family_may_have_another_name_than_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(ModelSpec):
        def hf_config(self) -> HFConfig:
            return HFConfig("own_type", "OwnForCausalLM", "an Own", 256)

    monkeypatch.setitem(registry("model.name"), "own", Own({}))
    args = replace(resolve("llama2", "debugmodel"), family="own")
    values = spec("own").hf_config().write(args, dtype="float32", bos=None, eos=None, pad=None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_hf_config(tmp_path) == args


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in presets() and name != "gpt_oss"])
def test_biases_of_attention_are_refused_of_families_without_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="attention_bias = true: must be false: the output projection of a"):
        read_hf_config(_config_without(tmp_path, name, attention_bias=True))


WINDOWLESS = [name for name in PARAMETERS if "mistral" not in name and name != "gpt_oss" and PARAMETERS[name]]


@pytest.mark.parametrize("name", WINDOWLESS)
def test_a_window_is_refused_of_families_without_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sliding_window = 64: must be absent"):
        read_hf_config(_config_without(tmp_path, name, use_sliding_window=True, sliding_window=64))


@pytest.mark.skipif(TRL is None, reason="trl is not installed")
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.template])
def test_chat_prompts(name: str, generation_prompt: bool, tmp_path: Path) -> None:
    """By a tokenizer with the word pattern of Qwen2 and later, and the template that comes with one."""
    from transformers import Qwen2Tokenizer

    assert TRL is not None and TRL.submodule_search_locations
    text = "The sky is blue, isn't it? 12345 naïve\u0301 北京\n\n\tIt's ✓  " * 9
    judge = Qwen2Tokenizer().train_new_from_iterator([text], vocab_size=320)
    judge.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    file = Path(TRL.submodule_search_locations[0]) / f"chat_templates/{FAMILIES[name].template}.jinja"
    judge.chat_template = file.read_text()
    judge.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.adds_bos and tokenizer.encode(text) == judge(text)["input_ids"]
    question, answer = {"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": "Yes."}
    for messages in (
        [question],
        [question, answer, question],
        [{"role": "system", "content": "Be brief.\n"}, question],
    ):
        found = chat_format(tokenizer).encode(messages, generation_prompt=generation_prompt)
        expected = judge.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, return_dict=False
        )
        assert found == list(expected)


def test_heads_of_a_qwen3_keep_their_size_with_another_dim() -> None:
    args = resolve("qwen3", "0.6B", dim=512, n_heads=8)
    assert (args.dim, args.n_heads, args.head_dim) == (512, 8, 128)
    with pytest.raises(KeyError, match="no model family gpt"):
        spec("gpt")


def test_biases_of_a_new_model_are_zero() -> None:
    args = resolve("qwen2.5", "debugmodel")
    with torch.device("meta"):
        named = {name: tuple(it.shape) for name, it in Decoder(args).named_parameters()}
    assert named == parameter_shapes(args) and list(named) == list(parameter_shapes(args))
    biases = [name for name in named if name.endswith(".bias")]
    assert len(biases) == 3 * args.n_layers and {init_rule(name, args) for name in biases} == {Init()}
