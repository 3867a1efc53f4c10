"""The choice of an attention back end. Imports no torch."""

from __future__ import annotations

_NAMED_BY_FLAVOR = {"_flex_attn": "flex", "_flex": "flex", "_varlen_attn": "varlen", "_varlen": "varlen"}


def flavor_attention(flavor: str) -> str | None:
    """The attention back end that torchtitan's spelling of a flavor names, as 8B_flex does."""
    return next((name for end, name in _NAMED_BY_FLAVOR.items() if flavor.endswith(end)), None)


def attention_choice(
    asked: str,
    flavor: str,
    *,
    device: str,
    documents: bool,
    prefix: bool = False,
    cpu_fast_paths: bool = True,
) -> str:
    """The attention back end for ``model.attention`` on a ``device`` ("cpu" or "cuda").

    ``documents`` is whether samples hold several documents, each attending within itself, ``prefix``
    whether a learned prefix may be seen beside them, which SDPA alone takes. "auto" is blockwise on a
    CPU with ``cpu_fast_paths``, where nothing else trains but SDPA, which is faster for whole rows of 2,048
    tokens and more in fp32 alone. On CUDA it is what the flavor names, else SDPA for plain causal attention,
    for which it has fused kernels, and flex within documents, for which SDPA needs a dense mask (S² bytes a
    sample, and a slower kernel). For CUDA that is others' published experience, not measured here;
    ``benchmarks/attention.py`` measures the device at hand.
    """
    if asked != "auto":
        return asked
    if prefix:
        return "sdpa"
    if device == "cpu":
        return "blockwise" if cpu_fast_paths else "sdpa"
    return flavor_attention(flavor) or ("flex" if documents else "sdpa")
