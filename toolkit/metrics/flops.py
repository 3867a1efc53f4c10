"""Model FLOPs per token and peak FLOP/s of devices, from which ``speed.py`` computes MFU. Imports no torch.

As in PaLM and torchtitan: 6 FLOPs per parameter that computes the token (of experts, the chosen ones; not the
embedding table), plus 12 · layers · heads · head dim · sequence length for full attention, masked or not. The
head dim is the mean of those of keys and values. A sliding window shorter than the sequence, or the mean
chunk, replaces the sequence length. Recomputation for activation checkpointing does not count.
"""

from __future__ import annotations

import re

from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import head_parameters, table


def flops_per_token(args: ModelArgs, *, seq_len: int, causal: bool = False) -> float:
    """Return the FLOPs per token of forward and backward.

    ``causal`` counts only unmasked attention (half of it, without a window), as some systems do. A tied head
    counts like an untied one, because its matmul is the same.
    """
    parameters = table(args).active_in_blocks + args.dim + head_parameters(args)
    squares = (attention_flops(args, layer, seq_len, causal) for layer in range(args.n_layers))
    return float(6 * parameters + 3 * sum(squares))


def attention_flops(args: ModelArgs, layer: int, seq_len: int, causal: bool) -> int:
    """Return the FLOPs per token of the forward of attention in block ``layer``, without its projections."""
    seen = min(seq_len, args.window(layer) or seq_len)
    per_pair = 2 * args.n_heads * (args.head_dim + args.v_head_dim)
    if args.irope:
        whole, rest = divmod(seq_len, max(seen, 1))
        square = per_pair * (whole * seen**2 + rest**2) // max(seq_len, 1)
        return square // 2 if causal else square
    square = per_pair * seen
    return square - square * seen // (2 * seq_len) if causal else square


# Dense bf16 tensor-core peak in TFLOP/s with fp32 accumulation, from the vendors' data sheets and white
# papers (half of a figure that includes sparsity). The first match wins.
_PEAK_TFLOPS = (
    ("GB300", 2500.0),  # GB200 and GB300 NVL72 data sheets: 360 PFLOP/s sparse over 72
    ("GB200", 2500.0),
    ("B300", 2250.0),  # HGX B200 and B300 data sheets: 36 PFLOP/s sparse over 8
    ("B200", 2250.0),
    ("GH200", 989.0),  # Hopper data sheets: SXM 1,979 sparse, NVL 1,671, PCIe 1,513, H20 296
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),  # SXM, which the driver calls "NVIDIA H100 80GB HBM3"
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),  # Ampere data sheets, PCIe and SXM alike
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX A6000", 154.8),
    ("RTX 3090", 71.0),
    ("L40S", 362.0),  # Ada data sheets: L40S 733 sparse, L4 242, RTX 6000 Ada 728
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.0),
    ("RTX 4090", 165.2),
    ("RTX 5090", 209.5),
)
# Slower variants of the same name, and MIG slices.
OTHERS = re.compile(r"\b(laptop|mobile|max-q|ti|d|super|mig)\b", re.IGNORECASE)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Return the peak FLOP/s of a device by the driver's name for it, or None if unknown.

    The value is known only for bfloat16: the peak of fp32 matmuls depends on whether TF32 is allowed.
    """
    if dtype != "bfloat16" or OTHERS.search(device_name):
        return None
    for known, tflops in _PEAK_TFLOPS:
        if re.search(rf"\b{known}\b", device_name, re.IGNORECASE):
            return tflops * 1e12
    return None
