"""Inputs on which a wrong mask, or a wrong pairing of heads, shows; for the tests of attention."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from toolkit.models.common.attention import attention_backend

ROWS, LENGTH = 2, 200  # more than one of flex's blocks of 128, and no multiple of them


def runs(*rows: list[tuple[int, int]]) -> Tensor:
    """Documents (B, S) from (id, length) pairs."""
    return torch.tensor([[i for i, length in row for _ in range(length)] for row in rows], dtype=torch.int32)


# Documents within and across blocks, one of a single token, padding (-1), and an id that ends one row and
# begins the next.
PACKED = runs([(0, 130), (1, 1), (2, 49), (7, 20)], [(7, 60), (3, 90), (-1, 50)])
PACKINGS = (PACKED, runs([(0, 200)], [(0, 200)]), runs([(k, 8) for k in range(25)], [(0, 199), (-1, 1)]))


def inputs(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, head_dim: int = 16) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(ROWS, LENGTH, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


WINDOWS = (1, 3, 64, 150)
"""Shorter and longer than a document, a block of queries and a rank's piece."""


def attend(
    name: str,
    qkv: list[Tensor],
    documents: Tensor | None,
    pieces: int = 1,
    window: int | None = None,
    chunked: bool = False,
) -> Tensor:
    """By so many equal pieces of the queries, each with the keys until its end, as ranks that share a
    sequence do."""
    backend = attention_backend(name, window, chunked)
    q, k, v = qkv
    size = LENGTH // pieces
    outputs = []
    for first in range(0, LENGTH, size):
        end = first + size
        mask = backend.mask(documents, ROWS, end, q.device, first=first)
        outputs.append(backend(q[:, first:end], k[:, :end], v[:, :end], mask))
    return torch.cat(outputs, dim=1)


def by_definition(
    qkv: list[Tensor],
    documents: Tensor | None,
    window: int,
    sinks_H: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Attention of each token to those of its document among the last ``window``, itself included, or of its
    chunk of that many, and to the sinks, which have no values."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / q.shape[-1] ** 0.5
    before = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (before >= 0) & (before < window)
    if chunked:
        ids = documents if documents is not None else torch.zeros(1, LENGTH)
        chunks = [[place // window for run in _runs(row) for place in range(run)] for row in ids.tolist()]
        chunk = torch.tensor(chunks)[:, None]
        seen = (before >= 0) & (chunk[..., None] == chunk[..., None, :])
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhij,bjhe->bihe", scores.softmax(-1)[..., :LENGTH], v)


def _runs(ids: list[float]) -> list[int]:
    """The lengths of the runs of equal ids."""
    return [len(list(run)) for _, run in groupby(ids)]


def with_gradients(
    name: str,
    qkv: list[Tensor],
    documents: Tensor | None,
    pieces: int = 1,
    window: int | None = None,
    chunked: bool = False,
) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values of :func:`weighed`."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attend(name, leaves, documents, pieces, window, chunked)
    return [out.detach(), *torch.autograd.grad(weighed(out), leaves)]


def weighed(out: Tensor) -> Tensor:
    """A sum that weighs the elements apart."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).to(out.dtype)
    return (out * weights.reshape(out.shape)).sum()
