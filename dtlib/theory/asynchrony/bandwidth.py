"""How much of their time ranks compute that meet every H steps, and the bandwidth that a share of it takes."""

from __future__ import annotations

from typing import Any

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, number, whole


def utilisation(
    full_bytes: float,
    step_seconds: float,
    n: int,
    link_bytes_per_s: float,
    local_steps: int = 1,
    overlap_seconds: float = 0,
    fragments: int = 1,
) -> float:
    """The share of their time that `n` ranks compute.

    H steps of T seconds, then an all-reduce of D bytes in F `fragments`, spread evenly over the steps and each hidden
    behind the `overlap_seconds` O of computing that follow: u = HT/(HT + F max(0, C/F − O)), C = 2(N−1)/N · D/B.
    After HT/F seconds of computing the next fragment wants the link, so of a longer O only that much hides.
    """
    compute = whole("local_steps", local_steps, 1) * number("step_seconds", step_seconds, positive=True)
    travel = _bytes(full_bytes, n) / number("link_bytes_per_s", link_bytes_per_s, positive=True)
    return float(compute / (compute + max(0.0, travel - _hidden(compute, overlap_seconds, fragments))))


@formula(
    "asynchrony.bandwidth_for",
    source="derived here",
    label="eq-asynchrony-bandwidth",
    equation=r"\frac{2\,\frac{N-1}N\,D}{H T\,\frac{1-u}{u} + \min(F O,\, H T)}",
    use="On a slower link ranks compute for a smaller share of their time.",
)
def bandwidth_for(
    share: float,
    full_bytes: float,
    step_seconds: float,
    n: int,
    local_steps: int = 1,
    overlap_seconds: float = 0,
    fragments: int = 1,
) -> float:
    """Bytes a second from which `utilisation` is `share` or more.

    0 for one rank. ``ValueError`` for a share that is not above 0 and at most 1, or for 1 where nothing hides.
    """
    u = number("share", share, positive=True)
    compute = whole("local_steps", local_steps, 1) * number("step_seconds", step_seconds, positive=True)
    room = compute * (1 - u) / u + _hidden(compute, overlap_seconds, fragments)
    if u > 1 or not room > 0:
        raise ValueError(f"share must be below 1, or at most 1 where something hides, not {share!r}")
    return float(_bytes(full_bytes, n) / room)


def wait_by_layer(
    travel_seconds: float, step_seconds: float, layers: int, fragments: int = 1, steps_late: int = 0
) -> float:
    """Seconds that ranks wait for one exchange, all its fragments together, timed layer by layer.

    Fragment p of F holds the layers p, p + F, p + 2F, …, and leaves after a step of its own. A layer leaves when its
    part of the backward pass (two thirds of a step) is done and the link has sent those above it, and must be there
    when the forward pass comes to it, `steps_late` steps later: the lowest layers hide least, which `utilisation` does
    not see.
    """
    step, count = number("step_seconds", step_seconds, positive=True), whole("layers", layers, 1)
    each = amount("travel_seconds", travel_seconds) / count
    waited = 0.0
    for fragment in range(whole("fragments", fragments, 1)):
        free, arrived = -step, dict[int, float]()
        for layer in reversed(range(fragment, count, fragments)):  # the backward pass ends at 0
            arrived[layer] = free = max(free, -layer * 2 / 3 * step / count) + each
        begin = whole("steps_late", steps_late, 0) * step
        waited += max([0.0, *(there - begin - layer * step / 3 / count for layer, there in arrived.items())])
    return waited


def _bytes(full_bytes: Any, n: int) -> Any:
    ranks = whole("n", n, 1)
    return 2 * (ranks - 1) / ranks * amount("full_bytes", full_bytes)


def _hidden(compute_seconds: float, overlap_seconds: float, fragments: int) -> float:
    """Seconds of an exchange that hide at most: those of each fragment, but not more than there is computing."""
    return min(whole("fragments", fragments, 1) * number("overlap_seconds", overlap_seconds), compute_seconds)
