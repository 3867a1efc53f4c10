import pytest

from toolkit.metrics.flops import flops_per_token, peak_flops
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
