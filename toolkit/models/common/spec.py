"""The description of a family of models that the toolkit reads. Imports no torch.

What every run of a family needs is a value; what some need is a method that imports it when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import Row, decoder_rows, dense_block

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub
    from toolkit.models.common.tiktoken_form import TiktokenForm

CONFIG = "config.json"
"""The shape of a model beside weights in Hugging Face's form."""
PARAMS = "params.json"
"""The shape of a model beside weights in Meta's form, consolidated.00.pth and so on."""


class MetaParams(Protocol):
    """The params.json of a family."""

    def args_of(self, folder: Path, *, vocab_size: int) -> ModelArgs:
        """Read the shape of the model whose params.json is in ``folder``; ``vocab_size`` is the embedding's.

        Raises:
            DataError: there is no such file, or it is of another model.
        """

    def params_json(self, args: ModelArgs) -> dict[str, Any]:
        """Build the params.json of a model."""


@dataclass(frozen=True)
class ModelSpec(ABC):
    """A family: the sizes of its models, its forms on disk and at Hugging Face, its tokenizers and prompts.

    Attributes:
        sizes: shapes by ``model.name`` and ``model.flavor``. Of equal shapes, messages name the first.
        ffn_rule: for a name and a flavor, the feed-forward width that follows from another ``model.dim``;
            None keeps the width.
    """

    sizes: Mapping[str, Mapping[str, ModelArgs]]
    ffn_rule: Callable[[str, str], Callable[[int], int] | None] = lambda name, flavor: None

    @abstractmethod
    def hf_config(self) -> HFConfig:
        """Hugging Face's config.json."""

    def decoder(self) -> type | None:
        """A subclass of :class:`~toolkit.models.common.decoder.Decoder` with the parameters and buffers of
        :meth:`rows`; None for that itself."""
        return None

    def block(self, args: ModelArgs, layer: int) -> Sequence[Row]:
        """The rows of block ``layer``, in the order of its module's parameters."""
        return dense_block(args, layer)

    def rows(self, args: ModelArgs) -> Sequence[Row]:
        """The rows of the whole model."""
        return decoder_rows(args, (self.block(args, layer) for layer in range(args.n_layers)))

    def meta_params(self) -> MetaParams | None:
        """params.json, where Meta publishes the family as that and consolidated.*.pth."""
        return None

    def tiktoken_forms(self) -> Sequence[TiktokenForm]:
        """The tokenizers of the family that come as tiktoken files."""
        return ()

    def chat_formats(self) -> Mapping[str, type[ChatFormat]]:
        """Formats of prompts by name, beside the templates that come with tokenizers."""
        return {}

    def reported(self, args: ModelArgs) -> Sequence[str]:
        """Names of the losses and statistics that blocks report
        (:class:`~toolkit.models.common.block_output.BlockOutput`)."""
        return ()

    def hub(self) -> Hub | None:
        """The family's models on the Hugging Face Hub."""
        return None
