"""LoRA and NF4 of experts: what a layer computes, which targets it has, and how PEFT reads and writes it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.finetune.adapters import adapted, adapter_of, check_close, logits
from tests.finetune.test_parameters import built
from tests.helpers import run_world
from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.models.families import FAMILIES, read, save_transformers
from tests.training import small_config, small_trainer
from toolkit.config.finetune import Finetune, LoRA
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, DataError
from toolkit.finetune import nf4
from toolkit.finetune.apply import apply_finetune
from toolkit.finetune.lora import LoRALinear
from toolkit.finetune.lora_experts import LoRAExperts
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapter, open_adapter_on
from toolkit.finetune.parameters import all_shapes, is_added, lora_targets
from toolkit.finetune.peft_folder import write_peft
from toolkit.generation.load import load_model
from toolkit.models.common.args import MoEArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import Experts
from toolkit.models.common.swiglu import swiglu
from toolkit.models.parameters import adaptable
from toolkit.models.registry import resolve
from toolkit.weights.hf_write import SpecialTokens, write_hf
from toolkit.weights.safetensors import SafetensorsFolder

EXPERTS = 4
ARGS = MoEArgs(num_experts=EXPERTS, top_k=2, ffn_dim=128)
WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.active]


def _experts() -> Experts:
    torch.manual_seed(2)
    experts = Experts(64, ARGS).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def _routed(experts: Experts, x_TD: Tensor) -> Tensor:
    """The output for tokens of which no one chooses the third expert."""
    torch.manual_seed(3)
    weights_Tk = torch.rand(len(x_TD), 2, dtype=x_TD.dtype)
    experts_Tk = torch.tensor([0, 1, 3])[torch.rand(len(x_TD), 3).argsort(1)[:, :2]]
    return experts(x_TD, weights_Tk, experts_Tk)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("options", [LoRA(rank=3), LoRA(rank=3, use_rslora=True, alpha=2.0)])
def test_each_expert_is_a_feed_forward_of_lora_layers(options: LoRA, quantized: bool) -> None:
    layer = LoRAExperts(_experts(), options, ["w1", "w2", "w3"])
    for name, parameter in layer.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    if quantized:
        for name in ("w1", "w2", "w3"):
            packed = nf4.quantize(getattr(layer, name).detach())
            setattr(layer, name, nn.Parameter(packed, requires_grad=False))
    x_TD = torch.randn(50, 64, dtype=torch.float64, requires_grad=True)
    _routed(layer, x_TD).square().sum().backward()
    found = {name: it.grad for name, it in layer.named_parameters() if "lora" in name} | {"x": x_TD.grad}

    def linear(name: str, expert: int) -> Callable[[Tensor], Tensor]:
        weight = getattr(layer, name)[expert]
        plain = nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.float64)
        if quantized:
            plain.weight = nn.Parameter(nf4.dequantize(weight, torch.float64))
        else:
            plain.weight = nn.Parameter(weight)
        lora = LoRALinear(plain, options)
        for part in ("lora_a", "lora_b"):
            delattr(lora, part)
            setattr(lora, part, getattr(layer, f"{name}_{part}")[expert])
        return lora

    class Loop(nn.Module):
        num_experts = EXPERTS

        def __call__(self, x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
            out_TD = torch.zeros_like(x_TD)
            for expert in range(EXPERTS):
                w1, w2, w3 = (linear(name, expert) for name in ("w1", "w2", "w3"))
                share_T = (weights_Tk * (experts_Tk == expert)).sum(1)
                out_TD = out_TD + share_T[:, None] * w2(swiglu(w1(x_TD), w3(x_TD)))
            return out_TD

    for parameter in (x_TD, *layer.parameters()):
        parameter.grad = None
    _routed(Loop(), x_TD).square().sum().backward()  # type: ignore[arg-type]
    for name, grad in found.items():
        expected = x_TD.grad if name == "x" else getattr(layer, name).grad
        assert grad is not None and expected is not None
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)
        assert grad.any()


def test_a_disabled_update_leaves_the_base_and_dropout_is_of_training() -> None:
    layer = LoRAExperts(_experts(), LoRA(rank=3, dropout=0.5), ["w1"])
    x_TD = torch.randn(20, 64, dtype=torch.float64)
    for part in ("a", "b"):
        nn.init.normal_(getattr(layer, f"w1_lora_{part}"))
    layer.eval()
    assert torch.equal(_routed(layer, x_TD), _routed(layer, x_TD))
    updated = _routed(layer, x_TD)
    layer.train()
    assert not torch.equal(_routed(layer, x_TD), updated)
    layer.enabled = False
    assert torch.equal(_routed(layer, x_TD), _routed(_experts(), x_TD)) and not updated.equal(
        _routed(layer, x_TD)
    )


def test_the_operator_is_sound_for_torch_and_saves_bytes_alone() -> None:
    x_MK = torch.randn(10, 64, requires_grad=True)
    weight = torch.randn(3, 8, 64)
    packed, ends_E = nf4.quantize(weight), torch.tensor([4, 4, 10], dtype=torch.int32)
    torch.library.opcheck(nf4.nf4_grouped_linear, (x_MK, packed, ends_E, False))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.append(it) or it, lambda it: it):
        out = nf4.grouped_linear(x_MK, packed, ends_E)
    assert {it.dtype for it in saved} == {torch.uint8, torch.int32}
    expected = [F.linear(x_MK[:4], nf4.dequantize(packed[0], torch.float32))]
    expected += [F.linear(x_MK[4:], nf4.dequantize(packed[2], torch.float32))]
    torch.testing.assert_close(out, torch.cat(expected))


# Targets

SIZE = resolve("experts", "debugmodel")  # a dense block, then experts and shared ones


@pytest.mark.parametrize(
    ("targets", "selected"),
    [
        (["all-linear"], {name for name, row in adaptable(SIZE).items() if row.is_block_matrix}),
        (["experts"], {name for name in adaptable(SIZE) if ".experts." in name}),
        (["w2"], {name for name in adaptable(SIZE) if name.endswith(".w2")}),
        (["down_proj"], {name for name in adaptable(SIZE) if name.endswith(".w2")}),
        (["gate"], {name for name in adaptable(SIZE) if name.endswith(".gate")}),
        (["layers.2.moe.experts.w1"], {"layers.2.moe.experts.w1"}),
        (["layers.1.*shared*"], {f"layers.1.moe.shared_experts.w{i}" for i in (1, 2, 3)}),
        (["wq"], {f"layers.{layer}.attention.wq" for layer in range(SIZE.n_layers)}),
    ],
)
@pytest.mark.parametrize("base", ["none", "nf4"])
def test_names_of_feed_forwards_are_those_of_experts_too(
    targets: list[str], selected: set[str], base: str
) -> None:
    assert selected
    lora = {"rank": 2, "target_modules": targets, "quantize_base": base}
    options = Finetune.model_validate({"adapter": "lora", "lora": lora})
    assert set(lora_targets(SIZE, options)) == selected
    assert SIZE.moe is not None
    args = replace(SIZE, moe=replace(SIZE.moe, ffn_dim=64), ffn_dim=128)
    model = built(args, options)
    named = dict(model.named_parameters())
    assert {*named, *dict(model.named_buffers())} == all_shapes(args, options).keys()
    assert {name: tuple(it.shape) for name, it in named.items() if is_added(name)} == {
        name: shape for name, shape in all_shapes(args, options).items() if is_added(name)
    }
    assert all(it.requires_grad == is_added(name) for name, it in named.items())
    packed = {name for name, it in named.items() if it.dtype == torch.uint8}
    rows = adaptable(args).values()
    assert packed == ({row.name for row in rows if row.is_block_matrix} if base == "nf4" else set())


class Own(Experts):
    """Experts of a family's that compute otherwise."""


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"target_modules": ["w1"]}, r"finetune.lora.target_modules = \['w1'\]"),
        ({"quantize_base": "nf4"}, "finetune.lora.quantize_base = 'nf4'"),
    ],
)
def test_experts_that_are_no_plain_ones_are_not_replaced(values: dict, key: str) -> None:
    with torch.device("meta"):
        model = Decoder(SIZE)
        assert SIZE.moe is not None
        model.set_submodule("layers.1.moe.experts", Own(SIZE.dim, SIZE.moe))
    with pytest.raises(
        ConfigError, match=f"{key}\n  rule: layers.1.moe.experts is a Own, and only a plain Experts"
    ):
        options = Finetune.model_validate({"adapter": "lora", "lora": values})
        apply_finetune(model, options, frozen_dtype=torch.bfloat16)


