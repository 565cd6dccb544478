"""What workers, servers and local steps must do, computed in one process: models side by side, lists of versions."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Small(nn.Module):
    """Two layers, of which the second's weight is tied to a third's, and a bias that is frozen."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second, self.third = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.first.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        """Tanh between."""
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(model, rank, step):
    """Each rank has data of its own, other ones in each step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(5, 6, generator=draw, dtype=torch.float64) + rank / 4
    return ((model(x) - rank) ** 2).mean()


def trained(model):
    """The parameters that travel."""
    return [p for p in model.parameters() if p.requires_grad]


def flat(model):
    """All of them, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in trained(model)]).clone()


def put(weights, model):
    """Write them back."""
    with torch.no_grad():
        for p, part in zip(trained(model), weights.split([p.numel() for p in trained(model)]), strict=True):
            p.copy_(part.view(p.shape))


def replayed(order, workers, *, updates, collect=1, drop_stale=False, bound=None):
    """Each push as (worker, clock, pulled, version, used), from nothing but the order of arrival."""
    version, rows, inside = 0, [], set()
    pulled, clock, waits = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0), set()
    for worker in order:
        over = version == updates
        used = not over and (pulled[worker] == version or not drop_stale)
        rows.append((worker, clock[worker], pulled[worker], version, used))
        clock[worker] += 1
        waits.add(worker)
        if used:
            inside.add(worker)
        if len(inside) == collect:
            version, inside = version + 1, set()
        slowest = min(clock.values())
        for each in sorted(waits - inside):
            if bound is None or clock[each] - slowest <= bound:
                pulled[each] = version
                waits.remove(each)
    return rows


def versions(rows, *, rate, rate_of_staleness=None, momentum=0.0, seed=0):
    """The weights of each version, if the used gradients of `rows` are of the versions that these say."""
    model = Small(seed)
    made, velocity, batches = [flat(model)], 0.0, {}
    for worker, clock, pulled, version, used in rows:
        if used:
            batches.setdefault(version, []).append((worker, clock, pulled))
    for version, batch in sorted(batches.items()):
        gradients = []
        for worker, clock, pulled in sorted(batch):
            put(made[pulled], model)
            model.zero_grad()
            loss_of(model, worker, clock).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in trained(model)]))
        velocity = momentum * velocity + sum(gradients) / len(gradients)
        factor = 1.0 if rate_of_staleness is None else rate_of_staleness(max(version - p for _, _, p in batch))
        made.append(made[-1] - rate * factor * velocity)
    return made


class Side:
    """`n` ranks of local steps in one process; each rule written out, not the library's."""

    def __init__(
        self, n, inner, *, period, weights=None, outer=None, states="kept", fragments=1, nodes=None, warm_up=0,
        overlap=0, kept=0.5,
    ):  # fmt: skip
        self.n, self.period, self.states, self.warm_up, self.nodes = n, period, states, warm_up, nodes
        self.models = [Small(0) for _ in range(n)]
        self.inner = [inner(trained(model)) for model in self.models]
        self.shares = [w / sum(weights or [1] * n) for w in weights or [1] * n]
        self.outer, self.old, self.velocity = outer, [p.detach().clone() for p in trained(self.models[0])], {}
        names = len(self.old)
        cuts = {1: [range(names)], 2: [range(1), range(1, names)]}  # the first matrix has about half of all entries
        self.parts, self.overlap, self.kept, self.under_way = cuts[fragments], overlap, kept, []

    def train(self, steps):
        """The weights of each rank after so many steps."""
        for step in range(1, steps + 1):
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                inner.zero_grad()
                loss_of(model, rank, step - 1).backward()
                inner.step()
            self.arrive(step)
            met = False
            for number, part in enumerate(self.parts):
                at = (number + 1) * self.period // len(self.parts)
                if step <= self.warm_up or (step - self.warm_up - at) % self.period == 0:
                    met, late = True, self.overlap * (step > self.warm_up)
                    self.under_way += [(step + late, place, self.mean(place), late and self.kept) for place in part]
            self.arrive(step)
            if self.nodes and not met and step % self.nodes[0] == 0:
                self.inside(self.nodes[1])
        return [flat(model) for model in self.models]

    @torch.no_grad()
    def mean(self, place):
        """Of one parameter, over the ranks."""
        return sum(share * trained(model)[place] for share, model in zip(self.shares, self.models, strict=True))

    def arrive(self, step):
        """What was to be known after so many steps."""
        for each in [each for each in self.under_way if each[0] == step]:
            self.under_way.remove(each)
            self.meet(*each[1:])

    @torch.no_grad()
    def meet(self, place, mean, kept):
        """All ranks, about one parameter, of which this was the mean."""
        every = [trained(model)[place] for model in self.models]
        if self.outer is not None:
            rate, momentum = self.outer
            gradient = self.old[place] - mean
            self.velocity[place] = momentum * self.velocity.get(place, 0) + gradient
            mean = self.old[place] - rate * (gradient + momentum * self.velocity[place])
        self.old[place] = mean.clone()
        for inner, p in zip(self.inner, every, strict=True):
            p.copy_(kept * p + (1 - kept) * mean)
            if self.states == "restarted":
                inner.state.pop(p)
        if self.states == "averaged":
            own = [inner.state[p] for inner, p in zip(self.inner, every, strict=True)]
            for key in [key for key, value in own[0].items() if value.shape == every[0].shape]:
                state = sum(share * s[key] for share, s in zip(self.shares, own, strict=True))
                for each in own:
                    each[key].copy_(state)

    @torch.no_grad()
    def inside(self, size):
        """Nodes of `size` ranks, each for itself."""
        for first in range(0, self.n, size):
            node = self.models[first : first + size]
            mean = sum(flat(model) for model in node) / len(node)
            for model in node:
                put(copy.copy(mean), model)
