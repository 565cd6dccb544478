"""What a step of ZeRO sends, and what a rank holds for a moment beside its shards."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, ranks, sized, timed, whole

from .stages import bytes_per_param, checked_stage


@dataclass(frozen=True)
class ZeroTraffic(Breakdown):
    """Bytes that one rank sends in a step: `all_reduce` of gradients (stage 0), or their `reduce_scatter`; the
    all-gather of updated weights (stages 1 and 2), or of weights before forward and before backward (stage 3)."""

    all_reduce: float = 0
    reduce_scatter: float = 0
    gather_updated: float = 0
    gather_forward: float = 0
    gather_backward: float = 0


@formula(
    "zero.traffic",
    source="rajbhandari2020zero",
    label="thm-zero-traffic",
    equation=(
        r"\frac{N-1}{N} \cdot \begin{cases} 2 D_g & \text{stage } 0 \\ D_g + D_w & \text{stages } 1, 2 \\"
        r" D_g + 2 D_w & \text{stage } 3 \end{cases}"
    ),
)
def traffic(
    grad_bytes: float,
    n: int,
    stage: int,
    weight_bytes: float | None = None,
    *,
    reshard_after_forward: bool = True,
) -> ZeroTraffic:
    """Bytes that a rank sends in a step, by collective.

    For one micro-batch. A ring's all-gather or reduce-scatter sends (N−1)/N · D, its all-reduce twice that.
    `grad_bytes` is the full gradient, `weight_bytes` the full weights as they travel (by default as many). Stage 3
    without `reshard_after_forward` keeps the weights for backward, and gathers once. ``ValueError`` for N below 1,
    another stage, or negative bytes. Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 7.
    """
    stage = checked_stage(stage)
    grad_bytes, n = sized(grad_bytes, n, "grad_bytes")
    weight_bytes = grad_bytes if weight_bytes is None else amount("weight_bytes", weight_bytes)
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


@formula(
    "zero.sent_bytes",
    source="rajbhandari2020zero",
    label="thm-zero-traffic",
    equation=r"\{2, 2, 2, 3\} \cdot \frac{N-1}{N}\,D",
)
def sent_bytes(full_bytes: float, n: int, stage: int) -> float:
    """Bytes that a rank sends in a step, stages 0 to 3.

    2, 2, 2 and 3 times (N−1)/N · D for stages 0 to 3, where weights and gradients are D (`full_bytes`) each: stage 3
    gathers the weights twice and scatters the gradients once, 1.5 times an all-reduce. Source and errors as
    `traffic`.
    """
    full_bytes, n = sized(full_bytes, n)
    return traffic(full_bytes, n, stage).total


@formula("zero.gathered_bytes", source="derived here", label="eq-zero-gathered", equation=r"(1 + f)\,w\,\Phi")
def gathered_bytes(largest_module_bytes: float, *, prefetched: int = 1) -> float:
    """Full weights that stage 3 holds in its forward pass, beside the shards.

    Bytes at the peak: the largest module that is gathered as a whole, and as large a one for each of the `prefetched`
    modules that arrive meanwhile. ``ValueError`` for negative bytes or a negative number of modules.
    """
    largest_module_bytes = amount("largest_module_bytes", largest_module_bytes)
    return (1 + whole("prefetched", prefetched, 0)) * largest_module_bytes


@formula(
    "zero.peak_bytes",
    source="derived here",
    label="eq-zero-peak",
    equation=(
        r"K + \begin{cases} \max(A, g\Psi) + (1 + 2\rho)\,g\Phi & \text{stage } 1 \\"
        r" \max(A', g\Psi/N) + c\,g\Phi & \text{stage } 2 \\"
        r" \max(A', g\Psi/N) + c\,g\Phi + (1 + f)\,w\Phi + (w + g)\,\Omega & \text{stage } 3 \end{cases}"
        r", \quad A' = \max\bigl(\tfrac{\Psi - \Phi}{\Psi} A, A - c\,g\Phi\bigr)"
        r", \quad c = 2 + \rho, \quad \rho = \tfrac1N \lceil\tfrac{N-1}{4}\rceil"
    ),
)
def peak_bytes(
    num_params: float,
    n: int,
    stage: int,
    unit_params: float,
    *,
    weights: float = 4,
    gradients: float = 4,
    optimizer: float = 8,
    work_bytes: float = 0,
    outer_params: float = 0,
    prefetched: int = 1,
    copies: float | None = None,
) -> float:
    """Memory of a rank at the fullest moment of a step, bytes.

    Early in the backward pass, when one unit's gradient is being reduced and the next one's is collected:

    - K, what is kept all the time: `bytes_per_param` of the Ψ `num_params`, the gradient left out.
    - A, the `work_bytes` of the passes at their fullest (activations, temporaries). As they are freed, what is kept of
      the gradient grows, so the larger of the two counts. At stages 2 and 3 the first unit's work is gone by then: A',
      unless A alone is more than what comes after it.
    - c times the gradient of the largest unit or bucket of Φ `unit_params`: new, under way, and room ρ for what arrives
      at a time, a quarter of the N−1 other chunks: 2 + ⌈(N−1)/4⌉/N `copies` as `ranks.zero` has it; FSDP2 has 2 + 1/N.
      Stage 1 keeps what is under way, and has room for two reductions.
    - stage 3: the unit whole, with the f `prefetched` next ones, and the Ω `outer_params` of no such unit, whole all
      along with their gradient.

    Off by one unit's gradient and work at most, where units are alike. Per parameter `weights` w, `gradients` g and
    `optimizer` o bytes: 4, 4 and 8 are those of Adam in fp32. ``ValueError`` for N below 1, a stage that is not 1, 2 or
    3, or negative sizes. Derived here.
    """
    stage, n = checked_stage(stage), ranks(n)
    if stage == 0:
        raise ValueError("stage must be 1, 2 or 3, not 0: nothing is split there")
    amounts = {"num_params": num_params, "unit_params": unit_params, "work_bytes": work_bytes}
    for name, value in {**amounts, "outer_params": outer_params, "copies": copies or 0}.items():
        amount(name, value)
    kept = num_params * bytes_per_param(n, stage, weights, 0, optimizer)
    room = -(-(n - 1) // 4) / n
    if stage == 1:
        return kept + max(work_bytes, gradients * num_params) + (1 + 2 * room) * gradients * unit_params
    unit = (2 + room if copies is None else copies) * gradients * unit_params
    work = max(work_bytes * (1 - unit_params / num_params), work_bytes - unit) if num_params else work_bytes
    peak = kept + max(work, gradients * num_params / n) + unit
    if stage == 3:
        gathered = gathered_bytes(weights * unit_params, prefetched=prefetched)
        peak += gathered + (weights + gradients) * outer_params
    return peak


@formula("zero.exchange_messages", source="derived here", label="eq-zero-wrap", equation=r"3u\,(N-1)")
def exchange_messages(num_units: int, n: int) -> int:
    """Messages that a rank sends in a step of stage 3.

    Each of the `num_units` u units is gathered before forward and before backward, and its gradient scattered once:
    three exchanges with N−1 other ranks. ``ValueError`` for N or `num_units` below 1.
    """
    return 3 * whole("num_units", num_units, 1) * (ranks(n) - 1)


@formula(
    "zero.exchange_seconds",
    source="derived here",
    label="eq-zero-wrap",
    equation=r"3u\,(N-1)\,\alpha + 3\,\frac{N-1}{N}\,\frac{D}{B}",
)
def exchange_seconds(full_bytes: float, num_units: int, n: int, alpha_seconds: float, link_bytes_per_s: float) -> float:
    """Stage 3, seconds of communication in a step.

    The messages of a rank one after another, each with its latency, and its bytes over the link: `exchange_messages` α
    plus `sent_bytes` over B, for units of D/u bytes each. Both are equal where a unit has N·α·B bytes. ``ValueError``
    for sizes, ranks or times out of range.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return exchange_messages(num_units, n) * alpha_seconds + sent_bytes(full_bytes, n, 3) / link_bytes_per_s
