import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.helpers import run_world
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import Init
from toolkit.models.parameters import init_rule
from toolkit.models.registry import resolve
from toolkit.parallel.fsdp import fsdp_units
from toolkit.parallel.init_weights import BLOCK_ELEMENTS, initialize

# 2,048 rows of the embedding make a block: 4,099 are three blocks, unevenly over 4 ranks; so are 251.
SHAPES = {"several blocks": dict(vocab_size=4099, dim=128), "one block": dict(vocab_size=251, dim=48)}
# A matrix cut along columns, or both ways, as tensor parallelism will.
MATRIX = (3000, 200)


def llama(shape: str) -> Decoder:
    overrides = dict(n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=100) | SHAPES[shape]
    with torch.device("meta"):
        return Decoder(resolve("llama3", "debugmodel", **overrides))


def fill(model: Decoder, seed: int = 7) -> Decoder:
    model.to_empty(device="cpu")
    initialize(model.named_parameters(), seed, lambda name: init_rule(name, model.args))
    return model


def digests(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        content = whole.detach().contiguous().numpy().tobytes()
        found[name.replace("_checkpoint_wrapped_module.", "")] = hashlib.sha256(content).hexdigest()
    return found


def sharded(shape: str, mesh: DeviceMesh, *, checkpointed: bool = False) -> dict[str, str]:
    model = llama(shape)
    if checkpointed:
        for index in model.layers:
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    for unit in fsdp_units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return digests(fill(model))


def matrix(mesh: DeviceMesh | None = None, placements: list[Placement] | None = None) -> dict[str, str]:
    weight: Tensor = torch.empty(MATRIX)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(weight, mesh, placements) if mesh else weight)
    initialize(module.named_parameters(), 7, lambda name: Init(std=1.0, cut=1.5))
    return digests(module)


def all_layouts() -> dict[str, tuple[str, dict[str, str]]]:
    """Weights that each layout made, beside the name of what they should equal."""
    one, two = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")),
    )
    made = {
        "columns": ("matrix", matrix(one, [Shard(1)])),
        "rows and columns": ("matrix", matrix(two, [Shard(0), Shard(1)])),
        "replicated columns": ("matrix", matrix(two, [Replicate(), Shard(1)])),
    }
    for shape in SHAPES:
        made[f"{shape}, FSDP 4"] = (shape, sharded(shape, one))
        made[f"{shape}, FSDP 4, checkpointed"] = (shape, sharded(shape, one, checkpointed=True))
        made[f"{shape}, HSDP 2 x 2"] = (shape, sharded(shape, two))
        made[f"{shape}, FSDP 2"] = (shape, sharded(shape, two["inner"]))
    return made


def test_every_layout_has_the_same_bits():
    expected = {shape: digests(fill(llama(shape))) for shape in SHAPES} | {"matrix": matrix()}
    for rank, made in enumerate(run_world(all_layouts, 4, timeout=100)):
        assert len(made) == 3 + 4 * len(SHAPES)
        for layout, (reference, found) in made.items():
            assert found == expected[reference], f"{layout} on rank {rank}"


def vector(size: int, rule: Init, *, seed: int = 0, name: str = "weight") -> Tensor:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.empty(size)))
    initialize(module.named_parameters(), seed, lambda _: rule)
    return module.get_parameter(name).detach()


def test_numbers_follow_the_rule():
    assert torch.equal(vector(1000, Init(mean=3.0)), torch.full((1000,), 3.0))
    size = 3 * BLOCK_ELEMENTS
    normal = vector(size, Init(mean=2.0, std=0.5))
    # Standard errors: 0.5 / sqrt(786,432) = 6e-4 for the mean, 4e-4 for the deviation; five of them.
    assert abs(normal.mean() - 2) < 3e-3 and abs(normal.std() - 0.5) < 2e-3
    assert (normal - 2).abs().max() > 2
    cut = vector(size, Init(std=0.5, cut=2.0))
    assert cut.abs().max() <= 1.0
    # Redrawn, not piled up at the bound: the deviation of a normal cut at 2 is 0.8796.
    assert (cut.abs() == 1.0).sum() < 10 and abs(cut.std() / 0.5 - 0.8796) < 5e-3


def test_seed_name_and_block_each_change_the_numbers():
    blocks = vector(2 * BLOCK_ELEMENTS, Init(std=1.0)).split(BLOCK_ELEMENTS)
    others = [vector(1000, Init(std=1.0), seed=1), vector(1000, Init(std=1.0), name="bias")]
    starts = [values[:1000] for values in (*blocks, *others)]
    # Independent samples of 1,000 correlate by 0.03 at most times; none here may reach five times that.
    correlation = torch.corrcoef(torch.stack(starts)) - torch.eye(4)
    assert correlation.abs().max() < 0.15


def test_numbers_never_change_between_versions():
    # Runs of the same seed must stay comparable: a change here is a change of every initialisation.
    values = vector((1 << 18) + 1, Init(std=1.0), seed=42, name="a")
    first, second_block = [0.4167484939098358, -1.664280891418457], [-1.5499958992004395]
    torch.testing.assert_close(values[:2], torch.tensor(first), rtol=0, atol=0)
    torch.testing.assert_close(values[-1:], torch.tensor(second_block), rtol=0, atol=0)


def test_other_dtypes_are_the_fp32_numbers_cast():
    exact = fill(llama("one block"))
    for dtype in (torch.bfloat16, torch.float64):
        other = fill(llama("one block").to(dtype))
        for (name, a), b in zip(exact.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a.to(dtype), b), name


def test_a_model_without_storage_is_refused():
    model = llama("one block")
    with pytest.raises(ValueError, match="tok_embeddings.weight is on the meta device"):
        initialize(model.named_parameters(), 0, lambda name: init_rule(name, model.args))
