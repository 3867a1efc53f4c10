"""Asynchronous tensor parallelism, as far as a CPU shows it: what of a block inductor fuses.

The kernels that overlap matmuls with copies between GPUs exist for CUDA alone; here their plain equivalents
stand in for them, which torch has for its own tests. So this is about the graphs: that the collectives are
found next to their matmuls, and that what replaces them is the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed import _symmetric_memory as symmetric_memory

from tests.helpers import run_world
from tests.models.small_llama import small
from tests.parallel.sharded import BATCH, SINGLE, changed, furthest, gradients, plain_gradients, sharded
from toolkit.config.parallelism import Compile
from toolkit.parallel import autograd_collectives

pytestmark = pytest.mark.slow  # inductor compiles for a minute

ARGS = small("llama3.1", n_layers=2, vocab_size=308)
ON = changed(SINGLE, enable_async_tensor_parallel=True)
BLOCKS = Compile(enable=True, components=["model"])
PLAIN = {
    "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
}


def _fused(folder: str) -> tuple[Counter[str], float]:
    """How often the fused operators ran in a forward and backward, and the error of its gradients."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return PLAIN[name](*args, **kwargs)

        return kernel

    library = torch.library.Library("symm_mem", "IMPL")
    for name in PLAIN:
        library.impl(name, counted(name), "CPU")
    tokens, labels = BATCH
    with (
        patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder),
        patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
    ):
        model = sharded(ARGS, ON, tp=2, compiling=BLOCKS, dtype=torch.float32)
        model(tokens, labels=labels).backward()
    return calls, furthest(gradients(model), plain_gradients(ARGS))


def _off() -> tuple[bool, bool]:
    """Switches of it that are left on in a process whose next model does without."""
    sharded(ARGS, SINGLE, tp=2, compiling=Compile(enable=True, components=["model"], backend="aot_eager"))
    return inductor_config._micro_pipeline_tp, autograd_collectives.always_copy


def _world(folder: str) -> Any:
    return _fused(folder), _off()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_world(_world, 2, str(tmp_path_factory.mktemp("inductor")))


def test_collectives_are_fused_with_their_matmuls(ranks: list[Any]) -> None:
    for (calls, far), _ in ranks:
        # Of a block: q, k, v and w1, w3 with their gather, wo and w2 with their scatter, and with the gather
        # in their backward. Gradients of q, k, v are added before they are scattered, which nothing fuses.
        assert calls["fused_all_gather_matmul"] == 4 * ARGS.n_layers
        assert calls["fused_matmul_reduce_scatter"] == 2 * ARGS.n_layers
        assert far < 1e-5


def test_the_next_model_is_without(ranks: list[Any]) -> None:
    assert [off for _, off in ranks] == [(False, False)] * 2
