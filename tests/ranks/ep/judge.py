"""`train` takes three AdamW steps with a GPT of experts, whole or spread over ranks, and `compare` holds the ranks to
one process that reads all of their tokens.

All cases of one number of ranks share one start. Wrong implementations are blocks that put something wrong in place of
something right while the same training runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import activations, dp, ep
from dtlib.ranks.experts import Router
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.ep import bias_step

# float64 throughout: sums over ranks come in another order, an error of a few 2⁻⁵³ relative to the largest term, and
# AdamW divides by its own estimate of the gradient, so that small gradients inherit the relative error of the large
# ones. 1e-9 leaves room for that and is far below any wrong factor: AdamW's steps are 1e-2.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS, SEQ, MAX_NORM, RATE = 3, 8, 0.5, 1e-3

CONFIG = GPTConfig(num_layers=2, hidden=16, num_heads=2, seq=SEQ, vocab=19, num_experts=6, dtype=torch.float64)
LLAMA = replace(CONFIG, rms_norm=True, swiglu=True, rotary=True, biases=False, tied=False)


@dataclass(frozen=True)
class Case:
    """A model, what of it is frozen, how it is trained, and a bias of its routers to begin with."""

    config: GPTConfig
    frozen: tuple[str, ...] = ()
    balance: float = 0.0
    recompute: str = "none"
    bias: tuple[float, ...] = ()
    weight: float | None = None


CASES = {
    "top 2": Case(replace(CONFIG, num_shared=1, expert_ratio=1.5), balance=0.1),
    "uneven": Case(replace(LLAMA, num_experts=7, top_k=3, first_dense=1, num_shared=2, scoring="sigmoid",
                           expert_scale=2.5), recompute="full"),
    "one choice": Case(replace(CONFIG, top_k=1, num_experts=5, normalised=False), recompute="full", balance=0.1),
    "all experts": Case(replace(CONFIG, top_k=4, num_experts=4, swiglu=True)),
    "groups": Case(replace(CONFIG, num_experts=8, expert_groups=4, top_groups=2, scoring="sigmoid")),
    "one expert for all": Case(replace(CONFIG, top_k=1), bias=(0, 0, 0, 0, 9, 0)),
    "ties": Case(replace(CONFIG, top_k=2), weight=0.0),
    "capacity": Case(replace(CONFIG, capacity_factor=0.8), recompute="full"),
    "frozen experts": Case(CONFIG, frozen=("blocks.0.mlp.experts.up_ehf", "blocks.0.mlp.experts.down_efh",
                                           "blocks.1.mlp.experts.up_ehf", "blocks.1.mlp.router.weight",
                                           "token_embedding.weight", "position_embedding.weight")),
}  # fmt: skip


def data(case: Case, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank in a step: another one has another number of positions."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens, targets = torch.randint(case.config.vocab, (2, 2, SEQ - rank), generator=generator)
    return tokens, targets


def make(case: Case, seed: int) -> GPT:
    """The model of a case, before it is spread."""
    model = GPT(case.config, seed=seed)
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)
    for router in model.modules():
        if isinstance(router, Router):
            if case.bias:
                router.bias_e.copy_(torch.tensor(case.bias))
            if case.weight is not None:
                nn.init.constant_(router.weight, case.weight)
    return model


Found = dict[str, Any]


class Whole:
    """One process, which reads the tokens of `n` ranks."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.model, self.ranks, self.missing = case, make(case, 0), range(n), list[str]()

    def backward(self, step: int) -> list[float]:
        """The mean loss of the ranks, and for each layer the balance of all of their tokens."""
        with ep.routing(self.model) as routed:
            batches = [data(self.case, step, rank) for rank in self.ranks]
            losses = torch.stack([next_token_loss(self.model(tokens), targets) for tokens, targets in batches])
        layers = len(routed) // len(batches)
        self.routed = [routed[layer::layers] for layer in range(layers)]
        balance = sum(self.balance(each) for each in self.routed) if self.case.balance else 0
        (losses.mean() + self.case.balance * balance).backward()
        return losses.tolist()

    def balance(self, routed: Sequence[Any]) -> Tensor:
        """E Σ f P, written out."""
        scores_te = torch.cat([each.scores_te for each in routed])
        visits_e = (
            torch.cat([each.experts_tk for each in routed]).flatten().bincount(minlength=scores_te.shape[1]).double()
        )
        shares_te = scores_te / scores_te.sum(-1, keepdim=True)
        return scores_te.shape[1] * (visits_e / visits_e.sum() * shares_te.mean(0)).sum()

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def move(self) -> Tensor:
        """Biases by theory, from visits that were counted here."""
        routers = [each for each in self.model.modules() if isinstance(each, Router)]
        size = self.case.config.num_experts
        visits = [torch.cat([r.experts_tk for r in each]).flatten().bincount(minlength=size) for each in self.routed]
        for router, visits_e in zip(routers, visits, strict=True):
            router.bias_e.copy_(torch.from_numpy(bias_step(router.bias_e, visits_e, RATE)))
        return torch.stack(visits)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Spread(Whole):
    """A rank, which begins with weights of its own, so that only a broadcast makes them those of one model."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.rank, self.missing = case, dist.get_rank(), []
        self.model = activations.recompute(ep.parallelize(make(case, self.rank)), case.recompute)
        self.wrapped = dp.FlatDataParallel(self.model, find_unused_parameters=True)

    def backward(self, step: int) -> list[float]:
        tokens, targets = data(self.case, step, self.rank)
        with ep.routing(self.model) as routed:
            loss = next_token_loss(self.wrapped(tokens), targets)
        balance = sum(ep.balance_loss(each) for each in routed) if self.case.balance else 0
        with self.wrapped.no_sync():
            (loss + self.case.balance * balance).backward()
        self.missing += [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        self.wrapped.sync()
        return [loss.item()]

    def clip(self) -> Tensor:
        return ep.clip_grad_norm(self.model, MAX_NORM)

    def move(self) -> Tensor:
        return ep.move_bias(self.model, RATE)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return ep.unsplit(self.model, tensors)


def train(one: Whole) -> Found:
    """Losses, gradients, norms, visits of three steps, then the weights and moments, and a loss without gradients."""
    model, names = one.model, [name for name, p in one.model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in names], lr=1e-2, weight_decay=0.1)
    found: Found = {"losses": [], "gradients": [], "norms": [], "visits": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        found["losses"].append(one.backward(step))
        found["gradients"].append(one.whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        found["norms"].append(one.clip().item())
        optimizer.step()
        found["visits"].append(one.move())
    with torch.no_grad():
        logits = model(data(one.case, 0, 0)[0])
    found |= {"without": logits, "records a graph": logits.requires_grad, "missing": one.missing}
    found["weights"] = one.whole(model.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        found[key] = one.whole({name: optimizer.state[model.get_parameter(name)][key] for name in names})
    return found


@functools.cache
def one_process(name: str, n: int) -> Found:
    return train(Whole(CASES[name], n))


Mutant = Callable[[], AbstractContextManager[Any]]


def on_a_rank(runs: Sequence[tuple[str, Mutant]]) -> list[Found]:
    """One training after another; each rank seeds its model differently."""
    results = []
    for name, mutant in runs:
        with mutant():
            results.append(train(Spread(CASES[name], dist.get_world_size())))
    return results


def compare(name: str, ranks: Sequence[Found]) -> None:
    """Raise AssertionError unless every rank found what one process finds, and the same as the others to the bit."""
    oracle = one_process(name, len(ranks))
    for rank, found in enumerate(ranks):
        assert not found["missing"], f"missing: gradients of {found['missing']}"
        for step in range(STEPS):
            expected = {what: oracle[what][step] for what in ("gradients", "norms", "visits")}
            expected["losses"] = [oracle["losses"][step][rank]]
            for what in ("losses", "visits", "gradients", "norms"):
                assert_close(found[what][step], expected[what], **CLOSE, msg=lambda m, what=what: f"{what}: {m}")
        for what in ("without", "exp_avg", "exp_avg_sq", "weights"):
            assert_close(found[what], oracle[what], **CLOSE, msg=lambda m, what=what: f"{what}: {m}")
        assert not found["records a graph"]
        assert_close(found["weights"], ranks[0]["weights"], rtol=0, atol=0, msg=lambda m: f"ranks drift apart: {m}")


def judge(n: int, runs: Sequence[tuple[str, Mutant]]) -> list[Callable[[], None]]:
    """Train all `runs` in one start, and hand back for each the comparison that is still to be made."""
    by_rank = lab.run(on_a_rank, n, args=(runs,), timeout_s=120)
    return [
        functools.partial(compare, name, [results[number] for results in by_rank])
        for number, (name, _) in enumerate(runs)
    ]


right: Mutant = nullcontext
patched = mock.patch.object
