"""Harness of reliability: a run is killed where the desk says, and goes on in processes that have its bytes alone."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dtlib.grading.exercises import inputs

from .desk import Desk
from .model import returned_function


class Shuffled:
    """Which samples a rank trains on: in each epoch all of them once, in an order that the seed and the epoch make."""

    def __init__(self, num_samples: int, batch: int, seed: int) -> None:
        self.num_samples, self.batch, self.seed = num_samples, batch, seed
        self.epoch = self.position = 0

    def take(self) -> list[int]:
        """The next samples of all ranks together."""
        order = list(range(self.num_samples))
        random.Random(1000 * self.seed + self.epoch).shuffle(order)
        taken = order[self.position : self.position + self.batch]
        self.position += self.batch
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state_dict(self) -> dict[str, int]:
        """How far it is."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Be as far as that."""
        self.epoch, self.position = state["epoch"], state["position"]


class Dropout(torch.nn.Module):
    """Zeroes a quarter of what comes in, by torch's global generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The others are 4/3 times as large; all are as they were where nothing is trained."""
        return x if not self.training else x * (torch.rand(x.shape) >= 0.25) / 0.75


def resumed(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``save, load = function(model, optimizer, scheduler, sampler)`` in two halves of the ranks.

    The first half trains. After each step the desk says what comes: ``"go"``, ``"save"``, ``"kill"``; what
    ``save(step)`` returned last goes to the other half, rank by rank. There ``load`` makes of it the step from which
    they go on.
    """
    given = desk.next()
    n, rank = given["ranks"], dist.get_rank()
    random.seed(given["own_seed"])
    torch.manual_seed(given["own_seed"])
    run = _Run(given, n)
    save, load = _pair(function(run.model, run.optimizer, run.scheduler, run.sampler))
    told, first, saved = [], 0, b""
    if rank < n:
        for step in range(1, given["steps"] + 1):
            told.append(run.step())
            then = desk.next(told[-1].double().norm())
            if then == "kill":
                break
            if then == "save":
                buffer = io.BytesIO()
                torch.save(save(step), buffer, pickle_protocol=4)  # an older one makes bytes longer
                saved = buffer.getvalue()
        dist.send(torch.tensor([len(saved)]), rank + n)
        dist.send(torch.frombuffer(bytearray(saved), dtype=torch.uint8), rank + n)
    else:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank - n)
        whole = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(whole, rank - n)
        first = load(torch.load(io.BytesIO(whole.numpy().tobytes()), weights_only=False))
        if not isinstance(first, int) or not 0 <= first <= given["steps"]:
            raise ValueError(f"load must return the step after which it was saved, not {first!r}")
        for _ in range(first, given["steps"]):
            told.append(run.step())
            desk.ask("step", told[-1].double().norm())
    return {"weights": torch.stack(told) if told else None, "first": first}


def _pair(returned: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"the function must return a pair (save, load), not {type(returned).__name__}")
    return returned_function(returned[0]), returned_function(returned[1])


def _factor(warm: int, t: int) -> float:
    return min(1.0, (t + 1) / warm) / (1 + t / 20)


class _Run:
    """A model on this rank, and one step of it after another together with the ranks of its half."""

    def __init__(self, given: dict[str, Any], n: int) -> None:
        self.n, self.given = n, given
        wide, hidden = given["widths"]
        self.model = torch.nn.Sequential(
            torch.nn.utils.skip_init(torch.nn.Linear, wide, hidden), torch.nn.Tanh(), Dropout(),
            torch.nn.utils.skip_init(torch.nn.Linear, hidden, wide),
        )  # fmt: skip
        values = inputs.parameters(given | {"widths": [wide, hidden, wide]})
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.data = torch.from_numpy(value)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=given["lr"], eps=given["eps"])
        rises = partial(_factor, given["warm"])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rises)
        self.sampler = Shuffled(given["samples"], given["batch"], given["order"])
        self.data = torch.from_numpy(given["data"])

    def step(self) -> torch.Tensor:
        """Train on the next samples; some elements of the weights afterwards."""
        mine = self.sampler.take()[dist.get_rank() % self.n :: self.n]
        rows = torch.stack([self.data[i].flip(0) if random.random() < 0.5 else self.data[i] for i in mine])
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(rows), self.data[mine]).backward()
        for each in self.model.parameters():
            self._mean(each.grad)
        self.optimizer.step()
        self.scheduler.step()
        weights = torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])
        return weights[:: self.given["every"]].clone()

    def _mean(self, gradient: Any) -> None:
        """The mean over this half of the ranks, by messages: a group cannot be made here any more."""
        if self.n == 2:
            rank = dist.get_rank()
            other, from_other = rank ^ 1, torch.empty_like(gradient)
            sent = dist.isend(gradient.clone(), other)
            dist.recv(from_other, other)
            sent.wait()
            gradient += from_other
        gradient /= self.n


class Stopped(BaseException):
    """The process is killed: whoever goes on after this does nothing to the disk any more."""


class Disk:
    """A folder of files, by name. What was written is sure to outlast a power failure once it is synced.

    A file that is written anew loses what it held at once. Removing and renaming are done at once and stay done;
    ``rename`` replaces a file of the new name in one piece. A missing file raises ``FileNotFoundError``.
    """

    def __init__(self, files: dict[str, bytes] | None = None, stop: int = -1) -> None:
        self._files, self._stop, self._synced = dict(files or {}), stop, set(files or ())
        self._calls, self._is_stopped = 0, False

    def write(self, name: str, data: bytes) -> None:
        """Make a file with `data` in it, or make it anew."""
        whole = bytes(data)
        self._synced.discard(name)
        if self._begins():
            self._files[name] = whole
        else:
            self._files[name] = whole[: len(whole) // 2]
            raise Stopped

    def sync(self, name: str) -> None:
        """Wait until what a file holds is safe."""
        self._needs(name)
        self._synced.add(name)

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, in place of a file that has it."""
        self._needs(name)
        self._files[to] = self._files.pop(name)
        self._synced = self._synced - {name, to} | ({to} if name in self._synced else set())

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._needs(name)
        del self._files[name]

    def names(self) -> list[str]:
        """The names of all files, in order."""
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        """What a file holds."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]

    def _needs(self, name: str) -> None:
        if not self._begins():
            raise Stopped
        if name not in self._files:
            raise FileNotFoundError(name)

    def _begins(self) -> bool:
        """Whether the next operation is done."""
        if self._is_stopped:
            raise Stopped
        self._is_stopped = self._calls == self._stop
        self._calls += 1
        return not self._is_stopped


_MOST_CALLS = 300


def atomic(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``save, load = function(disk, keep)``: some saves, and the last of them stopped before each of its operations.

    A row says how it was stopped, before which operation, whether the save had returned ("again": only when it was
    done once more), and what ``load`` made of it. Each file is damaged in turn: a bit, or two bytes change places.
    """
    given = desk.next()
    steps, keep, disk = given["steps"], given["keep"], Disk()
    blobs = {step: {name: each.tobytes() for name, each in given[f"blobs {step}"].items()} for step in steps}
    sizes, rows, damaged = [], [], []
    for step in steps[:-1]:
        _pair(function(disk, keep))[0](step, dict(blobs[step]))
        sizes.append(sum(map(len, disk._files.values())))
    files = dict(disk._files)
    for name in sorted(files):
        size = len(files[name])
        for place in {*range(min(size, 16)), size // 2, size - 1} if size else ():  # of what stands in front all
            flipped = bytearray(files[name])
            swapped = flipped.copy()
            flipped[place] ^= 4
            swapped[place - 1 : place + 1] = reversed(swapped[place - 1 : place + 1])
            others = (bytes(each) for each in (flipped, swapped) if each != files[name])
            damaged += [[name, *_loaded(function, Disk(files | {name: each}), keep)] for each in others]
    for power in (False, True):
        for stop in range(_MOST_CALLS):
            one, done = Disk(files, stop), True
            try:
                _pair(function(one, keep))[0](steps[-1], dict(blobs[steps[-1]]))
            except Stopped:
                done = False
            after = one._files
            if power:
                after = {name: each if name in one._synced else each[: len(each) // 2] for name, each in after.items()}
            rows.append(["power" if power else "kill", stop, done, *_loaded(function, Disk(after), keep)])
            if done:
                break
            if not power:
                rows.append(["kill", stop, "again", *_saved_again(function, Disk(after), keep, steps[-1], blobs)])
    return {"sizes": sizes, "rows": rows, "damaged": damaged}


def _loaded(function: Callable[..., Any], disk: Disk, keep: int) -> list[Any]:
    """The step, a checksum of what was loaded, the names of damaged files, and what was raised."""
    try:
        step, blobs, damaged = _pair(function(disk, keep))[1]()
        return [step, checksum(blobs), sorted(map(str, damaged)), ""]
    except Exception as error:
        return [None, 0, [], f"load raised {type(error).__name__}: {error}"[:200]]


def _saved_again(
    function: Callable[..., Any], disk: Disk, keep: int, step: int, blobs: dict[int, dict[str, bytes]]
) -> list[Any]:
    """What is loaded when the save that was stopped is done once more, in a process of its own."""
    try:
        _pair(function(disk, keep))[0](step, dict(blobs[step]))
    except Exception as error:
        return [None, 0, [], f"save raised {type(error).__name__}: {error}"[:200]]
    return _loaded(function, disk, keep)


def checksum(blobs: Any) -> int:
    """Of names and what they hold, in order."""
    return zlib.crc32(b"".join(name.encode() + b"\0" + bytes(blobs[name]) + b"\0" for name in sorted(blobs or {})))
