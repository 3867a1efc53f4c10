"""The interface of a model family. Imports no torch.

Attributes are needed by every run; methods import on demand the parts that only some runs need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import ParameterRow, block_rows, decoder_rows

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub
    from toolkit.models.common.tiktoken_form import TiktokenForm

CONFIG = "config.json"
"""File that describes the architecture, next to weights in the Hugging Face format."""
PARAMS = "params.json"
"""File that describes the architecture, next to weights in Meta's format (consolidated.00.pth and so on)."""


class MetaParams(Protocol):
    """Reader and writer of a family's params.json."""

    def read_args(self, folder: Path, *, vocab_size: int) -> ModelArgs:
        """Read the model args from params.json in ``folder``; ``vocab_size`` is the embedding's.

        Raises:
            DataError: the file is missing, or describes another model.
        """

    def params_json(self, args: ModelArgs) -> dict[str, Any]:
        """Build the params.json of a model."""


@dataclass(frozen=True)
class ModelSpec(ABC):
    """A model family: its presets, file formats, Hub repositories, tokenizers and chat formats.

    Attributes:
        sizes: model args by ``model.name`` and ``model.flavor``. If presets are equal, messages name the
            first.
        ffn_rule: maps a name and a flavor to the function from ``model.dim`` to the feed-forward width;
            None keeps the preset's width.
    """

    sizes: Mapping[str, Mapping[str, ModelArgs]]
    ffn_rule: Callable[[str, str], Callable[[int], int] | None] = lambda name, flavor: None

    @abstractmethod
    def hf_config(self) -> HFConfig:
        """Return the reader and writer of Hugging Face's config.json."""

    def decoder(self) -> type | None:
        """Return a subclass of :class:`~toolkit.models.common.decoder.Decoder` whose parameters and buffers
        are :meth:`rows`; None means Decoder itself."""
        return None

    def block(self, args: ModelArgs, layer: int) -> Sequence[ParameterRow]:
        """Return the rows of block ``layer``, in the parameter order of its module."""
        return block_rows(args, layer)

    def rows(self, args: ModelArgs) -> Sequence[ParameterRow]:
        """Return the rows of the whole model."""
        return decoder_rows(args, (self.block(args, layer) for layer in range(args.n_layers)))

    def meta_params(self) -> MetaParams | None:
        """Return the reader and writer of params.json; None if the family has no Meta format."""
        return None

    def tiktoken_forms(self) -> Sequence[TiktokenForm]:
        """Return the formats of the family's tiktoken files."""
        return ()

    def chat_formats(self) -> Mapping[str, type[ChatFormat]]:
        """Return chat formats by name; they supplement the chat templates of tokenizers."""
        return {}

    def metric_names(self, args: ModelArgs) -> Sequence[str]:
        """Return the names of the losses and statistics that blocks return
        (:class:`~toolkit.models.common.block_output.BlockOutput`)."""
        return ()

    def hub(self) -> Hub | None:
        """Return the family's repositories on the Hugging Face Hub."""
        return None
