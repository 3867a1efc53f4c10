"""Names of parameters, free of the wrappers that torch puts around modules."""

from __future__ import annotations

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(fqn: str) -> str:
    """`fqn` without the parts that activation checkpointing and torch.compile add to it."""
    for prefix in WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn
