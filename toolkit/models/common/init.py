"""How parameters start. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.models.common.args import ModelArgs


@dataclass(frozen=True)
class Init:
    """A normal distribution, redrawn beyond ``cut`` standard deviations; ``std`` 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


def init_rule(name: str, args: ModelArgs) -> Init:
    """How the parameter ``name`` starts: as torchtitan's Llama 3, save for a tied embedding.

    Projections into the residual stream shrink with depth. The head gives logits of variance about
    one, so that training starts near ln(V). A tied embedding cannot have torchtitan's variance of one,
    under which each token would predict itself with logit √D·√D; 0.02 is what tied models use.
    """
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    if name.endswith(".bias"):
        return Init()
    if name == "tok_embeddings.weight":
        return Init(std=0.02 if args.tie_embeddings else 1.0)
    parts = name.split(".")
    if args.classifier is not None and parts[0] == "output":
        # Scores start as transformers' do; a layer before them keeps the size of what goes through it.
        sizes = (args.dim, *args.classifier.hidden_sizes)
        return Init(std=sizes[int(parts[2])] ** -0.5 if parts[1] == "hidden" else 0.02)
    if name == "output.weight":
        return Init(std=args.dim**-0.5, cut=3.0)
    if parts[-2] in ("wo", "w2", "w3"):
        return Init(std=0.02 / math.sqrt(2 * (int(parts[1]) + 1)))
    return Init(std=0.02)