# PEFT

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

OURS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": ["all-linear", "gate"]},
    "rslora": {"target_modules": ["experts"], "use_rslora": True, "alpha": 3},
    "gate alone": {"target_modules": ["*.experts.w1"]},
    "up and down": {"target_modules": ["*.experts.w[23]"]},
    "some blocks": {"target_modules": ["layers.2.moe.experts.*", "layers.1.moe.experts.w2", "layers.1.*wq"]},
}


def _written(kind: str, base: Path, out: Path) -> Any:
    lora = {"rank": 3, "alpha": 12, "dropout": 0.1} | OURS[kind]
    options = Finetune.model_validate({"adapter": "lora", "lora": lora})
    adapter = adapter_of(options, SafetensorsFolder(base).args, base / "step")
    write_peft(adapter, out, dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    return adapter


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_peft_reads_experts_and_so_do_we(name: str, kind: str, tmp_path: Path) -> None:
    reference = save_transformers(tmp_path / "base", name)
    adapter = _written(kind, tmp_path / "base", tmp_path / "peft")
    expected = logits(adapted(adapter, lambda model: read(tmp_path / "base")))
    plain = logits(reference)
    found = peft.PeftModel.from_pretrained(reference, str(tmp_path / "peft"))
    # These updates are as large as the weights, and rounding of all layers adds up.
    check_close(logits(found), expected, 2e-5 if kind == "all" else 1e-5)
    assert (plain - expected).abs().max() > 0.05 * expected.abs().max()
    again = open_adapter(tmp_path / "peft", adapter.args)
    assert again.options.lora.scale == pytest.approx(adapter.options.lora.scale)
    if kind in ("all", "rslora"):  # otherwise, weights of the other blocks are 0
        assert lora_targets(adapter.args, again.options) == lora_targets(adapter.args, adapter.options)
        assert all(torch.equal(again.values[name], it) for name, it in adapter.values.items())
    check_close(logits(adapted(again, lambda model: read(tmp_path / "base"))), expected)


ADAPT_ROUTERS = {("gpt_oss", "router"), ("llama4", "router"), ("llama4", "all-linear")}
"""Adapters of routers that are no plain linear layers in transformers, and not adapted here."""
MODULES = {"llama4": "feed_forward"}
"""Modules that contain the experts in transformers, other than mlp."""
THEIRS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "up": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "down": {"target_modules": [], "target_parameters": ["model.layers.1.mlp.experts.down_proj"]},
    "router": {"target_modules": ["v_proj"], "target_parameters": ["gate.weight", "experts.down_proj"]},
    "all-linear": {"target_modules": "all-linear"},  # of which PEFT gives gate_up_proj rank 2R
    "gate and up": {"target_modules": ["gate_proj", "up_proj", "w1", "w3", "k_proj"], "lora_alpha": 6},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in WITH_EXPERTS for kind in THEIRS if (name, kind) not in ADAPT_ROUTERS],
)
def test_what_peft_writes_of_experts_is_read_and_merged(name: str, kind: str, tmp_path: Path) -> None:
    base = save_transformers(tmp_path / "base", name)
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | THEIRS[kind]
    if parameters := options.get("target_parameters"):
        module = MODULES.get(name, "mlp")
        options["target_parameters"] = [it.replace("mlp", module) for it in parameters]
    config = peft.LoraConfig(**options)
    found = peft.get_peft_model(base, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    found.save_pretrained(str(tmp_path / "peft"))
    source = SafetensorsFolder(tmp_path / "base")
    adapter = open_adapter_on(tmp_path / "peft", source)
    expected = logits(found)
    check_close(logits(adapted(adapter, lambda model: read(tmp_path / "base"))), expected)
    merged = Merged(source, adapter)
    for row in adaptable(source.args).values():
        region = tuple(slice(1, size - 1) for size in row.shape)
        torch.testing.assert_close(merged.read(row.name, region), merged.read(row.name)[region])
    write_hf(merged, tmp_path / "merged", tokens=SpecialTokens(), others={}, ranks=Ranks(alone=True))
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    # Each merged weight is rounded once more, which these updates, as large as the weights, show.
    check_close(logits(again.eval()), expected, 3e-5)


def _no_blocks(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(it for it in tensors if it.endswith("layers.1.mlp.experts.base_layer.lora_B.weight"))
    save_file(tensors | {name: torch.ones_like(tensors[name])}, folder / "adapter_model.safetensors")


def _other_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    config["rank_pattern"] = {"gate_up_proj": 9}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(_no_blocks, "has rank 6, of which gate and up do not have a half each"), (_other_rank, "rank_pattern")],
)
def test_ranks_of_their_own_are_rejected(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    save_transformers(tmp_path / "base", "qwen3_moe")
    adapter = _written("all", tmp_path / "base", tmp_path / "peft")
    spoil(tmp_path / "peft")
    with pytest.raises(DataError, match=said):
        open_adapter(tmp_path / "peft", adapter.args)


# Runs

TOKENIZER = Path(__file__).parents[2] / "tests/assets/tokenizer"
LAYERS = {"rank": 4, "target_modules": ["all-linear"]}
OF_BASE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")


def _run(folder: Path, name: str, steps: int, **finetune: Any) -> list[float]:
    """Losses of a run that starts from ``base``, with a rank of experts on each of two ranks."""
    config = small_config(
        folder / name,
        model=dict.fromkeys(OF_BASE) | {"tokenizer_path": str(TOKENIZER)},
        parallelism={"expert_parallel_degree": 2},
        training={"steps": steps},
        optimizer={"lr": 1e-2},
        finetune={"adapter": "lora", "lora": LAYERS, **finetune},
        checkpoint={"enable": True, "initial_load_in_hf": True, "initial_load_path": str(folder / "base"),
                    "last_save_in_hf": True, "interval": 2, "export_dtype": "float32"},
    )  # fmt: skip
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in line]


