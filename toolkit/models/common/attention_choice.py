"""Choice of an attention backend (``attention.py``). Imports no torch."""

from __future__ import annotations

_NAMED_BY_FLAVOR = {"_flex_attn": "flex", "_flex": "flex", "_varlen_attn": "varlen", "_varlen": "varlen"}
WITH_SINKS = ("sdpa", "flex", "blockwise")
"""Backends that support attention sinks."""


def flavor_attention(flavor: str) -> str | None:
    """Return the attention backend in a flavor's name (torchtitan's spelling, such as 8B_flex), or None."""
    return next((name for end, name in _NAMED_BY_FLAVOR.items() if flavor.endswith(end)), None)


def choose_attention(
    asked: str,
    flavor: str,
    *,
    device: str,
    documents: bool,
    prefix: bool = False,
    sinks: bool = False,
    cpu_fast_paths: bool = True,
) -> str:
    """Return the backend for ``model.attention`` = ``asked`` on ``device`` ("cpu" or "cuda").

    ``documents``: samples contain several documents, and attention stays within each. ``prefix``: there is a
    learned prefix, which only SDPA supports. ``sinks``: the model has attention sinks. On CPU, "auto" is
    blockwise with ``cpu_fast_paths``. SDPA, the only other backend that can train there, is faster only for
    fp32 rows of at least 2,048 tokens without documents. On CUDA, "auto" is the backend in the flavor's name,
    if any. Otherwise it is SDPA for plain causal attention, where it has fused kernels, and flex for
    documents or sinks. With documents, SDPA needs a dense mask (S² bytes per sample) and a slower kernel;
    with sinks, it stores all scores. The choice on CUDA follows published results;
    ``benchmarks/attention.py`` measures a device.
    """
    if asked != "auto":
        return asked
    if prefix:
        return "sdpa"
    if device == "cpu":
        return "blockwise" if cpu_fast_paths else "sdpa"
    return flavor_attention(flavor) or ("flex" if documents or sinks else "sdpa")
