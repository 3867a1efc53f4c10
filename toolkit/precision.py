"""The precision that a device computes best in."""

from __future__ import annotations

import torch

from toolkit import hardware


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = hardware.cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32
