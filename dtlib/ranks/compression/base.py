"""What all exchanges that send less share: error feedback by name, a check that all is finite, and state to save."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp import Bucket
from dtlib.ranks.dp.bucketed import Started
from dtlib.ranks.mesh import Group

Sum: TypeAlias = Generator[Started | None, None, tuple[Tensor, Callable[[Tensor], None]]]
"""An exchange under way: it yields what must have arrived before it goes on, and returns two things. First, what all
ranks have by then in the same bits, in which whatever was not finite on one of them shows. Second, what writes the sum
over the ranks into a flat tensor, in the same bits on all, and leaves in ``meant.flat`` what this rank's message left
out (without feedback ``meant.flat`` may be that tensor, and stays)."""


class Compressed(ABC):
    """An `Exchange` that sends less than the gradient, and leaves about its mean. Give each wrapped model its own.

    A scheme is one method, `summed`. What `feedback` remembers is the part of a gradient that a message left out, by
    the parameters' names, so that buckets may be filled anew: it is added to the next gradient, and the sum of all that
    was sent follows the sum of all that was meant, up to what is left out now (Seide et al. 2014; Karimireddy et al.
    2019, arXiv 1901.09847). Each rank has its own; `state_dict` is to be saved on each rank.

    The first part of an exchange runs inside the backward pass, and starts what is sent; the rest when it is waited
    for, in turns with the other buckets. All ranks must call and wait in one order. On a rank that is alone in its
    group nothing is sent and the gradient stays as it is.

    A gradient that is not finite, or whose sum in the message's format is not, is a ``FloatingPointError`` on every
    rank, once all of them wait: it names parameters and ranks. The bucket is then as it was before, and so is what is
    remembered of *all* buckets that were under way together: the step can be skipped.
    """

    def __init__(self, *, feedback: bool = False) -> None:
        self.feedback = feedback
        self.remembered: dict[str, dict[str, Tensor]] = {}  # what ("left_out", say), then the parameter's name
        self._new: list[tuple[str, str, Tensor]] = []  # is remembered once all that is under way has come to its end
        self._times: dict[str, int] = {}
        self._rooms: dict[tuple[str, str], Tensor] = {}
        self._in_use: dict[tuple[str, str], Tensor] = {}  # of the buckets that are under way: the others go
        self._under_way: list[_UnderWay] = []

    @abstractmethod
    def summed(self, meant: Bucket, group: Group) -> Sum:
        """Sum ``meant.flat`` over the ranks of `group`; see `Sum`."""

    def __call__(self, bucket: Bucket, group: Group) -> Started | None:
        """Start with a bucket; what is returned waits for the mean to be in it."""
        if dist.get_world_size(group) == 1:
            return None
        started = _UnderWay(self, self._steps(bucket, group))
        self._under_way.append(started)
        started.go_on()
        return started

    def _steps(self, bucket: Bucket, group: Group) -> Generator[Started | None, None, None]:
        meant = self._meant(bucket) if self.feedback else bucket
        arrived, write = yield from self.summed(meant, group)
        total = bucket.flat
        if arrived_well := is_finite(arrived):
            if total.dtype is torch.float16:  # it ends at 65,504: what is finite on each rank may not be so in sum
                total = torch.empty_like(total)
            write(total)
            arrived_well = total is bucket.flat or is_finite(total)
        if not arrived_well:
            yield from self._refuse(bucket, group)
        if total is not bucket.flat:
            bucket.flat.copy_(total)
        for name, view in meant.views.items() if self.feedback else ():
            self.remember("left_out", name, view)

    def _meant(self, bucket: Bucket) -> Bucket:
        """The gradient and what was left out before, where that does not lie: two buffers take turns."""
        left_out, first = self.remembered.get("left_out", {}), next(iter(bucket.views))
        lies = left_out[first].untyped_storage().data_ptr() if first in left_out else None
        rooms = [self.room(each, bucket, bucket.flat.numel(), bucket.flat.dtype) for each in ("meant", "and meant")]
        flat = rooms[rooms[0].untyped_storage().data_ptr() == lies]
        meant = Bucket(flat, dict(zip(bucket.views, flat.split(sizes_of(bucket)), strict=True)), group=bucket.group)
        for name, view in bucket.views.items():
            meant.views[name] = meant.views[name].view(view.shape)
            if name not in left_out:
                meant.views[name].copy_(view)
            elif left_out[name].shape == view.shape:
                torch.add(view, left_out[name], out=meant.views[name])
            else:
                raise ValueError(f"the gradient of {name!r} must have the shape of what is remembered of it: "
                                 f"{tuple(left_out[name].shape)}, not {tuple(view.shape)}")  # fmt: skip
        return meant

    def room(self, what: str, bucket: Bucket, num: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of this bucket's own, kept: memory that is new to the process costs more than what is done."""
        key = (what, next(iter(bucket.views)))
        room = self._rooms.get(key)
        if room is None or (room.numel(), room.dtype, room.device) != (num, dtype, bucket.flat.device):
            room = torch.empty(num, dtype=dtype, device=bucket.flat.device)
        self._in_use[key] = room
        return room

    def _refuse(self, bucket: Bucket, group: Group) -> Generator[Started, None, None]:
        own = torch.tensor([not is_finite(view) for view in bucket.views.values()], device=bucket.flat.device)
        everyone, work = start_gather(own, group)
        yield work
        guilty = {name: dist.get_process_group_ranks(group)[rank]
                  for rank, row in reversed(list(enumerate(everyone.tolist())))
                  for name, is_bad in zip(bucket.views, row, strict=True) if is_bad}  # fmt: skip
        if guilty:
            told = ", ".join(f"{name!r} on rank {rank}" for name, rank in sorted(guilty.items()))
            raise FloatingPointError(f"the gradient is not finite: {told}. Skip the step: nothing of it is kept")
        names = ", ".join(map(repr, bucket.views))
        raise FloatingPointError(f"the sum of the gradients overflows in what {type(self).__name__} sends: {names}")

    def remember(self, what: str, name: str, tensor: Tensor) -> None:
        """Keep `tensor` under the name of a parameter, unless the step fails."""
        self._new.append((what, name, tensor))

    def generator(self, seed: int, name: str, *more: int, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for a parameter: another at each call, the same on all ranks (but for `more`)."""
        self._times[name] = self._times.get(name, 0) + 1
        digest = hashlib.sha256(repr((seed, name, self._times[name], more)).encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))

    def go_on(self) -> None:
        """One part further with each bucket that is under way, and their end once none is."""
        for each in self._under_way:
            each.go_on()
        if all(each.is_done for each in self._under_way):
            if not any(each.error for each in self._under_way):
                for what, name, tensor in self._new:
                    self.remembered.setdefault(what, {})[name] = tensor
            self._under_way, self._new = [], []
            self._rooms, self._in_use = self._in_use, {}

    def rescale(self, *, old_lr: float, new_lr: float) -> None:
        """Call it when the learning rate changes: multiply what was left out by `old_lr` / `new_lr`.

        It is kept as a gradient, and moves the weights at the rate of the step that sends it. ``ValueError`` for a rate
        of 0 or less.
        """
        if not (old_lr > 0 and new_lr > 0):
            raise ValueError(f"old_lr and new_lr must be above 0, not {old_lr} and {new_lr}")
        for tensor in self.remembered.get("left_out", {}).values():
            tensor.mul_(old_lr / new_lr)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers between steps, copied."""
        return {"scheme": type(self).__name__, "times": dict(self._times), "remembered": _copied(self.remembered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another object of this class was. ``ValueError`` for the state of another scheme."""
        if state.get("scheme") != type(self).__name__:
            raise ValueError(f"state must be of {type(self).__name__}, not of {state.get('scheme')}")
        self._times, self.remembered = dict(state["times"]), _copied(state["remembered"])


class _UnderWay:
    """A bucket whose exchange has begun; what goes wrong is told to whom waits for it."""

    def __init__(self, exchange: Compressed, steps: Generator[Started | None, None, None]) -> None:
        self.exchange, self.steps = exchange, steps
        self.waits_for: Started | None = None
        self.is_done = False
        self.error: Exception | None = None

    @torch.no_grad()
    def go_on(self) -> None:
        if self.is_done:
            return
        try:
            try:
                if self.waits_for is not None:
                    self.waits_for.wait()
            except FloatingPointError as error:
                self.waits_for = self.steps.throw(error)
            else:
                self.waits_for = next(self.steps)
        except StopIteration:
            self.is_done = True
        except Exception as error:  # of any kind: the other buckets come to their end all the same
            self.is_done, self.error = True, error

    def wait(self) -> None:
        while not self.is_done:
            self.exchange.go_on()
        if self.error is not None:
            raise self.error


def _copied(remembered: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {what: {name: tensor.clone() for name, tensor in by.items()} for what, by in remembered.items()}


def sizes_of(bucket: Bucket) -> list[int]:
    """How many entries each of its parameters has."""
    return [view.numel() for view in bucket.views.values()]


def per_entry(values: Tensor, sizes: list[int]) -> Tensor:
    """One value a parameter, repeated for each of its entries."""
    return values.repeat_interleave(torch.tensor(sizes, device=values.device), output_size=sum(sizes))


def start_gather(payload: Tensor, group: Group) -> tuple[Tensor, Started]:
    """Every rank's `payload`, of one length on all, as the rows of a matrix; and what to wait for."""
    rows = payload.new_empty((dist.get_world_size(group), payload.numel()))
    return rows, dist.all_gather(list(rows), payload, group=group, async_op=True)


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are: their sum, the fastest pass, says so, unless it overflows."""
    return bool(tensor.sum().isfinite()) or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
