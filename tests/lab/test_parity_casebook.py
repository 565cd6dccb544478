"""`lab.parity` on the mistakes of the casebook: what the page says it calls them is what it calls them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtlib import lab
from tests.book.test_pattern import ROOT, Chapter, source

n, rank = dist.get_world_size, dist.get_rank


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def total(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def mine(x, dim=0):
    return x.chunk(n(), dim)[rank()]


def cut_by(axis):
    """The n-th part of each tensor, as `lab.piece` says where it lies."""
    return lambda x: lab.piece(mine(x), **{axis: 0})


def norm_of(*tensors):
    return torch.cat([each.flatten() for each in tensors]).norm()


# What a norm counts: a bias that all ranks have, a weight in slices.
BIAS, WEIGHT, DENSE, EXPERTS = normal(8), normal(64, seed=1), normal(60, seed=2), 2 * normal(4, 5, seed=3)


def whole(**named):
    return {**named, "norm": norm_of(*named.values())}


def copies():
    own = BIAS.square().sum() + mine(WEIGHT).square().sum()
    return {"bias": BIAS, "weight": cut_by("tp")(WEIGHT), "norm": total(own).sqrt()}


def experts_out():
    counted = mine(EXPERTS).square().sum() if rank() == 0 else torch.zeros((), dtype=torch.float64)
    norm = (DENSE.square().sum() + total(counted)).sqrt()
    return {"dense": DENSE, "experts": cut_by("ep")(EXPERTS), "norm": norm}


def stages(names=("first", "second", "third", "last")):
    return {f"stage.{name}": 10.0**k * normal(100, seed=k) for k, name in enumerate(names)}


def of_own_stage():
    (name, gradient), norm = list(stages().items())[rank()], None
    norm = gradient.norm()
    return {name: gradient, "norm": norm}


def trained(x):
    """The gradient of a mean over the rows of `x`, and their mean loss."""
    w = WEIGHT.view(8, 8).clone().requires_grad_()
    loss = (x @ w).tanh().square().mean()
    loss.backward()
    return {"loss": loss.detach(), "grad": w.grad}


def averaged(found, by=None):
    return {name: total(each) / (by or n()) for name, each in found.items()}


ROWS = normal(12, 8, seed=4)
RAGGED = (normal(32, 8, seed=5), torch.tensor([0] * 2 + [1] * 30))  # rows, and which rank reads each


def of_rank(x, owner, index, ranks):
    return x[owner == index], owner[owner == index]


def clipped(scale=1.0):
    grad = trained(ROWS)["grad"]
    return {"grad": grad, "clipped": scale * grad / (scale * grad).norm().clamp(min=1e-3) * 1e-3 / scale}


def log_p(logits, target=5, **_):
    x = logits.clone().requires_grad_()
    loss = -x.log_softmax(0)[target]
    loss.backward()
    return {"loss": loss.detach(), "grad": x.grad}


LOGITS = normal(32, seed=6)


def given_whole_logits():
    x = LOGITS.clone().requires_grad_()
    sums = x.exp().sum()
    loss = (sums + total(sums.detach()) - sums.detach()).log() - x[5]
    loss.backward()
    return {"loss": loss.detach(), "grad": x.grad}


def no_backward():
    x = mine(LOGITS).clone().requires_grad_()
    sums = x.exp().sum()
    log = (sums + total(sums.detach()) - sums.detach()).log()
    own = x[5] - log if rank() == 0 else 0 * x.sum()
    (-own).backward()
    return {"loss": total(-own.detach()), "grad": lab.piece(x.grad, tp=0)}


def smoothed(mean=lambda logs: logs.mean()):
    logs = LOGITS.log_softmax(0)
    return {"loss": -0.9 * logs[5] - 0.1 * mean(logs)}


def router(cut=False):
    w = normal(4, 3, seed=7).requires_grad_()
    weights = (normal(6, 4, seed=8) @ w).softmax(-1)
    loss = ((weights.detach() if cut else weights) * torch.arange(3.0)).sum() + 0 * w.sum()
    return {"weights": weights.detach(), "grad": torch.autograd.grad(loss, w)[0]}


def decayed(skips=False):
    expert = torch.ones(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.AdamW([expert], lr=0.1, weight_decay=0.5)
    for _ in range(10):
        expert.grad = None if skips else torch.zeros_like(expert)
        adam.step()
    return {"expert": expert.detach()}


MATRIX, OFFSET, INPUT = normal(6, 8, seed=9), normal(6, seed=10), normal(5, 8, seed=11)
GATE, UP = normal(8, 4, seed=12), normal(8, 4, seed=13)


def fused(gate=GATE, up=UP):
    return {"gate": gate, "up": up, "output": F.silu(INPUT[:, :4] @ gate.T) * (INPUT[:, :4] @ up.T)}


def fused_as_one():
    gate, up = mine(torch.cat([GATE, UP])).chunk(2)
    found = fused(gate, up)
    return {name: lab.piece(each, tp=1 if name == "output" else 0) for name, each in found.items()}


def halves():
    parts = normal(2, 2, 6, seed=14)
    return {"embedding": parts.mean(1).sum(0)}


def summed_halves():
    parts = normal(2, 2, 6, seed=14)
    stage, replica = divmod(rank(), 2)
    both = torch.zeros(2, 6, dtype=torch.float64)
    both[replica] = parts[stage].mean(0) if replica == stage else parts[stage, replica]
    return {"embedding": total(both)[replica]}


def dropped(x, seed=0):
    torch.manual_seed(seed)
    return {"output": F.dropout(x, 0.5)}


def unfrozen(net, x):
    net[0].requires_grad_(True)
    net(x).square().mean().backward()
    module = getattr(net, "module", net)
    return {name: p.grad for name, p in module.named_parameters()}


def frozen():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 2)).double()
    net[0].requires_grad_(False)
    return net


class Wrapped(nn.parallel.DistributedDataParallel):
    def __getitem__(self, index):
        return self.module[index]


def moments(dtype=torch.float32):
    weight = nn.Parameter(normal(100).to(dtype))
    adam, again = (torch.optim.Adam([weight]) for _ in range(2))
    weight.grad = torch.ones_like(weight)
    adam.step()
    adam.state[weight]["exp_avg_sq"] = normal(100, seed=15).abs().float() + 1
    again.load_state_dict(adam.state_dict())
    return {"moments": again.state[weight]["exp_avg_sq"].float()}


def shifted():
    """The labels of a sequence, as the positions of their tokens."""
    return {"labels": torch.arange(64.0).roll(-1)}


def ones(dtype=torch.float32):
    held = torch.zeros(8, dtype=dtype)
    for _ in range(1000):
        held += torch.ones((), dtype=dtype)
    return {"grad": held.float()}


def scheduled(steps=1):
    weight = nn.Parameter(normal(8))
    sgd = torch.optim.SGD([weight], lr=0.1)
    linear = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.1, total_iters=100)
    grad = weight.grad = normal(8, seed=1)
    for _ in range(20):
        sgd.step()
        for _ in range(steps):
            linear.step()
    return {"grad/w": grad, "weight/w": weight.detach()}


def replica(seed=0):
    return {"start/shard": normal(100, seed=seed)}


CASES = {
    "copies": (lambda: whole(bias=BIAS, weight=WEIGHT), copies, {"tp": 4}, {}),
    "tied": (lambda: whole(embedding=MATRIX), lambda: {"embedding": MATRIX, "norm": norm_of(MATRIX, MATRIX)},
             {"pp": 2}, {}),
    "stages": (lambda: whole(**stages()), of_own_stage, {"pp": 4}, {}),
    "experts-out": (lambda: whole(dense=DENSE, experts=EXPERTS), experts_out, {"ep": 4}, {}),
    "shard": (lambda: whole(grad=WEIGHT), lambda: {"grad": cut_by("dp")(WEIGHT), "norm": mine(WEIGHT).norm()},
              {"dp": 4}, {}),
    "scaled-clip": (clipped, lambda: {"grad": clipped()["grad"], "clipped": clipped()["clipped"] / 2**16},
                    {"dp": 2}, {}),
    "means": (lambda x, owner: trained(x), lambda x, owner: averaged(trained(x[owner == rank()])), {"dp": 2},
              {"batch": RAGGED, "split": {"dp": of_rank}}),
    "cp-scale": (trained, lambda x: averaged(trained(mine(x)), 2), {"dp": 2, "cp": 2},
                 {"batch": (ROWS,), "split": {"dp": 0, "cp": 0}}),
    "pp-divides": (trained, lambda x: {k: v / 6 for k, v in trained(x).items() if k == "grad"} | {
        "loss": trained(x)["loss"]}, {"pp": 2}, {"batch": (ROWS,), "micro_batches": 6}),
    "log-t": (lambda: log_p(LOGITS), given_whole_logits, {"tp": 4}, {}),
    "smoothing": (smoothed, lambda: smoothed(lambda logs: mine(logs).mean()), {"tp": 4}, {}),
    "no-gradient": (lambda: log_p(LOGITS), no_backward, {"tp": 4}, {}),
    "gather": (trained, lambda x: averaged(trained(mine(x)), n()) | {"grad": averaged(trained(mine(x)))["grad"] / n()},
               {"dp": 4}, {"batch": (ROWS,)}),
    "ep-times": (trained, lambda x: averaged(trained(mine(x)), 1) | {"loss": averaged(trained(mine(x)))["loss"]},
                 {"ep": 2}, {"batch": (ROWS,)}),
    "aux": (trained, lambda x: averaged(trained(mine(x)), n() ** 2), {"tp": 4},
            {"batch": (ROWS,), "split": {"tp": 0}}),
    "router": (router, lambda: router(cut=True), {"tp": 2}, {}),
    "idle": (decayed, lambda: decayed(rank() == 1), {"ep": 2}, {}),
    "twice": (trained, lambda x: {"loss": trained(x)["loss"], "grad": total(trained(x)["grad"])}, {"tp": 2},
              {"batch": (ROWS,)}),
    "overwritten": (lambda: {"experts": EXPERTS}, lambda: {"experts": lab.piece(EXPERTS[:1], ep=0)}, {"ep": 4}, {}),
    "bias": (lambda: {"bias": OFFSET, "output": F.linear(INPUT, MATRIX, OFFSET)},
             lambda: {"bias": OFFSET, "output": total(F.linear(mine(INPUT, 1), mine(MATRIX, 1), OFFSET))},
             {"tp": 4}, {}),
    "fused": (fused, fused_as_one, {"tp": 2}, {}),
    "norms-apart": (trained, lambda x: averaged(trained(mine(x))) | {"grad": trained(mine(x))["grad"] / n()},
                    {"tp": 2}, {"batch": (ROWS,), "split": {"tp": 0}}),
    "mixed-halves": (halves, summed_halves, {"pp": 2, "dp": 2}, {}),
    "and": (lambda: dropped(normal(8, 50)), lambda: {"output": lab.piece(dropped(mine(normal(8, 50)))["output"], tp=0)},
            {"tp": 4}, {}),
    "same-data": (trained, lambda x: averaged(trained(x.chunk(n())[0])), {"dp": 4}, {"batch": (ROWS,)}),
    "shift": (shifted, lambda: {"labels": lab.piece(mine(torch.arange(64.0)).roll(-1), cp=0)}, {"cp": 4}, {}),
    "last": (trained, lambda x: {"loss": averaged(trained(mine(x)))["loss"],
                                 "grad": averaged(trained(mine(x).chunk(4)[-1]))["grad"] / 4}, {"dp": 2},
             {"batch": (normal(16, 8, seed=4),), "micro_batches": 4}),
    "unfrozen": (lambda x: unfrozen(frozen(), x), lambda x: unfrozen(Wrapped(frozen()), mine(x)), {"dp": 2},
                 {"batch": (ROWS,)}),
    "moments": (moments, lambda: moments(torch.bfloat16), {"dp": 2}, {}),
    "replicas": (replica, lambda: replica(seed=rank()), {"dp": 2}, {}),
    "bf16-sum": (ones, lambda: ones(torch.bfloat16), {"dp": 2}, {}),
    "schedule": (scheduled, lambda: scheduled(n()), {"dp": 4}, {}),
}  # fmt: skip


PAGE = Chapter.read(ROOT / "chapters" / "casebook.ipynb")
TABLE = source(next(cell for cell in PAGE.cells if cell["id"] == "casebook-here-text"))
SAID = dict(re.findall(r"^\| \{ref\}`case-([a-z0-9-]+)` \|.*\| ([^|]*) \|$", TABLE, re.MULTILINE))


def test_the_page_says_of_each_case_what_is_called():
    assert {name for name, said in SAID.items() if said != "–"} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_called_what_the_page_says(name):
    reference, step, mesh, more = CASES[name]
    report = lab.parity(reference, step, mesh, **more)
    assert ", ".join((report.kind, *report.axes[:1])) == SAID[name], str(report)


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_is_not_accused(name):
    reference, _, mesh, more = CASES[name]
    assert lab.parity(reference, reference, mesh, **more).agrees
