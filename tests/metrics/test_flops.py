import dataclasses
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.small_llama import small
from toolkit.config.finetune import Finetune
from toolkit.finetune.apply import apply_finetune
from toolkit.metrics.flops import flops_per_token, peak_flops
from toolkit.metrics.flops_finetune import fine_tuning_flops, model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve

LLAMA3_8B = resolve("llama3.1", "8B")


def test_llama3_8b_at_8192():
    """The published 57.9 and 51.5 GFLOPs, to their last digit."""
    assert round(flops_per_token(LLAMA3_8B, seq_len=8192) / 1e9, 1) == 57.9
    assert round(flops_per_token(LLAMA3_8B, seq_len=8192, causal=True) / 1e9, 1) == 51.5


def test_counts_six_per_parameter_outside_the_embedding():
    parameters, embedding = 8_030_261_248, 128256 * 4096
    attention = 12 * 32 * 32 * 128 * 8192
    assert flops_per_token(LLAMA3_8B, seq_len=8192) == 6 * (parameters - embedding) + attention


def test_only_the_chosen_experts_count():
    """Qwen3-30B-A3B has 128 experts in each of 48 layers, of three matrices of 2048 x 768, and chooses 8."""
    args, total, embedding = resolve("qwen3_moe", "30B-A3B"), 30_532_122_624, 151936 * 2048
    parameters = total - 48 * (128 - 8) * 3 * 2048 * 768 - embedding
    attention = 12 * 48 * 32 * 128 * 4096
    assert flops_per_token(args, seq_len=4096) == 6 * parameters + attention
    assert fine_tuning_flops(args, Finetune(), seq_len=4096) == flops_per_token(args, seq_len=4096)


def test_latent_attention_has_two_head_dims():
    """DeepSeek-V3: 128 heads of 192 for queries and keys and of 128 for values; its chosen parameters are all
    but those of the experts that are not chosen, 58 layers of 248 of 3 x 7168 x 2048."""
    args, total, embedding = resolve("deepseek_v3", "671B"), 671_026_404_352, 129280 * 7168
    parameters = total - 58 * 248 * 3 * 7168 * 2048 - embedding
    attention = 6 * 61 * 128 * (192 + 128) * 4096
    assert flops_per_token(args, seq_len=4096) == 6 * parameters + attention
    assert fine_tuning_flops(args, Finetune(), seq_len=4096) == flops_per_token(args, seq_len=4096)


def test_a_window_stands_in_for_a_longer_sequence():
    """A token sees at most it; the causal count is that of what is seen, token by token."""
    args, length, window = resolve("mistral0.1", "7B"), 16384, 4096
    per_pair = 12 * args.n_layers * args.n_heads * args.head_dim
    for seq_len in (1024, window):
        without = dataclasses.replace(args, sliding_window=None)
        for causal in (False, True):
            found = flops_per_token(args, seq_len=seq_len, causal=causal)
            assert found == flops_per_token(without, seq_len=seq_len, causal=causal)
    plain = flops_per_token(args, seq_len=window) - per_pair * window
    assert flops_per_token(args, seq_len=length) - plain == per_pair * window
    seen = sum(min(place + 1, window) for place in range(length)) / length
    causal = flops_per_token(args, seq_len=length, causal=True) - plain
    assert causal == pytest.approx(per_pair * seen, rel=1e-3)  # a token counts itself by half, as ever


def test_every_other_window():
    """In gpt-oss 20B, 12 blocks of 24 see 128 tokens, and 4 experts of 32 compute a token."""
    args, seq_len = resolve("gpt_oss", "20B"), 4096
    attention = 12 * 12 * 64 * 64 * (128 + seq_len)
    expected = 6 * (4_187_440_704 - 201088 * 2880) + attention
    assert flops_per_token(args, seq_len=seq_len) == expected
    assert fine_tuning_flops(args, Finetune(), seq_len=seq_len) == expected


def test_chunks():
    """In Llama 4 Scout, 36 blocks of 48 see 8,192 tokens, or what is left of a sequence, and one expert of 16
    beside the shared one computes a token."""
    args, seq_len = resolve("llama4", "17B-16E"), 20480
    per_pair = 12 * 40 * 128
    seen = (2 * 8192**2 + 4096**2) / seq_len
    parameters = 6 * (17_172_894_720 - 202048 * 5120)
    expected = parameters + per_pair * (36 * seen + 12 * seq_len)
    assert flops_per_token(args, seq_len=seq_len) == expected
    assert fine_tuning_flops(args, Finetune(), seq_len=seq_len) == expected
    half = parameters + per_pair * (36 * seen + 12 * seq_len) / 2
    assert flops_per_token(args, seq_len=seq_len, causal=True) == half
    for length in (0, 8192):
        assert flops_per_token(args, seq_len=length) == parameters + per_pair * 48 * length


