"""When adding ranks stops paying. Compute and communication follow one another here: no overlap."""

from __future__ import annotations

import math

from dtlib.theory.collectives.ring import ring_all_reduce_seconds
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, ranks

from .overlap import blocking_step_seconds


@formula("dp.efficiency", source="derived here", label="eq-dp-best", equation=r"\frac{T}{T + C(N)} = \frac{R}{1+R}")
def efficiency(
    compute_seconds: float, grad_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> float:
    """Efficiency, each rank keeping its batch.

    The share of a step that computes. R = T/C(N) is the ratio of compute to communication. N ranks are N times the
    efficiency faster than one, which approaches T/(2α) as N grows: beyond that only latency is bought.
    """
    compute_seconds = amount("compute_seconds", compute_seconds, positive=True)
    return compute_seconds / blocking_step_seconds(compute_seconds, grad_bytes, n, alpha_seconds, link_bytes_per_s)


@formula("dp.strong_step_seconds", source="derived here", label="eq-dp-best", equation=r"\frac{T_1}{N} + C(N)")
def strong_step_seconds(
    total_compute_seconds: float, grad_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> float:
    """Step time when ranks share a fixed batch.

    Alone, one rank needs T₁ (`total_compute_seconds`) to compute it.
    """
    total_compute_seconds = amount("total_compute_seconds", total_compute_seconds)
    share = total_compute_seconds / ranks(n)
    return blocking_step_seconds(share, grad_bytes, n, alpha_seconds, link_bytes_per_s)


@formula(
    "dp.best_world_size",
    source="derived here",
    label="eq-dp-best",
    equation=r"N^* = \sqrt{\frac{T_1 - 2D/B}{2\alpha}}",
    use="Further ranks make the step longer.",
)
def best_world_size(
    total_compute_seconds: float, grad_bytes: float, alpha_seconds: float, link_bytes_per_s: float
) -> int:
    """Best number of ranks for a fixed batch.

    The whole number next to N* with the shortest step; 1 where T₁ ≤ 2D/B: then no number of ranks is faster
    than one. `alpha_seconds` must be positive, for without latency more ranks are always better.
    """
    alpha_seconds = amount("alpha_seconds", alpha_seconds, positive=True)
    link_bytes_per_s = amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    total_compute_seconds = amount("total_compute_seconds", total_compute_seconds)
    grad_bytes = amount("grad_bytes", grad_bytes)
    spare = total_compute_seconds - 2 * grad_bytes / link_bytes_per_s
    if spare <= 0:
        return 1
    best = math.sqrt(spare / (2 * alpha_seconds))
    around = {max(1, math.floor(best)), max(1, math.ceil(best))}
    return min(
        sorted(around),
        key=lambda n: strong_step_seconds(total_compute_seconds, grad_bytes, n, alpha_seconds, link_bytes_per_s),
    )


@formula(
    "dp.break_even_tokens",
    source="derived here",
    label="eq-dp-tokens-even",
    equation=r"2\,\frac{N-1}{N}\cdot\frac{g}{f}\cdot\frac{F}{B}",
    use="With fewer tokens a rank, communication takes longer than compute.",
)
def break_even_tokens(
    flops_per_s: float,
    link_bytes_per_s: float,
    n: int,
    *,
    grad_bytes_per_param: float = 2,
    flops_per_param: float = 6,
) -> float:
    """Tokens a rank at which compute equals communication.

    The size of the model, Ψ, cancels. A rank computes at `flops_per_s` F and spends `flops_per_param` f = 6
    FLOPs a parameter and token (4 in the backward pass alone, which is what overlap can use); each parameter
    sends `grad_bytes_per_param` g (2 for bf16, 4 for float32). Latency is left out.
    """
    flops_per_s = amount("flops_per_s", flops_per_s)
    grad_bytes_per_param = amount("grad_bytes_per_param", grad_bytes_per_param)
    flops_per_param = amount("flops_per_param", flops_per_param, positive=True)
    seconds_per_param = ring_all_reduce_seconds(grad_bytes_per_param, n, 0.0, link_bytes_per_s)
    return seconds_per_param * flops_per_s / flops_per_param
