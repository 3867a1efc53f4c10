"""The reason why torch finds no GPU on a machine that has some."""

from __future__ import annotations

import torch


def why_no_gpu() -> tuple[str, str]:
    """The reason, and the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA", "install torch's build for CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the words of the driver
        return str(error).split("\n")[0], f"install a driver for CUDA {torch.version.cuda}, or an older torch"
    return "it says no more", "see what torch.cuda.init() says"
