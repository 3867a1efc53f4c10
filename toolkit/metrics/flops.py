"""Model FLOPs per token and peak rates of devices, for MFU. Imports no torch.

The convention is PaLM's and torchtitan's: 6 per parameter outside the embedding table, plus
12 · layers · heads · head dim · sequence for attention over the full square, masked or not. What is
recomputed by activation checkpointing does not count.
"""

from __future__ import annotations


def flops_per_token(
    *,
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    ffn_dim: int,
    vocab_size: int,
    seq_len: int,
    causal: bool = False,
) -> float:
    """FLOPs of forward and backward for one token of a Llama.

    ``causal`` counts only the lower triangle of attention, half of it: some systems publish that. A
    tied head counts as an untied one, for its matmul is the same.
    """
    attention = 2 * dim * head_dim * (n_heads + n_kv_heads)
    block = attention + 3 * dim * ffn_dim + 2 * dim
    parameters = n_layers * block + dim + vocab_size * dim
    square = 12 * n_layers * n_heads * head_dim * seq_len
    return float(6 * parameters + (square // 2 if causal else square))


# Dense bf16 tensor-core peak in TFLOP/s, accumulating in fp32, from the vendors' data sheets (half of
# the figure where a sheet gives the one with sparsity). The first name that the device's contains wins.
_PEAK_TFLOPS = (
    ("GB300", 2500.0),  # Blackwell Ultra architecture brief
    ("B300", 2250.0),
    ("GB200", 2500.0),  # GB200 NVL72 data sheet, 360 PFLOP/s sparse fp8-to-bf16 table over 72
    ("B200", 2250.0),  # DGX B200 data sheet
    ("GH200", 989.0),  # GH200 data sheet
    ("H200 NVL", 835.0),  # H200 data sheet
    ("H200", 989.0),
    ("H100 NVL", 835.0),  # H100 data sheet
    ("H100 PCIe", 756.0),
    ("H100", 989.0),  # SXM5, "NVIDIA H100 80GB HBM3"
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),  # A100 data sheet, PCIe and SXM alike
    ("A800", 312.0),
    ("L40S", 362.0),  # L40S data sheet, half of 733 with sparsity, rounded as torchtitan does
    ("L40", 181.0),  # L40 data sheet
    ("L4", 121.0),  # L4 data sheet, half of 242
    ("A40", 149.7),  # A40 data sheet
    ("A30", 165.0),  # A30 data sheet
    ("A10G", 70.0),  # A10G, AWS G5
    ("A10", 125.0),  # A10 data sheet
    ("RTX 6000 Ada", 364.0),  # Ada professional data sheet, half of 728
    ("RTX A6000", 154.8),  # GA102 white paper
    ("RTX 5090", 209.5),  # Blackwell GeForce white paper
    ("RTX 4090", 165.2),  # Ada GeForce white paper
    ("RTX 3090", 71.0),  # GA102 white paper
)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of one device by the name that its driver gives, or None where it is not known.

    Only bfloat16 has a peak here: what fp32 matmuls reach depends on whether TF32 is allowed.
    """
    if dtype != "bfloat16":
        return None
    name = device_name.lower()
    return next((tflops * 1e12 for known, tflops in _PEAK_TFLOPS if known.lower() in name), None)