# Sizes beside which norms, of which torch counts nothing, an adapter of rank 1 and the attention of one block
# in backward are small: 3%, where one of the parts that are counted is 10% or more.
SMALL = small(dim=256, ffn_dim=512, vocab_size=512)
MOE = small("qwen3_moe", dim=256, ffn_dim=None, vocab_size=512)
LATENT = small("deepseek_v3", dim=256, ffn_dim=512, vocab_size=512, head_dim=None, n_heads=4, n_kv_heads=4)
SEQ_LEN = 64
KINDS: dict[str, dict] = {
    "all": {},
    "not the first block": {"freeze_first_layers": 1},
    "not the head": {"frozen": ["output.weight"]},
    "the head": {"trainable": ["output.weight"]},
    "norms": {"trainable": ["*norm.weight"]},
    "lora": {"adapter": "lora", "lora": {"rank": 1}},
    "lora of all layers": {"adapter": "lora", "lora": {"rank": 1, "target_modules": ["all-linear"]}},
    "rows of the embedding": {
        "adapter": "lora",
        "lora": {"rank": 1, "target_modules": ["layers.2.*"]},
        "trainable_token_indices": [0],
    },
    "lora of embedding and head": {
        "adapter": "lora",
        "lora": {"rank": 1, "target_modules": ["embed_tokens", "lm_head"]},
    },
    "prefix": {"adapter": "prefix_tuning", "prefix_tuning": {"num_virtual_tokens": 1}},
    "a prompt of the last block": {
        "adapter": "llama_adapter",
        "llama_adapter": {"adapter_len": 1, "adapter_layers": 1},
    },
}


def grouped_by_loop(x, weight, ends):
    rows = x.tensor_split(ends[:-1].tolist())
    return torch.cat([torch.mm(mine, weight[expert].T) for expert, mine in enumerate(rows)])


def counted(options: Finetune, args: ModelArgs = SMALL) -> int:
    """FLOPs of a row's step that torch counts."""
    model = Decoder(args)
    apply_finetune(model, options, frozen_dtype=torch.float32)
    model.to_empty(device="cpu")
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    # torch counts nothing of the toolkit's own operator.
    loop = patch("toolkit.models.common.moe.grouped_linear", grouped_by_loop)
    adapted = patch("toolkit.finetune.nf4.plain_grouped_linear", grouped_by_loop)
    with loop, adapted, FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    return flops.get_total_flops()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_frozen_has_fewer(name):
    options = Finetune.model_validate(KINDS[name])
    found = fine_tuning_flops(SMALL, options, seq_len=SEQ_LEN) * SEQ_LEN
    assert found == pytest.approx(counted(options), rel=0.03)
    assert found == model_flops(SMALL, options, seq_len=SEQ_LEN) * SEQ_LEN
    # A reference has no gradients; it is stored if more than a new adapter is trained. KTO adds mismatched
    # answers, of the reference too.
    forward = flops_per_token(SMALL, seq_len=SEQ_LEN) * SEQ_LEN / 3
    for objective, times in (("dpo", int(options.adds)), ("kto", 3 if options.adds else 1)):
        compared = options.model_copy(update={"objective": objective})
        more = model_flops(SMALL, compared, seq_len=SEQ_LEN) * SEQ_LEN - found
        assert more == pytest.approx(times * forward)


def test_rows_of_a_tied_embedding_need_the_gradient_of_the_head():
    options = Finetune.model_validate(KINDS["rows of the embedding"])
    args = dataclasses.replace(SMALL, tie_embeddings=True)
    found = fine_tuning_flops(args, options, seq_len=SEQ_LEN) * SEQ_LEN
    assert found == pytest.approx(counted(options, args), rel=0.03)


@pytest.mark.parametrize(
    ("name", "args"),
    [(name, args) for name in ("all", "not the head", "lora") for args in (MOE, LATENT)]
    # What rank 1 adds is not counted: 3.1% of so small a model with latent vectors.
    + [("lora of all layers", MOE)],
)
def test_experts_have_the_flops_that_torch_counts(name, args):
    table = KINDS[name]
    if args.mla and name == "lora":
        table = table | {"lora": {"rank": 1, "target_modules": ["wq_b", "wkv_b"]}}
    options = Finetune.model_validate(table)
    found = fine_tuning_flops(args, options, seq_len=SEQ_LEN) * SEQ_LEN
    assert found == pytest.approx(counted(options, args), rel=0.03)


def test_all_is_as_much_as_of_a_run_that_freezes_nothing():
    assert fine_tuning_flops(LLAMA3_8B, Finetune(), seq_len=8192) == flops_per_token(LLAMA3_8B, seq_len=8192)
    for args in (resolve("llama3.2", "1B"), resolve("qwen2.5", "7B")):
        assert fine_tuning_flops(args, Finetune(), seq_len=64) == flops_per_token(args, seq_len=64)
    within = resolve("mistral0.1", "7B")
    for causal in (False, True):
        plain = flops_per_token(within, seq_len=16384, causal=causal)
        assert fine_tuning_flops(within, Finetune(), seq_len=16384, causal=causal) == plain


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_known_devices(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "CPU",
        "Tesla V100-SXM2-32GB",  # has no bf16
        "NVIDIA RTX A4000",  # not an A40
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ],
)
def test_unknown_devices_have_no_peak(name):
    assert peak_flops(name) is None


def test_only_bfloat16_has_a_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
