"""A parameter server: it takes gradients from whoever comes first, and answers with weights of one version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import refuse_unlike_calls, size_of
from dtlib.ranks.shared.replicas import broadcast
from dtlib.theory.valid import flag, rank_of, whole

from .flat import described, joined, spread, statistics, trained

HEADER_BYTES = 24
"""What stands before a gradient, and before an answer: three int64, what it is, a version, a worker's clock."""

HELLO, PUSH, LEAVE, GO, STOP = range(5)
_TO_SERVER, _GRADIENT, _TO_WORKER, _WEIGHTS = range(1, 5)  # tags: whoever receives from anyone must not meet the others


@dataclass(frozen=True)
class Push:
    """A gradient's arrival at a server.

    `seconds` since all workers had come; `worker`, its rank in the group; `clock`, how many gradients it had sent
    before; `pulled`, the version of the weights that the gradient is of; `version`, that of the server as it arrived;
    `used`, or dropped.
    """

    seconds: float
    worker: int
    clock: int
    pulled: int
    version: int
    used: bool

    @property
    def staleness(self) -> int:
        """How many updates the server has made between this worker's pull and its push: the delay τ."""
        return self.version - self.pulled


def serve(
    model: nn.Module,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    servers: Sequence[int] = (0,),
    updates: int | None = None,
    collect: int = 1,
    drop_stale: bool = False,
    bound: int | None = None,
    rate_of_staleness: Callable[[int], float] | None = None,
    group: Group = None,
) -> list[Push]:
    """On a server: take gradients from the workers until `updates` are made, or all have left. Returns its log.

    | training | `collect` | `drop_stale` | `bound` |
    |---|---|---|---|
    | asynchronous | 1 | | |
    | bounded staleness | 1 | | s: no worker begins a gradient more than s ahead of the slowest |
    | synchronous | the number of workers | | |
    | with b backup workers | that less b | True | |

    An update is a step of the optimizer with the mean of `collect` gradients (fewer, once fewer workers are left). A
    worker waits for the update that its gradient is in, and for `bound`; then it gets the weights, as they were
    between two updates. With `drop_stale` a gradient of an older version than the server's is dropped, and its worker
    answered at once. `rate_of_staleness` multiplies the learning rate of an update, given the largest τ in it
    (1/τ from τ = 1 on: Zhang et al. 2016, arXiv 1511.05950).

    `optimizer` makes one of a list with one flat parameter: this server's part of all weights, so it must work entry by
    entry. With several `servers` (ranks of `group`) each has an equal part, versions and a log of its own. `model` says
    what weights there are, and where they start; at the end this server's part of them is in it. Buffers stay on the
    workers, so a model with running statistics is refused. All ranks of `group` that are no servers `work`.

    Once all workers have come, each gets the weights. Beside the library's headers a server of all D bytes receives D
    and `HEADER_BYTES` for each push, and answers with as much; each worker's coming costs one header, and as much as
    an answer. One that leaves sends a header, and gets the last weights. All end with the servers' last weights. Frozen
    parameters are sent once, from rank 0 of `group`.

    ``ValueError`` on all ranks, before anything is sent, for what cannot be or differs between ranks.
    """
    place = _place(model, servers, group)
    if place.own is None:
        raise ValueError(
            f"servers must contain this rank of group, {place.rank}, as it serves; they are {place.servers}"
        )
    collect, drop_stale = whole("collect", collect, 1), flag("drop_stale", drop_stale)
    if collect > len(place.workers):
        raise ValueError(f"collect must be at most the number of workers, {len(place.workers)}, not {collect}")
    updates = None if updates is None else whole("updates", updates, 0)
    bound = None if bound is None else whole("bound", bound, 0)
    weights = nn.Parameter(place.cut(joined(place.tensors))[place.own].clone())
    server = _Server(place, weights, optimizer([weights]), updates, collect, drop_stale, bound, rate_of_staleness)
    server.run()
    flat = joined(place.tensors)
    place.cut(flat)[place.own].copy_(weights.detach())
    spread(flat, place.tensors)
    return server.log


