"""What a step of ZeRO sends, and what a rank holds for a moment beside its shards."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.collectives._valid import amount, sized, whole

from .stages import checked_stage


@dataclass(frozen=True)
class ZeroTraffic(Breakdown):
    """Bytes that one rank sends in a step: `all_reduce` of gradients (stage 0), or their `reduce_scatter`; the
    all-gather of updated weights (stages 1 and 2), or of weights before forward and before backward (stage 3)."""

    all_reduce: float = 0
    reduce_scatter: float = 0
    gather_updated: float = 0
    gather_forward: float = 0
    gather_backward: float = 0


def traffic(
    grad_bytes: float,
    n: int,
    stage: int,
    weight_bytes: float | None = None,
    *,
    reshard_after_forward: bool = True,
) -> ZeroTraffic:
    """Bytes that a rank sends in a step of one micro-batch, collective by collective.

    A ring's all-gather or reduce-scatter sends (N−1)/N · D, its all-reduce twice that. `grad_bytes` is the full
    gradient, `weight_bytes` the full weights as they travel (by default as many). Stage 3 without
    `reshard_after_forward` keeps the weights for backward, and gathers once. ``ValueError`` for N below 1, another
    stage, or negative bytes. Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 7.
    """
    stage, n = checked_stage(stage), sized(grad_bytes, n)
    weight_bytes = grad_bytes if weight_bytes is None else weight_bytes
    amount("weight_bytes", weight_bytes)
    share = (n - 1) / n
    if stage == 0:
        return ZeroTraffic(all_reduce=2 * share * grad_bytes)
    if stage < 3:
        return ZeroTraffic(reduce_scatter=share * grad_bytes, gather_updated=share * weight_bytes)
    gathered = share * weight_bytes
    return ZeroTraffic(
        reduce_scatter=share * grad_bytes,
        gather_forward=gathered,
        gather_backward=gathered if reshard_after_forward else 0,
    )


def sent_bytes(full_bytes: float, n: int, stage: int) -> float:
    """Bytes that a rank sends in a step.

    2, 2, 2 and 3 times (N−1)/N · D for stages 0 to 3, where weights and gradients are D (`full_bytes`) each: stage 3
    gathers the weights twice and scatters the gradients once, 1.5 times an all-reduce. Source and errors as
    `traffic`.
    """
    return traffic(full_bytes, n, stage).total


def gathered_bytes(largest_module_bytes: float, *, prefetched: int = 1) -> float:
    """Bytes of full weights that stage 3 holds at its peak, beside the shards.

    The largest module that is gathered as a whole, and as large a one for each of the `prefetched` modules that arrive
    meanwhile. ``ValueError`` for negative bytes or a negative number of modules.
    """
    amount("largest_module_bytes", largest_module_bytes)
    return (1 + whole("prefetched", prefetched, 0)) * largest_module_bytes
