"""Parameters that some of the ranks hold alone: a network with experts, its training on ranks, and one process alone.

On four ranks, pairs (0, 1) and (2, 3) share out the experts: 0 and 2 hold the same ones, and so do 1 and 3.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib.ranks import dp, tp, zero
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.shared import held, replicas, split

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64, as in the judge of zero
WIDTH, ROWS, STEPS, MAX_NORM, ITEM = 48, 8, 3, 0.1, 8
make_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Gathered(torch.autograd.Function):
    """The rows of all ranks of a group; back, the sum of what each of them has for this rank's."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        return _own_rows_of_the_sum(gradient, context.group), None


class OwnRowsOfTheSum(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return _own_rows_of_the_sum(x, group)

    @staticmethod
    def backward(context, gradient):
        return Gathered.forward(context, gradient.contiguous(), context.group), None


def _own_rows_of_the_sum(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class Experts(nn.Module):
    """Each expert's answer to each row, weighted by a gate."""

    def __init__(self, number):
        super().__init__()
        self.gate = nn.Linear(WIDTH, number)
        self.weight = nn.Parameter(torch.randn(number, WIDTH, WIDTH) / WIDTH**0.5)
        self.still = nn.Parameter(torch.randn(number, WIDTH), requires_grad=False)

    def answers(self, x, gates):
        each = torch.einsum("rh,ehf->ref", x, self.weight) + self.still
        return (each.tanh() * gates[:, :, None]).sum(1)

    def forward(self, x):
        return self.answers(x, self.gate(x).softmax(-1))


class ExpertsOfAGroup(split.SplitModule, Experts):
    """As `Experts`, which the ranks of `group` share out."""

    def __init__(self, whole, group, holders):
        nn.Module.__init__(self)
        self.gate, self.group, self.splits = whole.gate, group, {}
        cut = split.Split(0, split.evenly("experts", len(whole.weight), dist.get_world_size(group)))
        for name in ("weight", "still"):
            self.take(name, getattr(whole, name), cut)
            dp.belongs_to(getattr(self, name), holders)
        (self.own,) = cut.ranges[dist.get_rank(group)]

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        x, gates = Gathered.apply(x, self.group), Gathered.apply(gates, self.group)
        return OwnRowsOfTheSum.apply(self.answers(x, gates[:, list(self.own)]), self.group)


def network(experts, seed, groups=None):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), Experts(experts), nn.Linear(WIDTH, WIDTH), Experts(experts), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).double()
    if groups is not None:
        for place in (1, 3):
            model[place] = ExpertsOfAGroup(model[place], *groups)
    return model


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


@cache
def alone(experts):
    """Losses, norms, gradients of each step, and weights, of one process with the weights of rank 0."""
    model, losses, norms, gradients = network(experts, 0), [], [], []
    adam = make_adamw([each for each in model.parameters() if each.requires_grad])
    for step in range(STEPS):
        loss = model(rows(step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        adam.step()
        adam.zero_grad()
    return losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()}


# --- on ranks -------------------------------------------------------------------------------------------------------

SMALL = {"bucket_bytes": 2 * ITEM * WIDTH**2, "first_bucket_bytes": ITEM * WIDTH}
# Of one expert a rank both layers' weights fill such a bucket, of two each its own: others have other buckets.
UNEVEN = {"bucket_bytes": 2 * ITEM * WIDTH**2, "first_bucket_bytes": None}
DP = {
    "naive": dp.NaiveDataParallel, "flat": dp.FlatDataParallel, "bucketed": partial(dp.BucketedDataParallel, **SMALL),
    "copied": partial(dp.BucketedDataParallel, gradient_as_bucket_view=False),
    "uneven": partial(dp.BucketedDataParallel, **UNEVEN),
}  # fmt: skip
ZERO = {f"stage {stage}": partial(zero.Zero, stage=stage) for stage in (1, 2, 3)}
ZERO["small buckets"] = partial(zero.Zero, stage=1, **SMALL)
ZERO |= {f"stage {stage}, uneven": partial(zero.Zero, stage=stage, **UNEVEN) for stage in (1, 2)}
LAYOUTS = {  # experts, their replicas, and ranks that share them out
    "pairs": (4, 2, 2), "three on pairs": (3, 2, 2), "one each": (4, 1, 4), "all on all": (2, 4, 1),
}  # fmt: skip


@cache
def mesh_of(layout):
    _, replicated, shared = LAYOUTS[layout]
    return Mesh({"dp": replicated, "ep": shared})


class Job:
    """A wrapped network with its optimizer, and what this rank holds of it."""

    def __init__(self, name, layout="pairs"):
        mesh, experts = mesh_of(layout), LAYOUTS[layout][0]
        self.name, self.groups, rank = name, (mesh.group("ep"), mesh.group("dp")), dist.get_rank()
        begins = rank == mesh.ranks("dp")[0]  # the first of those that hold an expert: all else is overwritten
        model = network(experts, 0 if begins else 10 * rank, self.groups)
        self.places = held.places(model)
        if name in DP:
            self.wrapped = DP[name](model)
            self.optimizer = make_adamw([each for each in model.parameters() if each.requires_grad])
        else:
            self.wrapped = ZERO[name](model, make_adamw)
            self.optimizer = self.wrapped.optimizer

    def loss(self, step):
        rank, n = dist.get_rank(), dist.get_world_size()
        return self.wrapped(rows(step)[rank * ROWS // n : (rank + 1) * ROWS // n]).square().mean()

    def clip(self):
        if self.name in DP:
            return tp.clip_grad_norm(self.wrapped.module, MAX_NORM, group=self.groups[0])
        return self.wrapped.clip_grad_norm_(MAX_NORM)

    def step(self):
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, tensors):
        return {name: each.clone() for name, each in tp.unsplit(self.wrapped.module, tensors).items()}

    def gradients(self):
        trained = {name: p for name, p in self.wrapped.module.named_parameters() if p.requires_grad}
        if self.name in DP:
            return self.whole({name: replicas.raw_grad(p) for name, p in trained.items()})
        found = {}
        for each in self.wrapped.shards:
            chunks = [None] * each.peers.n
            dist.all_gather_object(chunks, each.grad, group=each.peers.group)
            full = torch.cat(chunks)
            found |= {each.names[i]: each.view(full, i) for i in each.params}
        return self.whole({name: found[name] for name in trained})

    def weights(self):
        return self.whole(self.wrapped.state_dict())

    def held(self):
        return list(zero.held(self.wrapped, self.places, self.optimizer))


def train(name, layout="pairs"):
    job, losses, norms, gradients = Job(name, layout), [], [], []
    for step in range(STEPS):
        loss = job.loss(step)
        loss.backward()
        gradients.append(job.gradients())
        norms.append(job.clip().item())
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.detach())
    dist.all_reduce(mean := torch.stack(losses) / dist.get_world_size())
    return mean.tolist(), norms, gradients, job.weights()


def is_refused(found, experts):
    try:
        assert_close(found, alone(experts), **CLOSE)
    except AssertionError:
        return True
    return False
