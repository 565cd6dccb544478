"""`lab.run` under torchrun: the processes that are there are the ranks, on one machine or on many."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

from . import context, threads

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")

_runs = itertools.count()  # torchrun's store outlives a run and keeps its keys: each run needs its own


def is_active() -> bool:
    """Whether this process was started by torchrun (its environment variables are set)."""
    return all(name in os.environ for name in _VARIABLES)


def run_here(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Be one rank: call ``fn(*args)`` in this process and return the results of all ranks, in rank order.

    An exception in `fn` leaves this process as it is, and torchrun ends the others.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if has_gpu:
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        raise RuntimeError("lab.run makes the process group itself: destroy yours before it, or do not create one")
    # The agent's store outlives a restart, too: where a rank reads the address of one that was killed, it waits for it.
    life = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {world_size}"
    store = dist.PrefixStore(f"dtlib/{life}/{next(_runs)}", _store())
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    exchange = _exchange_over(store, rank, world_size)
    context.enter(
        context.RankContext(
            rank=rank,
            world_size=world_size,
            private_network=False,
            why_not_private="under torchrun the ranks are on the machine's own network",
            exchange=exchange,
        )
    )
    try:
        threads.listen()
        result = fn(*args)
        threads.raise_first()
        results: list[Any] = [None] * world_size
        dist.all_gather_object(results, result)
        exchange(b"")  # nobody leaves before all are done
        return results
    finally:
        context.leave()
        dist.destroy_process_group()


@functools.cache
def _store() -> Any:
    """The key-value store that torchrun offers to its processes."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _exchange_over(store: Any, rank: int, world_size: int) -> Callable[[bytes], list[bytes]]:
    """The exchange of a rank through the group's key-value store, on its own connection."""

    calls = itertools.count()

    def exchange(payload: bytes) -> list[bytes]:
        key = f"exchange/{next(calls)}"
        store.set(f"{key}/{rank}", pickle.dumps(payload))
        return [pickle.loads(store.get(f"{key}/{other}")) for other in range(world_size)]

    return exchange
