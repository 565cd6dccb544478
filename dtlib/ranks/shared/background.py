"""Saving while training goes on: what is saved is copied, and a thread writes the copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group

from . import alike


class Background:
    """Writes checkpoints behind training's back, one at a time; give it to `save` of `dp`, `zero` or `threed`.

        with reliability.Background() as background:
            for step in range(steps):
                ...
                zero.save(model, folder, extra=extra, background=background)

    `save` then returns as soon as this rank's part is copied, into memory that is kept from one save to the next, as
    many bytes as the rank writes (pinned for tensors of a GPU). A thread writes the copy, and its messages go through a
    group of its own, so that they do not meet training's. A save that comes while one is under way waits for it first.

    What goes wrong in the thread is raised, on all ranks that save, by the next `save`, by `wait`, or at the end of the
    block. A rank that is killed takes its copy with it: the older checkpoint is whole, as with `save` alone.

    `group` are the ranks that save, with `zero` those of the model's; all ranks of the job must make one, of whatever
    groups. Of the last save `waited_seconds` went to the one before it and `copied_seconds` to the copy. Both held
    training up; nothing else did but the thread's share of the processor.
    """

    def __init__(self, group: Group = None) -> None:
        alike.size_of(group)
        self.ranks = dist.get_process_group_ranks(group)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.ranks)
        # One after another on all ranks: torch's way around that, use_local_synchronization, hangs where ranks are in
        # different numbers of groups.
        groups = {ranks: dist.new_group(ranks, backend="gloo") for ranks in sorted(set(map(tuple, everyone)))}
        self.group = groups[tuple(self.ranks)]
        self.waited_seconds = self.copied_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, "save")
        self._under_way: Future[None] | None = None
        self._rooms = dict[Any, Tensor]()

    def start(self, found: dict[Any, Tensor], write: Callable[[Group], None]) -> None:
        """Put copies in the place of what is `found`, and have the thread `write` them, once the last save is over."""
        times = [time.perf_counter()]
        self.wait()
        times.append(time.perf_counter())
        for key, tensor in found.items():
            room = self._rooms.get(key)
            if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
                room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            found[key] = room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._rooms = dict(found)
        times.append(time.perf_counter())
        self.waited_seconds, self.copied_seconds = times[1] - times[0], times[2] - times[1]
        self._under_way = self._thread.submit(write, self.group)

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong with it."""
        done, self._under_way = self._under_way, None
        if done is not None:
            done.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self.wait()
