"""What the ranks of the launch benchmark do. It imports torch alone, as little as a launcher's children can do with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def work() -> float:
    """What each rank does once its group is ready."""
    tensor = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.item()


def spawned(rank: int, world_size: int, store: str, results: Any) -> None:
    """A rank of `torch.multiprocessing.spawn`, which brings no result back by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results[rank] = work()
    dist.barrier()  # a rank that leaves early breaks one that is still connecting
    dist.destroy_process_group()


def elastic() -> float:
    """A rank of `elastic_launch`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = work()
    dist.barrier()
    dist.destroy_process_group()
    return result
