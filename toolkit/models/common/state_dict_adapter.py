"""Hugging Face's names of the tensors of a decoder, and the order in which it keeps the rows of q and k.

RoPE turns pairs of rows of a head. Meta's (and our) pairs are neighbours, 2p and 2p + 1; Hugging Face's
are half a head apart, p and p + E/2, E being the head dim. So the rows of each head are in another order in
what makes queries and keys, or weighs them, and only there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_CLASSIFIER = _OUTSIDE | {"output": "score"}


class StateDictAdapter:
    """The names of a family.

    ``in_block`` has Hugging Face's by ours, ``reordered`` ours of which it keeps the rows in another order,
    ``biased`` ours that have a bias beside their weight.
    """

    def __init__(self, in_block: Mapping[str, str], reordered: Collection[str], biased: Collection[str] = ()):
        self.in_block = in_block
        self._to_block = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in in_block.items()}
        self._to_block |= {f"{ours}.bias": f"{in_block[ours]}.bias" for ours in biased}
        self._from_block = {theirs: ours for ours, theirs in self._to_block.items()}
        self._reordered = tuple(f"{part}.{kind}" for part in reordered for kind in ("weight", "bias"))

    def to_hf(self, name: str, *, classifier: bool = False) -> str:
        """Hugging Face's name of our parameter ``name``, of a language model or of a ``classifier``.

        Raises:
            KeyError: no parameter of the family is called so.
        """
        if not name.startswith("layers."):
            return f"{_outside(classifier)[name.removesuffix('.weight')]}.weight"
        _, layer, part = name.split(".", 2)
        return f"model.layers.{layer}.{self._to_block[part]}"

    def from_hf(self, name: str, *, classifier: bool = False) -> str | None:
        """Our name of Hugging Face's tensor ``name``; None for what is no weight (rotary frequencies).

        A name that Hugging Face gives to no tensor of the family is marked, to be reported as one too many.
        """
        if name.endswith("rotary_emb.inv_freq"):
            return None
        module, _, kind = name.rpartition(".")
        outside = {theirs: ours for ours, theirs in _outside(classifier).items()}
        if kind == "weight" and module in outside:
            return f"{outside[module]}.weight"
        parts = name.split(".", 3)
        if parts[:2] == ["model", "layers"] and parts[-1] in self._from_block:
            return f"layers.{parts[2]}.{self._from_block[parts[3]]}"
        # Marked, since it might be one of our names: norm.weight, of a model saved without its head.
        return f"{name} (not of this model)"

    def reorders_rows(self, name: str) -> bool:
        """Say if Hugging Face keeps the rows of our parameter ``name`` in another order."""
        return name.endswith(self._reordered)


def _outside(classifier: bool) -> Mapping[str, str]:
    return _OF_CLASSIFIER if classifier else _OUTSIDE


def hf_row_order(rows: Sequence[int], head_dim: int) -> list[int]:
    """For each of Hugging Face's ``rows`` of q_proj or k_proj, the row of ours that holds it."""
    half = head_dim // 2
    return [row - row % head_dim + row % head_dim % half * 2 + row % head_dim // half for row in rows]