def work(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    servers: Sequence[int] = (0,),
    steps: int | None = None,
    group: Group = None,
) -> list[float]:
    """On a worker: pull the weights, push the gradient of ``loss_of(step)``, pull, until the server has enough.

    With `steps` it leaves after so many (a server that has enough says so before), and waits for the last weights.
    Returns its losses: the one of clock c is that of the push with this clock in the server's log. `model` starts from
    the server's weights and ends with its last. ``ValueError`` as in `serve`.
    """
    place = _place(model, servers, group)
    if place.own is not None:
        raise ValueError(f"servers must not contain this rank of group, {place.rank}, as it works; they are {servers}")
    steps = None if steps is None else whole("steps", steps, 0)
    answers = _Answers(place)
    answers.ask(HELLO, 0, range(len(place.servers)))
    losses: list[float] = []
    while all(answers.go) and (steps is None or len(losses) < steps):
        model.zero_grad()
        loss = loss_of(len(losses))
        loss.backward()
        gradient = joined([torch.zeros_like(p) if p.grad is None else p.grad for p in place.tensors])
        answers.ask(PUSH, len(losses), range(len(place.servers)), place.cut(gradient))
        losses.append(loss.item())
    answers.ask(LEAVE, len(losses), [number for number, go in enumerate(answers.go) if go])
    return losses


@dataclass(frozen=True)
class _Place:
    """Who is who in `group`, whose ranks all numbers here are, and what travels."""

    tensors: list[nn.Parameter]
    servers: list[int]
    workers: list[int]
    rank: int
    group: Group

    @property
    def own(self) -> int | None:
        return self.servers.index(self.rank) if self.rank in self.servers else None

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """The parts of the servers, as views."""
        return flat.tensor_split(len(self.servers))

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=to, tag=tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(tensor, group=self.group, group_src=source, tag=tag)

    def receive_from_anyone(self, tensor: Tensor, tag: int) -> int:
        source = dist.recv(tensor, group=self.group, tag=tag)
        return source if self.group is None else dist.get_group_rank(self.group, source)


def _place(model: nn.Module, servers: Sequence[int], group: Group) -> _Place:
    n = size_of(group)
    parameters = trained(model, group)
    servers = [rank_of("servers", each, n) for each in servers]
    if not servers or len(set(servers)) < len(servers) or len(servers) == n:
        raise ValueError(f"servers must be different ranks of group, one at least and not all {n}, not {servers}")
    if names := list(statistics(model)):
        raise ValueError(f"model must have no statistics beside its weights, as a server has none; it has {names}")
    frozen = {name: each.detach() for name, each in model.named_parameters() if name not in parameters}
    refuse_unlike_calls("parameter server", f"servers {servers}, {described(parameters)}, {described(frozen)}", group)
    broadcast(list(frozen.values()), group)
    workers = [each for each in range(n) if each not in servers]
    return _Place(list(parameters.values()), servers, workers, dist.get_rank(group), group)


