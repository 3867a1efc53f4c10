"""Worlds of gloo ranks for tests, started from one preloaded server: a world costs tenths of a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "toolkit.checkpointer",
        "toolkit.trainer",
        "toolkit.validate",
        "toolkit.parallel.activation_checkpoint",
        "toolkit.parallel.compile",
        "toolkit.parallel.float8",
        "toolkit.parallel.pipeline_parallel",
        "toolkit.parallel.tensor_parallel",
        "tests.frozen",  # the last
    ]
)


def free_port() -> int:
    """Find a port that nothing listens at, below those of Linux's own choice: no connection takes it."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _rank_main(connection: Any, fn: Callable[..., Any], rank: int, size: int, port: int, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    from toolkit.distributed import process_group

    torch.set_num_threads(1)
    try:
        process_group.start(torch.device("cpu"), timeout_seconds=1800)
        # By value: torch would hand tensors over as files that this process keeps open, and it ends.
        connection.send_bytes(pickle.dumps((True, fn(*args))))
        connection.recv_bytes()  # the others may still want rank 0's store
        process_group.stop()
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        connection.close()


@contextlib.contextmanager
def in_layout(layout: str) -> Iterator[None]:
    """Names the layout in which something fails, where a world runs one after the other."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"in the layout: {layout}") from error


def run_world(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Run ``fn(*args)`` on each rank of a gloo world and return what the ranks returned, in rank order.

    ``fn`` must be a module-level function; results must pickle. The first rank that fails, and a
    world that does not finish within ``timeout`` seconds, raise with what the rank printed.
    """
    port = free_port()
    pipes, processes = [], []
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_rank_main, args=(theirs, fn, rank, world_size, port, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        while len(results) < world_size:
            pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(world_size)) - set(results))
                raise TimeoutError(f"ranks {missing} of {world_size} did not finish in {timeout} s")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 (our own bytes)
                except EOFError:
                    succeeded, value = False, "the process died without a word"
                if not succeeded:
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{value}")
                results[rank] = value
        for pipe in pipes:
            pipe.send_bytes(b"all have finished")
    finally:
        finished = len(results) == world_size
        for process in processes:
            process.join(timeout=10 if finished else 0.1)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world_size)]
