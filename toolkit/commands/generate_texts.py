"""Generate the texts of ``llama-toolkit generate`` in batches, and print them on rank 0."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from toolkit import cpu
from toolkit.commands.load_asked import load_as_asked, sampling_as_asked
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed import process_group
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, Problem
from toolkit.generation.generator import Generator
from toolkit.generation.load import check_tokenizer, require_tokenizer
from toolkit.generation.sampling import Sampling
from toolkit.generation.text import TextStream
from toolkit.models.common.args import ModelArgs


def _token_ids(tokenizer: Tokenizer, names: Sequence[str]) -> set[int]:
    """Return the ids of --stop-token.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    ids = set()
    for name in names:
        token = tokenizer.special_tokens.get(name, int(name) if name.isdecimal() else None)
        if token is None or token >= tokenizer.n_words:
            known = ", ".join(list(tokenizer.special_tokens)[:8])
            fix = f"name one of {known} …, or give an id below {tokenizer.n_words}"
            raise ConfigError(Problem("the tokenizer has no such special token", fix, "--stop-token", name))
        ids.add(token)
    return ids


class _Printer:
    """Prints generated texts on rank 0: streamed for one prompt without --json, otherwise when complete."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[str], *, as_json: bool, adapters: Sequence[str]
    ):
        self.as_json = as_json
        self.streams = len(prompts) == 1 and len(adapters) <= 1 and not as_json
        self.adapter = ""  # in use, where there are several
        self.several = len(prompts) > 1
        self.shown = not dist.is_initialized() or dist.get_rank() == 0
        self.tokenizer = tokenizer
        self.prompts = prompts

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True)

    def say(self, text: str) -> None:
        if self.shown:
            print(text, end="", flush=True)

    def batch(self, first: int, encoded: Sequence[list[int]], generated: Sequence[list[int]]) -> None:
        """Print the texts of a batch of prompts, the first of which has the index ``first``."""
        for number, (ids, tokens) in enumerate(zip(encoded, generated, strict=True), start=first):
            stream = TextStream(self.decode, ids)
            text = "".join(map(stream.add, tokens)) + stream.rest()
            prompt = self.prompts[number]
            if self.as_json:
                told = {"prompt": prompt, "text": text, "tokens": tokens}
                told |= {"adapter": self.adapter} if self.adapter else {}
                self.say(json.dumps(told, ensure_ascii=False) + "\n")
            elif not self.streams:
                place = f"{number + 1}/{len(self.prompts)} {self.adapter}".rstrip()
                self.say(f"[{place}] {prompt}{text}\n")


def run(arguments: argparse.Namespace, of_rank_0: list[str]) -> None:
    """Generate and print the texts of rank 0's prompts."""
    sampling = sampling_as_asked(arguments)
    named: set[int] = set()

    def check(tokenizer: Tokenizer | None, args: ModelArgs) -> None:
        named.update(_token_ids(check_tokenizer(tokenizer, args), arguments.stop_token))

    cpu.enable(not arguments.no_cpu_fast_paths)
    loaded = load_as_asked(arguments, add_bos=arguments.add_bos_token, check=check)
    tokenizer = require_tokenizer(loaded)
    prompts = Ranks().on_rank_0(lambda: of_rank_0)
    stop_ids = named.union(tokenizer.stop_ids, loaded.eos_ids)
    encoded = [tokenizer.encode(prompt, bos=tokenizer.adds_bos) for prompt in prompts]
    adapters = list(loaded.adapters.adapters) if loaded.adapters else []
    printer = _Printer(tokenizer, prompts, as_json=arguments.json, adapters=adapters)
    start, made = time.monotonic(), 0
    for number, name in enumerate(adapters or [""]):
        if number:
            loaded.select(name)
        printer.adapter = name if len(adapters) > 1 else ""
        generator = loaded.generator(compiled=arguments.compile)
        made += _generate(arguments, generator, printer, encoded, sampling, stop_ids)
    seconds = time.monotonic() - start
    if printer.shown:
        print(f"{made:,} tokens in {seconds:.1f} s, {made / seconds:,.1f} tokens/s", file=sys.stderr)
    process_group.stop()


def _generate(
    arguments: argparse.Namespace,
    generator: Generator,
    printer: _Printer,
    encoded: Sequence[list[int]],
    sampling: Sampling,
    stop_ids: set[int],
) -> int:
    """Generate the texts of all prompts and return their number of tokens."""
    generator.check(encoded)
    made = 0
    for first in range(0, len(encoded), arguments.batch_size):
        rows = encoded[first : first + arguments.batch_size]
        generated: list[list[int]] = [[] for _ in rows]
        stream = TextStream(printer.decode, rows[0])
        if printer.streams:
            printer.say(printer.prompts[0])
        for tokens in generator.stream(
            rows, max_new_tokens=arguments.max_new_tokens, sampling=sampling, stop_ids=stop_ids, number=first
        ):
            for row, token in enumerate(tokens):
                if token is not None:
                    generated[row].append(token)
            if printer.streams and tokens[0] is not None:
                printer.say(stream.add(tokens[0]))
        if printer.streams:
            printer.say(stream.rest() + "\n")
        printer.batch(first, rows, generated)
        made += sum(map(len, generated))
    return made
