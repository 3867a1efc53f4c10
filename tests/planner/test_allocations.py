"""Parts of a step's memory that are easily missed."""

from __future__ import annotations

import torch

from toolkit.config import load_config
from toolkit.distributed.dtensor import local
from toolkit.models.from_config import model_args
from toolkit.parallel.dims import degrees
from toolkit.planner.allocations import track_memory
from toolkit.planner.fake_step import fake_run

_FLAGS = """--model.name llama3 --model.flavor debugmodel --model.vocab_size 512 --model.n_layers 2
--training.seq_len 64 --training.global_batch_size 4 --training.local_batch_size 1
--activation_checkpoint.mode none --parallelism.tensor_parallel_degree 2
--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_first_stage_less_layers 0
--parallelism.pipeline_parallel_last_stage_less_layers 0"""


def test_gradients_that_wait_for_the_last_micro_batch_are_counted_where_tp_cuts_them() -> None:
    config = load_config(_FLAGS.split())
    args = model_args(config, tokenizer_vocab=None)
    layout = degrees(config.parallelism, 4)
    assert layout
    with fake_run(config, args, layout, 0, param_dtype=torch.bfloat16) as run:
        numbers = sum(local(it).numel() for model in run.model_parts.models for it in model.parameters())
        with track_memory(run.model_parts.models, run.optimizer, run.state) as found:
            run.step()
        last = [parts for moment, parts in found().curve if moment == "backward of layers.0"][-1]
    assert last["reductions"] >= 4 * numbers  # in fp32; no rank shares parameters with this one but over tp
