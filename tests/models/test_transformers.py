"""The same numbers as transformers' LlamaForCausalLM, an implementation that is not ours."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.small_llama import build, small, tokens_and_labels
from toolkit.models.common.args import LinearScaling, ModelArgs, YarnScaling
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.rope import rope_frequencies
from toolkit.models.llama.args import PRESETS

PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def config(args: ModelArgs) -> LlamaConfig:
    rope = dict(rope_type="default", rope_theta=args.rope_theta)
    scaling = args.rope_scaling
    if isinstance(scaling, LinearScaling):
        rope |= dict(rope_type="linear", factor=scaling.factor)
    elif isinstance(scaling, YarnScaling):
        rope |= dict(
            rope_type="yarn",
            factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_seq_len,
        )
    elif scaling is not None:
        rope |= dict(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_seq_len,
        )
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_seq_len,
        rms_norm_eps=args.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=args.tie_embeddings,
        attn_implementation="eager",
    )


def their_name(name: str) -> str:
    path = name.removesuffix(".weight")
    if path in OUTSIDE:
        return f"{OUTSIDE[path]}.weight"
    _, layer, part = path.split(".", 2)
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def their_layout(name: str, tensor: torch.Tensor, args: ModelArgs) -> torch.Tensor:
    """Meta rotates neighbouring rows of a head together, transformers rows half a head apart."""
    if not name.endswith(("wq.weight", "wk.weight")):
        return tensor
    rows, columns = tensor.shape
    pairs = tensor.view(rows // args.head_dim, args.head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def theirs(model: Decoder) -> LlamaForCausalLM:
    reference = LlamaForCausalLM(config(model.args))
    parameters = dict(reference.named_parameters())
    ours = dict(model.named_parameters())
    assert parameters.keys() == {their_name(name) for name in ours}
    with torch.no_grad():
        for name, parameter in ours.items():
            parameters[their_name(name)].copy_(their_layout(name, parameter, model.args))
    return reference


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("name", ["llama2", "llama3.0", "llama3.1", "llama3.2"])
def test_logits_loss_and_gradients(name, kv_heads):
    args = small(name, n_kv_heads=kv_heads)
    model = build(args, torch.float32, loss_chunk_tokens=100)
    reference = theirs(model)
    tokens, labels = tokens_and_labels(2, 200)

    logits = reference(input_ids=tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    loss = model(tokens, labels=labels) / (labels != -100).sum()
    loss.backward()

    # Logits are of order 1; fp32 rounding, the reference's fp32 angles above all, is about 4e-6.
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-5)
    assert abs(loss - expected) < 1e-6 * expected
    grads = {n: p.grad for n, p in reference.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        grad = grads[their_name(parameter_name)]
        # By norm: a single element may be as small as the rounding of the sum that made it.
        difference = their_layout(parameter_name, parameter.grad, args) - grad
        assert difference.norm() <= 1e-5 * grad.norm(), parameter_name


@pytest.mark.parametrize("scaling", [LinearScaling(4.0), YarnScaling(8.0, 64)], ids=["linear", "yarn"])
def test_logits_and_gradients_with_another_scaling(scaling):
    args = replace(small("llama3.0"), rope_scaling=scaling, max_seq_len=512)
    model = build(args, torch.float32)
    reference = theirs(model)
    tokens, _ = tokens_and_labels(2, 200)
    logits = reference(input_ids=tokens).logits
    ours = model(tokens)
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    plain = build(replace(args, rope_scaling=None), torch.float32)(tokens)
    assert (plain - logits).abs().max() > 0.01  # without scaling it is another model
    for output in (ours, logits):
        output.square().mean().backward()
    mine, other = model.layers["0"].attention.wq.weight.grad, dict(reference.named_parameters())
    expected = other[their_name("layers.0.attention.wq.weight")].grad
    difference = their_layout("layers.0.attention.wq.weight", mine, args) - expected
    assert difference.norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", PRESETS)
def test_rope_frequencies_of_every_preset(name):
    for flavor, args in PRESETS[name].items():
        reference = config(args)
        if args.rope_scaling is None:
            exponents = torch.arange(0, args.head_dim, 2).float() / args.head_dim
            expected = 1.0 / args.rope_theta**exponents
        else:
            expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
        # The reference computes in fp32, with a rounding of 6e-8 in each of several steps.
        found = rope_frequencies(args).float()
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0, msg=f"{name} {flavor}")


def test_frequencies_are_kept_scaled_and_blended():
    """Without all three bands the comparison above would not see a wrong one."""
    for name, factor in (("llama3.1", 8), ("llama3.2", 32)):
        args = small(name)
        plain = rope_frequencies(small("llama3.0"))
        ratio = plain / rope_frequencies(args)
        assert (ratio == 1).any() and torch.isclose(ratio, torch.tensor(float(factor)).double()).any()
        assert ((ratio > 1.01) & (ratio < factor - 0.01)).any()
