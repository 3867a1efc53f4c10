"""The refusal of a model's name or flavor that does not exist. Imports no torch."""

from __future__ import annotations

from toolkit.errors import Problem, did_you_mean
from toolkit.models.common.attention_choice import flavor_attention
from toolkit.models.registry import presets


def unknown(name: str, flavor: str) -> Problem:
    """Tell which preset a name or flavor that does not exist may mean."""
    sizes = presets()
    if name not in sizes:
        fix = did_you_mean(name, sizes, "set model.name to one of them")
        return Problem(f"the models are {', '.join(sizes)}", fix, "model.name", name)
    elsewhere = [other for other, flavors in sizes.items() if flavor in flavors]
    fix = did_you_mean(flavor, sizes[name], "set model.flavor to one of them")
    size, named = flavor.partition("_")[0], flavor_attention(flavor)
    if named and size in sizes[name]:
        fix = f'set model.flavor = "{size}" and model.attention = "{named}"'
    if elsewhere:
        fix = f"{flavor} is a flavor of {', '.join(elsewhere)}: set model.name to one of them, or {fix}"
    return Problem(f"the flavors of {name} are {', '.join(sizes[name])}", fix, "model.flavor", flavor)
