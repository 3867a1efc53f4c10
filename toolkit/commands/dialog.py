"""The dialog of ``llama-toolkit chat``, and its terminal."""

from __future__ import annotations

import argparse
import io
import sys
from collections import abc
from collections.abc import Collection

import torch.distributed as dist

from toolkit.commands.load_asked import load_as_asked, sampling_as_asked
from toolkit.data.chat.choose_format import chat_format, check_asked
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.distributed import process_group
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError, printable
from toolkit.generation.generator import Generator
from toolkit.generation.load import LoadedModel, check_tokenizer, require_tokenizer
from toolkit.generation.sampling import Sampling
from toolkit.generation.text import TextStream
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.chat_format import ChatFormat, Message

HELP = "/reset clears the dialog, /quit or /exit ends"
_ADAPTER = "/adapter"
_ENDS = ("/quit", "/exit")
_YEAR = 365 * 24 * 3600


class Dialog:
    """The turns of a dialog, within the context of a model. Answers end at the format's ``stop_ids`` and at
    those given here.

    ``answer`` streams the model's answer and records it. Sampling depends on the seed and the number of the
    turn, so that a dialog with the same seed is reproducible.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        form: ChatFormat,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        system: str | None = None,
    ):
        self._generator, self._tokenizer, self._form = generator, tokenizer, form
        self._sampling, self._max_new_tokens = sampling, max_new_tokens
        self._stop_ids = {*form.stop_ids, *stop_ids}
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.turns: list[Message] = []
        self.forgotten = 0

    def use(self, generator: Generator) -> None:
        """Continue with another generator."""
        self._generator = generator

    def reset(self) -> None:
        """Clear the dialog except the system prompt."""
        self.turns, self.forgotten = [], 0

    def answer(self, question: str) -> abc.Generator[str, None, None]:
        """Stream the answer; closing the generator ends it.

        Raises:
            DataError: the question alone is too long. A failed question is not recorded.
        """
        before = list(self.turns), self.forgotten
        self.turns.append({"role": "user", "content": question})
        try:
            yield from self._pieces(self._prompt_that_fits())
        except BaseException as error:
            if isinstance(error, Exception) or self.turns[-1]["role"] == "user":  # Ctrl-C before an answer
                self.turns, self.forgotten = before
            raise

    def _pieces(self, prompt: list[int]) -> abc.Generator[str, None, None]:
        ids: list[int] = []
        stream = TextStream(lambda tokens: self._tokenizer.decode(tokens, skip_special=True), prompt)
        begun = False
        try:
            for (token,) in self._generator.stream(
                [prompt],
                max_new_tokens=self._max_new_tokens,
                sampling=self._sampling,
                stop_ids=self._stop_ids,
                number=self.forgotten + len(self.turns) // 2,
            ):
                assert token is not None, "the only prompt runs to the end"
                if token in self._stop_ids:
                    break
                ids.append(token)
                piece = stream.add(token)
                piece = piece if begun else piece.lstrip()
                begun = begun or bool(piece)
                yield piece
            yield stream.rest()
        finally:
            text = self._tokenizer.decode(ids, skip_special=True).strip()
            self.turns.append({"role": "assistant", "content": text})

    def _prompt_that_fits(self) -> list[int]:
        """Encode the dialog, without its oldest turns if they leave no room for an answer."""
        context = self._generator.model.args.max_seq_len
        room = min(self._max_new_tokens, context // 4)
        while True:
            prompt = self._form.encode([*self._system, *self.turns])
            if len(prompt) + room <= context:
                return prompt
            if len(self.turns) == 1:
                raise DataError(
                    f"the message makes a prompt of {len(prompt):,} tokens, and the context of the model is "
                    f"{context:,}: shorten it to leave room for an answer"
                )
            del self.turns[:2]
            self.forgotten += 1


class Terminal:
    """Standard input and output of rank 0, which broadcasts the lines to the other ranks."""

    def __init__(self) -> None:
        self.distributed = dist.is_initialized()
        self.here = not self.distributed or dist.get_rank() == 0
        # A dialog may pause for days.
        group = process_group.new_file_group(timeout_seconds=_YEAR) if self.distributed else None
        self._ranks = Ranks(group)
        self.interactive = self._ranks.on_rank_0(lambda: sys.stdin.isatty())
        if self.here and isinstance(sys.stdin, io.TextIOWrapper):
            encoding = sys.stdin.encoding if self.interactive else "utf-8-sig"  # a file's byte order mark
            sys.stdin.reconfigure(encoding=encoding, errors="replace")

    def line(self) -> str | None:
        """Read the next message, None at the end of the input; the same on every rank."""
        return self._ranks.on_rank_0(self._input)

    def _input(self) -> str | None:
        try:
            return input("\n> " if self.interactive else "")
        except (EOFError, KeyboardInterrupt):
            return None

    def say(self, text: str, *, end: str = "\n") -> None:
        if self.here:
            print(text, end=end, flush=True)

    def note(self, text: str) -> None:
        if self.here:
            print(f"({printable(text)})", file=sys.stderr, flush=True)


def _switch(loaded: LoadedModel | None, dialog: Dialog, asked: str, terminal: Terminal) -> None:
    """Switch to the adapter that was ``asked`` for; "" is the base."""
    names = list(loaded.adapters.adapters) if loaded and loaded.adapters else []
    if asked and asked not in names:
        known = f"there are {', '.join(names)}" if names else "none was given with --adapter"
        terminal.note(f"no adapter is called {asked}: {known}")
        return
    if loaded and names:
        loaded.select(asked or None)
        dialog.use(loaded.generator())
    terminal.note(f"the adapter {asked} answers" if asked else "the model answers without an adapter")


def talk(dialog: Dialog, terminal: Terminal, loaded: LoadedModel | None = None) -> None:
    """Answer messages until /quit, /exit or the end of the input.

    Raises:
        DataError: a message cannot be answered, and there is no terminal to enter another.
    """
    while (line := terminal.line()) is not None and line.strip() not in _ENDS:
        if line.strip() == "/reset":
            dialog.reset()
            terminal.note("the dialog starts again")
            continue
        command, _, name = line.strip().partition(" ")
        if command == _ADAPTER:
            _switch(loaded, dialog, name.strip(), terminal)
            continue
        if not line.strip():
            continue
        forgotten = dialog.forgotten
        answer = dialog.answer(line)
        try:
            for piece in answer:
                terminal.say(piece, end="")
        except DataError as error:
            if not terminal.interactive:
                raise
            terminal.note(str(error))
            continue
        except KeyboardInterrupt:
            if terminal.distributed:  # the other ranks continue, and would wait
                raise
            answer.close()
        terminal.say("")
        if dialog.forgotten > forgotten:
            terminal.note(f"the oldest {dialog.forgotten} turns no longer fit the context and are forgotten")


def run(asked: argparse.Namespace) -> None:
    """Load the model and run the dialog on the terminal."""
    sampling = sampling_as_asked(asked)
    given: dict[str, bool | str] | None = asked.chat_template_kwargs
    if asked.format:
        given = given or {}
        check_asked(asked.format, given)

    def check(tokenizer: Tokenizer | None, args: ModelArgs) -> None:
        chat_format(check_tokenizer(tokenizer, args), asked.format, variables=given)

    loaded = load_as_asked(asked, check=check)
    tokenizer = require_tokenizer(loaded)
    variables = loaded.chat_template_kwargs if given is None else given
    form = chat_format(tokenizer, asked.format, variables=variables)
    dialog = Dialog(
        loaded.generator(),
        tokenizer,
        form,
        sampling=sampling,
        max_new_tokens=asked.max_new_tokens,
        stop_ids=loaded.eos_ids,
        system=asked.system,
    )
    terminal = Terminal()
    terminal.note(f"{form.name} format; {HELP}")
    if asked.format is None and not isinstance(form, ChatTemplate):
        terminal.note(
            f"the model has no chat template: its tokenizer suggests {form.name}. A model that was not "
            "trained on conversations in this format continues text, and does not answer"
        )
    if loaded.adapters:
        terminal.note(f"adapters: {', '.join(loaded.adapters.adapters)}; /adapter NAME switches")
    talk(dialog, terminal, loaded)
    process_group.stop()
