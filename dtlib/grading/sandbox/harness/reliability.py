"""Harness of reliability: a run is killed where the desk says, and goes on in processes that have its bytes alone."""

from __future__ import annotations

import io
import random
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
        """The others are 4/3 times as large."""
        return x * (torch.rand(x.shape) >= 0.25) / 0.75


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
