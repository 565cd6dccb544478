"""The stages of ZeRO as data: what a rank frees, and when. And which parameters make a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dtlib.theory.dp import plan_buckets


@dataclass(frozen=True)
class Stage:
    """Every stage splits the optimizer's states. It also frees:

    - `frees_gradients`: what other ranks own of a gradient, once it has been reduced;
    - `frees_weights`: what other ranks own of the weights, once their module has run.

    `in_flight` reductions may be under way at once; each holds a buffer, and room for what arrives.
    """

    frees_gradients: bool
    frees_weights: bool
    in_flight: int


STAGES = {
    1: Stage(frees_gradients=False, frees_weights=False, in_flight=2),
    2: Stage(frees_gradients=True, frees_weights=False, in_flight=1),
    3: Stage(frees_gradients=True, frees_weights=True, in_flight=1),
}


def in_buckets(params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int | None) -> list[list[int]]:
    """The shards of stages 1 and 2: numbers of `params`, backwards as gradients arrive, in buckets of so many bytes."""
    order = list(reversed(range(len(params))))
    plan = plan_buckets(
        [params[i].numel() * params[i].element_size() for i in order],
        bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        kinds=[(params[i].dtype, params[i].device) for i in order],
    )
    return [[order[position] for position in bucket] for bucket in plan]
