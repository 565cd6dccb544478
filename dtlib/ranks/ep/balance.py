"""How the tokens of all ranks are spread evenly over the experts: by a loss, or by a bias that moves without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.experts import MoE, Routed, Router, loads
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import size_of


@contextmanager
def routing(model: nn.Module) -> Iterator[list[Routed]]:
    """Inside the block, a list of what each router of `model` says in each call, in order, with its graph."""
    found: list[Routed] = []
    hooks = [
        each.register_forward_hook(lambda _, x, routed: found.append(routed))
        for each in model.modules()
        if isinstance(each, Router)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(routed: Routed, group: Group = None) -> Tensor:
    """E Σ φ_i P_i: φ_i the share of the visits that expert i gets, P_i its mean share of a token's scores, both over
    the tokens of all ranks of `group`. It is 1 where either is even. Its gradient goes through P alone.

    What each rank gets is its own term: their *mean* is the loss of all tokens, and has its gradient, as with the
    losses of tokens. Sends e + 1 numbers. Source: Fedus et al. 2021, arXiv 2101.03961, equation 4.
    """
    n, num_experts = size_of(group), routed.scores_te.shape[1]
    t, k = routed.experts_tk.shape
    counts = torch.cat([loads(routed.experts_tk, num_experts), routed.experts_tk.new_tensor([t])])
    dist.all_reduce(counts, group=group)
    share_te = routed.scores_te / routed.scores_te.sum(-1, keepdim=True)
    *_, tokens = counts = counts.to(share_te.dtype)
    return num_experts * n / (k * tokens**2) * (counts[:-1] @ share_te.sum(0))


def sequence_balance_loss(routed: Routed, columns: int, group: Group = None) -> Tensor:
    """E Σ φ_i P_i of each sequence by itself, added up: φ_i and P_i as in `balance_loss`, over its own tokens.

    A sequence is `columns` tokens of `routed` one after another, on each rank of `group`, which share out its tokens.
    As it knows no other sequence it is the same whichever of them are computed together: on how many ranks, in how many
    micro-batches. What each rank gets is the term of its own tokens: their *sum* is the loss. Sends b · e numbers.
    Source: DeepSeek-AI 2024, arXiv 2412.19437, equation 17.
    """
    n, num_experts, k = size_of(group), routed.scores_te.shape[1], routed.experts_tk.shape[1]
    visits_bk = routed.experts_tk.reshape(-1, columns * k)
    counts_be = visits_bk.new_zeros(len(visits_bk), num_experts).scatter_add_(1, visits_bk, torch.ones_like(visits_bk))
    if n > 1:
        dist.all_reduce(counts_be, group=group)
    share_te = routed.scores_te / routed.scores_te.sum(-1, keepdim=True)
    share_be = share_te.unflatten(0, (-1, columns)).sum(1)
    return num_experts / (k * (n * columns) ** 2) * (counts_be * share_be).sum()


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, in whose backward pass `loss` has a gradient of 1: for a loss in the middle of a model."""
    return _WithLoss.apply(x, loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor) -> Tensor:
        context.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (loss,) = context.saved_tensors
        return gradient, torch.ones_like(loss)


@torch.no_grad()
def move_bias(model: nn.Module, rate: float, group: Group = None) -> Tensor:
    """Raise the bias of each router of `model` by `rate` where an expert had fewer visits than the mean since the last
    call, over all ranks of `group`, and lower it where it had more; returns the visits (layers, e).

    Call it on all ranks after each step of the optimizer. ``ValueError`` for a negative `rate`, or a model without
    experts. Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1.
    """
    if not rate >= 0:
        raise ValueError(f"rate must be at least 0, not {rate!r}")
    routers = [each.router for each in model.modules() if isinstance(each, MoE)]
    if not routers:
        raise ValueError("model must have experts, and has none")
    visits_le = torch.stack([torch.zeros_like(r.bias_e, dtype=torch.int64) if r.loads_e is None else r.loads_e
                             for r in routers])  # fmt: skip
    dist.all_reduce(visits_le, group=group)
    for router, visits_e in zip(routers, visits_le.double(), strict=True):
        router.bias_e += rate * (visits_e.mean() - visits_e).sign()
        router.loads_e = None
    return visits_le
