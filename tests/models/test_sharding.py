import torch

from toolkit.models.common.decoder import Decoder
from toolkit.models.common.sharding import fsdp_units
from toolkit.models.registry import resolve


def build(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(resolve(name, "debugmodel", n_layers=3))


def owned(units) -> list[torch.nn.Parameter]:
    return [p for unit in units for module in unit for p in module.parameters()]


def test_units_hold_every_parameter_once_in_forward_order():
    model = build("llama3.1")
    units = fsdp_units(model)
    blocks = list(model.layers.values())
    assert units == [[model.tok_embeddings], *[[block] for block in blocks], [model.norm, model.output]]
    assert [id(p) for p in owned(units)] == [id(p) for p in model.parameters()]


def test_a_tied_embedding_and_the_last_norm_are_left_to_the_root():
    model = build("llama3.2")
    held = {id(p) for p in owned(fsdp_units(model))}
    left = {name for name, p in model.named_parameters() if id(p) not in held}
    assert left == {"tok_embeddings.weight", "norm.weight"}


def test_a_stage_without_embedding_or_head_has_units_for_the_rest():
    model = build("llama3.1")
    model.tok_embeddings = model.norm = model.output = None
    assert fsdp_units(model) == [[block] for block in model.layers.values()]
