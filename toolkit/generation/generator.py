"""Generate tokens: one forward for the prompts, then one per new token, until all rows have stopped.

This runs in one process or on all ranks of a sharded model; all ranks make the same calls with the same
arguments. Each rank computes full rows, and rank 0 broadcasts the tokens, so rounding cannot make them
diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import DataError
from toolkit.generation.compiled import Compiler, Step, decode_step
from toolkit.generation.kv_cache import KVCache
from toolkit.generation.sampling import RandomNumbers, Sampling, process_logits, sample
from toolkit.models.common.decoder import Decoder

FIRST_RESERVED = 256
"""Number of new tokens for which the cache is initially allocated; it grows as needed."""

CAPACITY_STEP = 512
"""Cache capacities for compiled forwards are multiples of this, to limit compilations."""

_NO_TOKEN = -1
"""Placeholder for a missing token."""

Stop = Callable[[int, list[int]], bool]
"""Function called with the index of a prompt and its tokens so far; True ends the prompt. It must return the
same on every rank."""


class Generator:
    """Generates tokens with ``model``; ``group`` contains the ranks of a sharded model.

    ``vocabulary`` limits the token ids, because a padded model has more ids than its tokenizer; None allows
    all ids. ``compiler`` compiles the forward of one token, once per number of rows and per
    :data:`CAPACITY_STEP` tokens.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        vocabulary: int | None = None,
        group: dist.ProcessGroup | None = None,
        compiler: Compiler | None = None,
    ):
        self.model = model
        self.vocabulary = min(vocabulary or model.args.vocab_size, model.args.vocab_size)
        self.group = group
        self._compiled = compiler(decode_step(model)) if compiler else None
        self._fixed: KVCache | None = None  # reused, because a CUDA graph contains its addresses

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] = (),
        stop: Stop | None = None,
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """Generate the tokens after each prompt, ``batch_size`` prompts at a time (None: all), as in
        :meth:`stream`."""
        self.check(prompts)
        texts: list[list[int]] = [[] for _ in prompts]
        size = batch_size or max(1, len(prompts))
        for first in range(0, len(prompts), size):
            steps = self.stream(
                prompts[first : first + size],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop_ids=stop_ids,
                stop=stop,
                number=first,
            )
            for tokens in steps:
                for row, token in enumerate(tokens):
                    if token is not None:
                        texts[first + row].append(token)
        return texts

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] = (),
        stop: Stop | None = None,
        number: int = 0,
    ) -> Iterator[list[int | None]]:
        """Yield the next token of every prompt, or None for a finished one, until all are finished.

        A prompt is finished by a token of ``stop_ids``, which is yielded; when ``stop`` returns True; after
        ``max_new_tokens``; or when it fills the model's context. ``number`` is the index of the first prompt,
        which seeds the sampling.

        Raises:
            DataError: a prompt is empty, leaves no room in the context or has ids outside the vocabulary; or
                the model's logits are not finite.
        """
        self.check(prompts, number)
        sampling = sampling or Sampling()
        longest = max(map(len, prompts), default=0)
        context = self.model.args.max_seq_len
        steps = min(max_new_tokens, context - min(map(len, prompts), default=context))
        if steps <= 0:
            return
        padding = [longest - len(prompt) for prompt in prompts]
        state = _Batch(self.model, prompts, self._cache(padding, longest, steps), self._compiled)
        chooser = _Chooser(sampling, prompts, number, self.vocabulary, self.group)
        generated: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        tokens_BS = state.prompts
        for step in range(steps):
            # Inference mode is faster, but FSDP needs tensors' version counters.
            with torch.inference_mode() if self.group is None else torch.no_grad():
                tokens_B = chooser.choose(state.logits(tokens_BS))
            tokens: list[int | None] = list(tokens_B.tolist())
            for row in range(len(prompts)):
                token = tokens[row]
                if row not in running or token is None:
                    tokens[row] = None
                    continue
                generated[row].append(token)
                full = len(prompts[row]) + len(generated[row]) == context
                if full or token in stop_ids or (stop is not None and stop(number + row, generated[row])):
                    running.remove(row)
            yield tokens
            if not running or step == steps - 1:
                return
            tokens_BS = tokens_B[:, None]

    def _cache(self, padding: Sequence[int], longest: int, steps: int) -> KVCache:
        layers, device = len(self.model.layers), next(self.model.parameters()).device
        if self._compiled is None:
            return KVCache(layers, padding, longest + min(steps, FIRST_RESERVED), device)
        capacity = -(-(longest + steps) // CAPACITY_STEP) * CAPACITY_STEP
        cache = self._fixed
        if cache is None or (len(cache.padding), cache.capacity) != (len(padding), capacity):
            self._fixed = cache = KVCache(layers, padding, capacity, device, fixed=True)
        cache.restart(padding)
        return cache

    def check(self, prompts: Sequence[Sequence[int]], number: int = 0) -> None:
        """Check that each prompt can be continued; messages count prompts from ``number`` + 1.

        Raises:
            DataError: a prompt is invalid, as in :meth:`stream`.
        """
        args = self.model.args
        for index, prompt in enumerate(prompts, start=number + 1):
            if not prompt:
                raise DataError(f"prompt {index} has no tokens: generation needs at least one, such as BOS")
            if len(prompt) >= args.max_seq_len:
                raise DataError(
                    f"prompt {index} has {len(prompt):,} tokens, but the context of the model is "
                    f"{args.max_seq_len:,}: shorten it to leave room for new tokens"
                )
            if wrong := [token for token in prompt if not 0 <= token < self.vocabulary]:
                raise DataError(
                    f"prompt {index} has the token id {wrong[0]}, but the vocabulary has "
                    f"{self.vocabulary:,} entries; is this the tokenizer the model was trained with?"
                )


class _Batch:
    """Prompts aligned at their end, with their KV cache."""

    def __init__(
        self, model: Decoder, prompts: Sequence[Sequence[int]], cache: KVCache, compiled: Step | None
    ):
        self.model, self.cache, self.compiled = model, cache, compiled
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.prompts = torch.tensor(rows, device=cache.padding.device)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Run the model on the next tokens of each row and return the logits (B, V) of the last position."""
        count = tokens_BS.shape[1]
        positions = self.cache.positions(count)
        with self.cache.attached(self.model):
            if self.compiled is not None and self.cache.started:
                logits_B1V = self.compiled(tokens_BS, positions, *self.cache.step_inputs())
            else:
                with _last_position(self.model):
                    logits_B1V = self.model(tokens_BS, positions=positions)
        self.cache.advance(count)
        return logits_B1V[:, -1]


@contextmanager
def _last_position(model: Decoder) -> Iterator[None]:
    """Make the model compute only the logits of the last token."""

    def last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # A non-contiguous batch, even of one row, would be multiplied row by row, with copied weights.
        return inputs[0][:, -1:].clone(memory_format=torch.contiguous_format), *inputs[1:]

    assert model.output is not None
    hook = model.output.register_forward_pre_hook(last)
    try:
        yield
    finally:
        hook.remove()


class _Chooser:
    """Chooses tokens from logits, the same on every rank."""

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        number: int,
        vocabulary: int,
        group: dist.ProcessGroup | None,
    ):
        self.sampling = sampling
        self.vocabulary = vocabulary
        self.group = group
        self.draws = (
            None if sampling.greedy else RandomNumbers(sampling.seed, range(number, number + len(prompts)))
        )
        self.seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
            for seen_V, prompt in zip(self.seen_BV, prompts, strict=True):
                seen_V[list(prompt)] = True

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token (B,) of each row.

        Raises:
            DataError: the logits of a row are not finite; raised on every rank.
        """
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV.to(logits_BV.device)
        logits_BV = process_logits(logits_BV[:, : self.vocabulary], self.sampling, self.seen_BV)
        tokens_B = logits_BV.argmax(-1) if self.draws is None else sample(logits_BV, self.draws.next())
        tokens_B = tokens_B.where(logits_BV.amax(-1).isfinite(), _NO_TOKEN)
        if self.group is not None:
            dist.broadcast(tokens_B, group=self.group, group_src=0)
        if (tokens_B == _NO_TOKEN).any():
            raise DataError(
                "the model's logits are not finite: its weights contain or produce NaN or infinity\n"
                "  fix:  use other weights, such as a checkpoint from before the run diverged"
            )
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, tokens_B[:, None], True)
        return tokens_B