def _runs(base: str) -> dict[str, list[float]]:
    folder = Path(base)
    first = _run(folder, "trained", 2)
    return {
        "trained": first,
        "resumed": _run(folder, "trained", 4),
        "from peft": _run(folder, "from peft", 1, adapter_path=str(folder / "trained/hf/step-2")),
        "merged": _run(folder, "merged", 2, merge_on_export=True),
    }


def test_trained_experts_go_to_peft_and_back_and_merge(tmp_path: Path) -> None:
    save_transformers(tmp_path / "base", "qwen3_moe", vocab=4352)
    [losses, _] = run_world(_runs, 2, str(tmp_path), timeout=300)
    assert losses["resumed"][:2] == losses["trained"] and losses["resumed"][2] < losses["trained"][0]
    assert losses["from peft"][0] == pytest.approx(losses["resumed"][2], abs=0.5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    before = logits(plain.eval())
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "trained/hf/step-2"))
    ours = load_model(tmp_path / "trained/checkpoint/step-2", device=torch.device("cpu"), dtype=torch.float32)
    check_close(logits(ours.model), logits(theirs))
    assert (before - logits(theirs)).abs().max() > 0.01 * before.abs().max()
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged/hf/step-2", attn_implementation="eager"
    )
    check_close(logits(merged.eval()), logits(theirs), 3e-5)
