"""KV cache, implemented as the attention backend of a generating model.

Inside :meth:`KVCache.attached`, a forward of the model processes the *next* tokens of each row: their keys
and values are appended to the cache, and their queries attend to the whole cache. Rows are aligned at their
end, so that all continue in the same column; shorter rows begin with padding, which is masked.

Latent attention caches one latent vector and one rotated key per token, from which the keys and values of all
heads are computed.

With a sliding window or chunks, a token reads only the columns in its window, but all columns are stored.

Full buffers grow by half. A compiled forward of one token uses fixed buffers, whose shapes and addresses do
not change. The column to write and the columns to attend to are tensors, and unwritten columns are masked.

Shapes: B rows, S new tokens, T columns, H heads, K key/value heads, G = H / K, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit import compat
from toolkit.cpu import token_attention
from toolkit.models.common.attention import AttentionBackend, AttentionMask, Prefix
from toolkit.models.common.attention_sdpa import SDPA, attend_with_sinks, scaled_dot_product
from toolkit.models.common.decoder import Decoder, TransformerBlock


@dataclass(frozen=True)
class CacheWindow:
    """The columns ``start`` to ``end`` of the new tokens, and their mask.

    For several tokens, ``mask`` is the mask of ``backend``. For one token it is (B, 1, 1, T) over the columns
    from ``oldest`` on, or None if all of them are visible. In fixed buffers, ``column`` (1,) is the token's
    column, and the mask covers all columns.
    """

    start: int
    end: int
    mask: AttentionMask
    backend: Any = None
    oldest: int = 0
    column: Tensor | None = None


class KVCache:
    """Keys and values of rows that begin with ``padding`` columns each. ``capacity`` columns are allocated
    initially, and never more if ``fixed``."""

    def __init__(
        self, layers: int, padding: Sequence[int], capacity: int, device: torch.device, *, fixed: bool = False
    ):
        self.backends = [_CachedAttention(self, len(padding), capacity) for _ in range(layers)]
        self.fixed = fixed
        self.capacity = capacity
        self.columns = torch.arange(capacity, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.padding = torch.empty(len(padding), dtype=torch.long, device=device)
        self.restart(padding)

    def restart(self, padding: Sequence[int]) -> None:
        """Clear the cache for the same number of new rows, reusing the buffers."""
        self.length = 0
        self.started = False
        self.column.zero_()
        self.padding.copy_(torch.tensor(padding))
        self.padded, self.paddings = any(padding), list(padding)

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next ``count`` tokens, (S,), or (B, S) if rows begin at different
        columns."""
        if self.fixed and self.started and count == 1:
            return self.column - self.padding[:, None]
        columns = torch.arange(self.length, self.length + count, device=self.padding.device)
        return (columns - self.padding[:, None]).clamp(min=0) if self.padded else columns

    def advance(self, count: int) -> None:
        """Advance by the ``count`` tokens of the last forward."""
        self.length += count
        self.started = True
        if self.fixed:
            self.column.fill_(self.length)

    def step_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of :meth:`take`, which change between forwards of one token in fixed buffers: the
        columns to attend to (T,), the column of the next token (1,) and the padding of each row (B,).

        On a CPU, T is the length rounded up to a multiple of 64, at most the capacity, and marked dynamic for
        torch.compile. On CUDA, T is the capacity, because CUDA graphs need static shapes.
        """
        if self.padding.device.type != "cpu":
            return self.columns, self.column, self.padding
        columns = torch.arange(min(token_attention.rounded(self.length + 1), self.capacity))
        compat.mark_dynamic(columns, 0)
        return columns, self.column, self.padding

    def take(self, columns: Tensor, column: Tensor, padding: Tensor) -> None:
        """Set the inputs of a compiled step."""
        self.columns, self.column, self.padding = columns, column, padding

    @contextmanager
    def attached(self, model: Decoder) -> Iterator[None]:
        """Route the attention of ``model`` through this cache."""
        attentions = [_block(block).attention for block in model.layers.values()]
        plain, own = model.backends, [attention.backend for attention in attentions]
        latent = model.args.mla is not None
        try:
            for attention, backend, it in zip(attentions, self.backends, own, strict=True):
                backend.takes_latents = latent
                # Other kernels on GPUs do not support heads as large as latent vectors.
                backend.plain = SDPA() if latent and self.padding.is_cuda else it
                attention.backend = backend
            model.backends = {it.window: backend for it, backend in zip(own, self.backends, strict=True)}
            yield
        finally:
            model.backends = plain
            for attention, it in zip(attentions, own, strict=True):
                attention.backend = it

    def window(self, plain: AttentionBackend, length: int, device: torch.device) -> CacheWindow:
        """Return the window of the next ``length`` columns for blocks whose backend is ``plain``. Each row is
        one document."""
        if self.fixed and self.started and length == 1:
            seen_BT = (self.columns <= self.column) & (self.columns >= self.padding[:, None])
            if reach := plain.reach(len(self.columns)):
                seen_BT &= self.columns > self.column - reach
            elif plain.chunked and plain.window:
                place_B1 = self.column - self.padding[:, None]
                seen_BT &= self.columns >= self.column - place_B1 % plain.window
            return CacheWindow(0, len(self.columns), seen_BT[:, None, None], column=self.column)
        start, end = self.length, self.length + length
        real_BT = torch.arange(end, device=device) >= self.padding[:, None] if self.padded else None
        if length == 1:
            oldest = end - (plain.reach(end) or end)
            if plain.chunked and plain.window and plain.window < end:
                firsts = [start - (start - padding) % plain.window for padding in self.paddings]
                oldest, begins = min(firsts), torch.tensor(firsts, device=device)
                real_BT = torch.arange(end, device=device) >= begins[:, None] if self.padded else None
            mask = None if real_BT is None else real_BT[:, None, None, oldest:]
            return CacheWindow(start, end, mask, oldest=oldest)
        # Padding is a separate document, so that no softmax row is empty. Not every backend supports padding.
        backend = plain if real_BT is None or plain.takes_padding else SDPA(plain.window, plain.chunked)
        documents = None if real_BT is None else real_BT.long()
        mask = backend.mask(documents, len(self.padding), end, device, first=start)
        return CacheWindow(start, end, mask, backend)


class _CachedAttention(AttentionBackend):
    """Attention backend of one block: appends new keys and values to its buffers and attends to all of them.

    The learned tokens of a prefix are stored before the first column and are visible to every query. Keys
    that are also passed as values are stored once. ``up`` are projections of latent attention, computed with
    its first tokens. ``plain`` is the block's own backend.
    """

    plain: AttentionBackend

    def __init__(self, cache: KVCache, rows: int, capacity: int):
        self.cache = cache
        self.rows, self.capacity = rows, capacity
        self.keys: Tensor | None = None  # (B, K, T, E), allocated with the first keys
        self.values: Tensor | None = None
        self.up: tuple[Tensor, Tensor] | None = None

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> CacheWindow:
        assert documents_BS is None and first == 0, "a row is one document and not sharded"
        return self.cache.window(self.plain, length, device)

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        mask: CacheWindow,
        prefix: Prefix | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        first = 0 if prefix is None else len(prefix[0])
        seen = mask.mask
        if first and seen is not None and q_BSHE.shape[1] == 1:
            seen = F.pad(seen, (first, 0), value=True)
        if mask.column is not None:
            assert self.keys is not None and self.values is not None, "a prompt comes first"
            column, last = mask.column + first, first + mask.end
            self.keys.index_copy_(2, column, k_BSKE.transpose(1, 2))
            if v_BSKE is not k_BSKE:
                self.values.index_copy_(2, column, v_BSKE.transpose(1, 2))
            return _attend_one(q_BSHE, self.keys[:, :, :last], self.values[:, :, :last], seen, sinks_H)
        start, end = first + mask.start, first + mask.end
        k_BKTE, v_BKTE = self._reserve(end, first, k_BSKE, once=v_BSKE is k_BSKE)
        k_BKTE[:, :, start:end] = k_BSKE.transpose(1, 2)
        if v_BSKE is not k_BSKE:
            v_BKTE[:, :, start:end] = v_BSKE.transpose(1, 2)
        if mask.start == 0 and prefix is not None:
            for buffer, x_PKE in zip((k_BKTE, v_BKTE), prefix, strict=True):
                buffer[:, :, :first] = x_PKE.transpose(0, 1)
        if q_BSHE.shape[1] == 1:
            begin = first + mask.oldest if mask.oldest else 0
            products = sinks_H is None and token_attention.takes(q_BSHE, k_BSKE, end - begin)
            last = min(begin + token_attention.rounded(end - begin), k_BKTE.shape[2]) if products else end
            keys, values = k_BKTE[:, :, begin:last], v_BKTE[:, :, begin:last]
            if first and begin:  # a window does not hide the prefix
                keys = torch.cat([k_BKTE[:, :, :first], keys], dim=2)
                values = torch.cat([v_BKTE[:, :, :first], values], dim=2)
            if products:
                return token_attention.attend(q_BSHE, keys, values, seen, unseen=last - end)
            return _attend_one(q_BSHE, keys, values, seen, sinks_H)
        if mask.start:
            k_BSKE, v_BSKE = (x[:, :, first:end].transpose(1, 2) for x in (k_BKTE, v_BKTE))
        given = {"prefix": prefix, "sinks_H": sinks_H}
        return mask.backend(
            q_BSHE, k_BSKE, v_BSKE, seen, **{name: it for name, it in given.items() if it is not None}
        )

    def _reserve(self, end: int, first: int, like: Tensor, *, once: bool) -> tuple[Tensor, Tensor]:
        """Return the buffers with at least ``end`` columns, ``first`` of them for the prefix; the same buffer
        for keys and values if ``once``."""
        if self.keys is None or self.values is None:
            columns = max(first + self.capacity, end)
            if not self.cache.fixed:  # in fixed buffers, the mask covers all columns
                columns = token_attention.rounded(columns)
            shape = (self.rows, like.shape[2], columns, like.shape[3])
            # Zeros, because even masked values must be finite.
            self.keys = like.new_zeros(shape)
            self.values = self.keys if once else like.new_zeros(shape)
            if self.cache.fixed:
                for buffer in (self.keys, self.values):
                    compat.mark_static_address(buffer)
        elif end > self.keys.shape[2]:
            assert not self.cache.fixed, "fixed buffers have capacity for all tokens"
            more = max(end, self.keys.shape[2] * 3 // 2) - self.keys.shape[2]
            self.keys, values = F.pad(self.keys, (0, 0, 0, more)), self.values
            self.values = self.keys if once else F.pad(values, (0, 0, 0, more))
        return self.keys, self.values


def _attend_one(
    q_B1HE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, sinks_H: Tensor | None
) -> Tensor:
    """Compute attention of one new token per row to that row. Heads that share keys become queries of one
    head, so that keys are read once and any kernel supports them."""
    if sinks_H is not None:
        return attend_with_sinks(q_B1HE.transpose(1, 2), k_BKTE, v_BKTE, mask, sinks_H).transpose(1, 2)
    q_BKGE = q_B1HE.squeeze(1).unflatten(1, (k_BKTE.shape[1], -1))
    out_BKGE = scaled_dot_product(q_BKGE, k_BKTE, v_BKTE, mask)
    return out_BKGE.flatten(1, 2)[:, None]


def _block(module: torch.nn.Module) -> TransformerBlock:
    assert isinstance(module, TransformerBlock)
    return module
