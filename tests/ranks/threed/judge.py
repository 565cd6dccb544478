"""`train` takes two AdamW steps on a mesh, and `compare` holds what all ranks found to one process.

float64: sums over ranks and micro-batches come in another order, an error of a few 2⁻⁵³ relative to the largest term,
and AdamW divides by its own estimate of the gradient. Its steps are 1e-2: a wrong factor is far above 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import ep, threed, tp
from dtlib.ranks import model as gpt
from dtlib.ranks.mesh import Mesh
from dtlib.theory import pp as theory

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
GPT = gpt.GPTConfig(num_layers=4, hidden=16, num_heads=4, seq=8, vocab=23, mlp_ratio=2, dtype=torch.float64)
LLAMA = replace(GPT, tied=False, rotary=True, rms_norm=True, swiglu=True, biases=False, num_kv_heads=2)
ONE_KEY = replace(GPT, num_kv_heads=1)  # which all ranks of tp have
ROWS, MAX_NORM = 8, 0.5
make_adamw = partial(torch.optim.AdamW, lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A mesh by its axes and sizes, a schedule of m micro-batches, and options of `Training`."""

    axes: tuple[tuple[str, int], ...]
    schedule: str = "1F1B"
    m: int = 2
    config: gpt.GPTConfig = GPT
    options: tuple[tuple[str, object], ...] = field(default=())
    frozen: tuple[str, ...] = ()

    def made(self):
        p = dict(self.axes).get("pp", 1)
        return (
            theory.interleaved(p, self.m, 2)
            if self.schedule == "interleaved"
            else theory.SCHEDULES[self.schedule](p, self.m)
        )


def case(axes, schedule="1F1B", m=2, config=GPT, frozen=(), **options):
    """A `Case`, of axes as in "dp 2, tp 2"; parameters whose names begin as `frozen` says are not trained."""
    sizes = tuple((name, int(size)) for name, size in (each.split() for each in axes.split(", ")))
    return Case(sizes, schedule, m, config, tuple(options.items()), frozen)


def made(config, frozen, **options):
    model = gpt.GPT(config, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("none",)))
    return model


def data(batches=2):
    """Some targets do not count, most of them in the first row."""
    tokens = torch.randint(GPT.vocab, (batches, ROWS, GPT.seq + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, :, 1:].clone()
    targets[:, 0, :5] = gpt.IGNORED
    targets[:, 3, 2:4] = gpt.IGNORED
    return tokens[:, :, :-1], targets


@cache
def alone(config, frozen=(), balance=0.0):
    """Losses, the gradients of every step and weights of one process, the whole batch at once; it is trained with
    `balance` times the mean over sequences of E Σ f P, of all layers with experts."""
    model, losses, gradients, norms = made(config, frozen), [], [], []
    adam = make_adamw(model.parameters())
    for x, y in zip(*data(), strict=True):
        with ep.routing(model) as routed:
            loss = gpt.next_token_loss(model(x), y)
        (loss + balance * sum(map(unbalanced, routed))).backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        adam.step()
        adam.zero_grad()
    return losses, norms, gradients, {name: each.detach() for name, each in model.named_parameters()}


def unbalanced(routed):
    scores_bse = routed.scores_te.view(ROWS, GPT.seq, -1)
    chosen_bse = torch.zeros_like(routed.scores_te).scatter(1, routed.experts_tk, 1.0).view_as(scores_bse)
    shares_be = chosen_bse.mean(1) / routed.experts_tk.shape[1]
    parts_be = (scores_bse / scores_bse.sum(-1, keepdim=True)).mean(1)
    return scores_bse.shape[-1] * (shares_be * parts_be).sum(-1).mean()


def built(case):
    mesh = Mesh(dict(case.axes))
    model = made(case.config, case.frozen, seed=dist.get_rank())  # all begin with those of rank 0
    return threed.Training(model, mesh, make_adamw, schedule=case.made(), **dict(case.options))


def train(case):
    torch.manual_seed(dist.get_rank())  # nothing may depend on a rank's own random numbers
    training, mesh = built(case), Mesh(dict(case.axes))  # who asks for an order gets its places
    place, n = mesh.coordinates().get("dp", 0), training.mesh.size("dp")
    losses, gradients, norms = [], [], []
    for x, y in zip(*data(), strict=True):
        mine = slice(place * ROWS // n, (place + 1) * ROWS // n)
        losses.append(training.backward(x[mine], y[mine]).item())
        gradients.append(whole(training, gradients_of(training)))
        norms.append(training.clip_grad_norm_(MAX_NORM).item())
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, gradients, whole(training, weights_of(training))


def gradients_of(training):
    """By each parameter's ``id``, the whole gradient as this rank's tp and pp have it, whoever of dp and cp owns it."""
    found = {}
    for part in training.parts:
        if not hasattr(part, "shards"):
            found |= {id(each): each.grad for each in part.parameters() if each.requires_grad}
            continue
        for shard in part.shards:
            chunks = [None] * shard.peers.n
            dist.all_gather_object(chunks, shard.grad, group=shard.peers.group)
            full = torch.cat(chunks)
            found |= {id(each): shard.view(full, index) for index, each in shard.params.items()}
    return found


def weights_of(training):
    found = {}
    for part in training.parts:
        state = part.state_dict()
        found |= {id(each): state[name] for name, each in part.module.named_parameters()}
    return found


def whole(training, tensors):
    """Tensors by the ``id`` of parameters, unsplit over tp and under the names of the whole model."""
    found = {}
    for stage in training.stages.values():
        every = stage.named_parameters(remove_duplicate=False)
        mine = {name: each for name, each in every if id(each) in tensors}
        named = {name: tensors[id(each)] for name, each in mine.items()}
        names = {name: training.places[id(each)].name for name, each in mine.items()}
        for name, each in tp.unsplit(stage, named).items():
            found[names[name]] = each.clone()
    return found


def on_a_rank(cases):
    return [train(case) for case in cases]


def compare(case, by_rank):
    """Every rank has the losses; together they have every gradient and every weight, each like one process's."""
    losses, norms, gradients, weights = alone(case.config, case.frozen, dict(case.options).get("balance", 0.0))
    seen = set()
    for found in by_rank:
        assert_close(found[0], losses, **CLOSE)
        assert_close(found[1], norms, **CLOSE)
        for theirs, ours in zip(found[2], gradients, strict=True):
            assert_close(theirs, {name: ours[name] for name in theirs}, **CLOSE)
        assert_close(found[3], {name: weights[name] for name in found[3]}, **CLOSE)
        seen |= set(found[3])
    assert seen == set(weights)


def check(world_size, cases):
    """All cases in one start of ranks."""
    by_rank = lab.run(on_a_rank, world_size, args=(cases,), timeout_s=300)
    for number, case in enumerate(cases):
        try:
            compare(case, [found[number] for found in by_rank])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