class _Answers:
    """A worker's side: a question to some servers, and their answers: whether to go on, and the weights."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.go, self.versions = [False] * len(place.servers), [0] * len(place.servers)

    def ask(self, kind: int, clock: int, numbers: Sequence[int], gradient: Sequence[Tensor] = ()) -> None:
        flat, started, headers = joined(self.place.tensors), [], {}
        for number in numbers:
            to = self.place.servers[number]
            started.append(self.place.send(_header(kind, self.versions[number], clock), to, _TO_SERVER))
            if gradient:
                started.append(self.place.send(gradient[number], to, _GRADIENT))
            headers[number] = _header(0, 0, 0)
            started.append(self.place.receive(headers[number], to, _TO_WORKER))
            started.append(self.place.receive(self.place.cut(flat)[number], to, _WEIGHTS))
        for each in started:
            each.wait()
        for number, (kind, version, _) in {number: each.tolist() for number, each in headers.items()}.items():
            self.go[number], self.versions[number] = kind == GO, version
        spread(flat, self.place.tensors)


class _Server:
    """Who waits, who works, what is collected; one thing at a time, so that nobody reads while it writes."""

    def __init__(
        self,
        place: _Place,
        weights: nn.Parameter,
        optimizer: torch.optim.Optimizer,
        updates: int | None,
        collect: int,
        drop_stale: bool,
        bound: int | None,
        rate_of_staleness: Callable[[int], float] | None,
    ) -> None:
        self.place, self.weights, self.optimizer = place, weights, optimizer
        self.updates, self.collect, self.drop_stale, self.bound = updates, collect, drop_stale, bound
        self.rate_of_staleness = rate_of_staleness
        self.version, self.log = 0, list[Push]()
        self.clocks = dict.fromkeys(place.workers, 0)  # of those that have neither left nor been told to stop
        self.asking: list[int] = []  # in the order in which they came
        self.left: list[int] = []
        self.pending: dict[int, tuple[Tensor, int]] = {}  # gradients of the next update, and their staleness
        self.leaving: dict[int, list[Any]] = {}  # answers under way
        self.copy = (-1, weights.detach())
        self.began = 0.0

    def run(self) -> None:
        for _ in self.clocks:
            self.asking.append(self.place.receive_from_anyone(_header(0, 0, 0), _TO_SERVER))
        self.began = time.perf_counter()
        for worker in list(self.clocks):  # ranks come up at different times; all begin with version 0
            self.go_on(worker)
        while self.clocks:
            self.take()
            if self.pending and len(self.pending) >= min(self.collect, len(self.clocks)):
                self.update()
            for worker in [each for each in self.asking if self.may_go(each)]:
                self.go_on(worker)
        for worker in self.left:
            self.answer(worker, STOP)
        for works in self.leaving.values():
            _wait(works)

    def go_on(self, worker: int) -> None:
        self.asking.remove(worker)
        if self.is_over:
            del self.clocks[worker]
        self.answer(worker, STOP if self.is_over else GO)

    @property
    def is_over(self) -> bool:
        return self.updates is not None and self.version >= self.updates

    def take(self) -> None:
        header = _header(0, 0, 0)
        worker = self.place.receive_from_anyone(header, _TO_SERVER)
        kind, pulled, clock = header.tolist()
        if kind == LEAVE:
            del self.clocks[worker]
            self.left.append(worker)
            return
        gradient = torch.empty_like(self.weights, requires_grad=False)
        self.place.receive(gradient, worker, _GRADIENT).wait()
        seconds, staleness = time.perf_counter() - self.began, self.version - pulled
        used = not self.is_over and not (self.drop_stale and staleness)
        self.log.append(Push(seconds, worker, clock, pulled, self.version, used))
        self.clocks[worker] = clock + 1
        self.asking.append(worker)
        if used:
            self.pending[worker] = gradient, staleness

    def update(self) -> None:
        gradients = [self.pending[worker][0] for worker in sorted(self.pending)]  # one sum, whoever came first
        self.weights.grad = gradients[0] if len(gradients) == 1 else torch.stack(gradients).mean(0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.rate_of_staleness is not None:
            factor = self.rate_of_staleness(max(staleness for _, staleness in self.pending.values()))
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.pending, self.version = {}, self.version + 1

    def may_go(self, worker: int) -> bool:
        if self.is_over:
            return True
        ahead = self.clocks[worker] - min(self.clocks.values())
        return worker not in self.pending and (self.bound is None or ahead <= self.bound)

    def answer(self, worker: int, kind: int) -> None:
        """Start sending; what leaves is a copy, so that the next update cannot write into it."""
        _wait(self.leaving.pop(worker, []))
        if self.copy[0] != self.version:
            self.copy = self.version, self.weights.detach().clone()
        header = _header(kind, self.version, self.clocks.get(worker, 0))
        works = [self.place.send(header, worker, _TO_WORKER), self.place.send(self.copy[1], worker, _WEIGHTS)]
        self.leaving[worker] = works


def _header(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _wait(works: list[Any]) -> None:
    for each in works:
        each.wait()
