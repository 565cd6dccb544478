"""The bucket plan: which gradients travel together. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dtlib.theory.valid import whole


def plan_buckets(
    sizes: Sequence[int],
    bucket_bytes: int,
    *,
    first_bucket_bytes: int | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Cut gradients of `sizes` bytes, given in the order of readiness, into buckets of neighbours.

    Returns lists of indices into `sizes`, in the order in which the buckets become ready. A bucket is closed
    once it holds at least `bucket_bytes` (the first one: `first_bucket_bytes`, by default the same), so a
    gradient is never cut and a bucket may be larger than the cap. Gradients of different `kinds` (a dtype,
    say) never share a bucket; each kind fills its own, and a bucket takes its place when its last gradient
    does.
    """
    bucket_bytes = whole("bucket_bytes", bucket_bytes, 1)
    first = bucket_bytes if first_bucket_bytes is None else whole("first_bucket_bytes", first_bucket_bytes, 1)
    labels = [None] * len(sizes) if kinds is None else list(kinds)
    if len(labels) != len(sizes):
        raise ValueError(f"kinds must hold one label for each of {len(sizes)} sizes, not {len(labels)}")
    plan: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index, (size, label) in enumerate(zip(sizes, labels, strict=True)):
        filling.setdefault(label, []).append(index)
        filled[label] = filled.get(label, 0) + whole("sizes", size, 0)
        if filled[label] >= (bucket_bytes if plan else first):
            plan.append(filling.pop(label))
            del filled[label]
    return sorted(plan + list(filling.values()), key=lambda bucket: bucket[-1])
