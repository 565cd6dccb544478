"""What a pipeline idles, holds and sends, in closed form.

Letters: p ranks, m micro-batches, v chunks a rank, and of one rank's layers and one micro-batch T_F seconds forward
(`forward`), T_B for the gradient of the input (`input_gradient`), T_W for that of the weights (`weight_gradient`). The
laws hold for stages that take equal times and messages that take none, from as many micro-batches on as each says.
"""

from __future__ import annotations

import math

from dtlib.theory.footprint import chunks_in_flight
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole

from .generators import sizes


@formula("pp.bubble_fraction", source="huang2019gpipe", label="eq-pp-interleaved", equation=r"\frac{p-1}{vm+p-1}")
def bubble_fraction(p: int, m: int, v: int = 1) -> float:
    """Idle part of a step.

    (p − 1)/(vm + p − 1) of the time of p ranks, for GPipe and 1F1B (v = 1, any m) and interleaved 1F1B, where m is a
    multiple of p. The ranks' idle time (p − 1)T/v over their whole time mT + (p − 1)T/v. ``ValueError`` for counts
    below 1, or an m that is no multiple of p where v is above 1.
    """
    overhead = bubble_overhead(p, m, v)
    return overhead / (1 + overhead)


@formula("pp.bubble_overhead", source="narayanan2021", label="eq-pp-interleaved", equation=r"\frac{p-1}{vm}")
def bubble_overhead(p: int, m: int, v: int = 1) -> float:
    """Idle time over work.

    (p − 1)/(vm): what a step takes more than without a pipeline. Not the idle *part* of the step, which is
    `bubble_fraction`; at 50 % idle the overhead is 100 %. Errors as `bubble_fraction`.
    """
    p, m = sizes(p, m)
    v = whole("v", v, 1)
    if v > 1 and m % p:
        raise ValueError(f"m must be a multiple of p={p} where chunks are interleaved, not {m}")
    return (p - 1) / (v * m)


@formula(
    "pp.micro_batches_for",
    source="derived here",
    label="eq-pp-enough",
    equation=r"\left\lceil\frac{(p-1)(1-x)}{vx}\right\rceil",
    use="With fewer, the bubble is a larger share than $x$.",
)
def micro_batches_for(p: int, fraction: float, v: int = 1) -> int:
    """Micro-batches that bring the bubble down.

    The fewest m whose `bubble_fraction` is at most x: (p − 1)/(vm + p − 1) ≤ x solved for m; with chunks the next
    multiple of p. ``ValueError`` unless x is above 0 and below 1.
    """
    p, v = whole("p", p, 1), whole("v", v, 1)
    x = float(amount("fraction", fraction, positive=True))
    if x >= 1:
        raise ValueError(f"fraction must be below 1, not {x:g}")
    m = max(1, math.ceil((p - 1) * (1 - x) / (v * x) - 1e-9))
    return m if v == 1 else -(-m // p) * p


@formula(
    "pp.idle_seconds", source="qi2024zerobubble", label="eq-pp-zero",
    equation=r"(p-1)\,(T_F+T_B+T_W) \to (p-1)\,(T_F+T_B-T_W) \to (p-1)\,(T_F+T_B-2T_W)",
)  # fmt: skip
def idle_seconds(
    schedule: str, p: int, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0, v: int = 1
) -> float:
    """Idle seconds of a rank.

    From its first action to its last, of the rank for which that is longest: (p − 1)(T_F + T_B + T_W) for ``"1F1B"``
    and ``"GPipe"``, a v-th of it ``"interleaved"``, (p − 1)(T_F + T_B − T_W) for ``"ZB-H1"`` (from p micro-batches on)
    and (p − 1)(T_F + T_B − 2T_W) for ``"ZB-H2"`` (from 2p − 1 on). If the three times are equal, 0 for ``"ZB-V"`` (from
    2p − 1 on) and (p − 1)T_F/2 for ``"DualPipeV"``. H1 and H2 hold where T_W is no longer than T_F and T_B.
    ``ValueError`` for another name, or times for which a law does not hold.
    """
    p, v = whole("p", p, 1), whole("v", v, 1)
    f, b, w = (
        float(amount(name, value))
        for name, value in (
            ("forward", forward),
            ("input_gradient", input_gradient),
            ("weight_gradient", weight_gradient),
        )
    )
    if schedule in ("1F1B", "GPipe", "interleaved"):
        return (p - 1) * (f + b + w) / v
    if schedule in ("ZB-V", "DualPipeV"):
        if not f == b == w:
            raise ValueError(
                f"forward, input_gradient and weight_gradient must be equal for {schedule}, not {f:g}, {b:g}, {w:g}"
            )
        return 0.0 if schedule == "ZB-V" else (p - 1) * f / 2
    if schedule not in ("ZB-H1", "ZB-H2"):
        raise ValueError(
            f"schedule must be GPipe, 1F1B, interleaved, ZB-H1, ZB-H2, ZB-V or DualPipeV, not {schedule!r}"
        )
    if w > min(f, b):
        raise ValueError(
            f"weight_gradient must be at most forward={f:g} and input_gradient={b:g} for {schedule}, not {w:g}"
        )
    return (p - 1) * max(0.0, f + b - (1 if schedule == "ZB-H1" else 2) * w)


@formula("pp.most_in_flight", source="derived here", label="thm-pp-memory", equation=r"\min(m,\; p - r)")
def most_in_flight(schedule: str, p: int, m: int, rank: int, v: int = 1) -> float:
    """Activations a rank holds.

    At its fullest, in those of all its layers for one micro-batch: 1 ``"sequential"``, m ``"GPipe"``, min(m, p − r)
    ``"1F1B"`` and ``"PipeDream"``, min(m, p) ``"ZB-H1"``, min(m, 2p − 1) ``"ZB-H2"``, min(m, p, (m + 1 + r)/2)
    ``"ZB-V"``, p + 1/2 ``"DualPipeV"`` (from 2p micro-batches on), and ``"interleaved"`` what
    `theory.footprint.chunks_in_flight` counts, over v. ``ValueError`` for another name or a rank not below p.
    """
    p, m = sizes(p, m)
    rank, v = whole("rank", rank, 0), whole("v", v, 1)
    if rank >= p:
        raise ValueError(f"rank must be from 0 to {p - 1}, not {rank}")
    if schedule == "interleaved":
        return chunks_in_flight(p, rank, m, v) / v
    held = {
        "sequential": 1,
        "GPipe": m,
        "1F1B": min(m, p - rank),
        "PipeDream": min(m, p - rank),
        "ZB-H1": min(m, p),
        "ZB-H2": min(m, 2 * p - 1),
        "ZB-V": min(m, p, (m + 1 + rank) / 2),
        "DualPipeV": p + 0.5,
    }
    if schedule not in held:
        raise ValueError(f"schedule must be one of {', '.join(held)} or interleaved, not {schedule!r}")
    return float(held[schedule])


@formula("pp.boundary_elements", source="derived here", label="eq-pp-sent", equation=r"2\,(pv-1)\,m\,b\,s\,h")
def boundary_elements(p: int, m: int, micro_batch: int, seq: int, hidden: int, v: int = 1) -> int:
    """Elements that cross all cuts.

    2(pv − 1)·m·bsh a step: an activation forward and its gradient back, at each cut between two stages, for each
    micro-batch of b sequences. With one rank nothing travels. ``ValueError`` for counts below 1.
    """
    p, m = sizes(p, m)
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    return 2 * (p * whole("v", v, 1) - 1) * m * b * s * h if p > 1 else 0


@formula(
    "pp.hiding_width",
    source="derived here",
    label="eq-pp-hide",
    equation=r"\frac{wF}{24B}",
    use="From here on a message takes no longer than a stage computes.",
)
def hiding_width(flop_per_s: float, link_bytes_per_s: float, *, element_bytes: float = 2) -> float:
    """Layers times width that hide a message.

    A stage of l layers of width h computes 24bsh²·l operations forward (attention's scores left out, which only add)
    and sends bsh elements of w bytes: the message takes no longer if l·h is at least wF/(24B). Batch and length cancel.
    ``ValueError`` for rates that are not positive.
    """
    rate = float(amount("flop_per_s", flop_per_s, positive=True))
    link = float(amount("link_bytes_per_s", link_bytes_per_s, positive=True))
    return float(amount("element_bytes", element_bytes, positive=True)) * rate / (24 * link)


@formula("pp.weight_versions", source="narayanan2019pipedream", label="without-a-flush-pipedream", equation=r"p - r")
def weight_versions(p: int, stage: int, *, vertical_sync: bool = False) -> int:
    """Versions of its weights that a stage keeps under PipeDream.

    p − r on stage r, one for each micro-batch in flight: the gradient of a micro-batch is taken at the weights of its
    forward pass. With vertical sync all stages use the version of the first one, and each keeps p. ``ValueError`` for a
    stage not below p.
    """
    p, stage = whole("p", p, 1), whole("stage", stage, 0)
    if stage >= p:
        raise ValueError(f"stage must be from 0 to {p - 1}, not {stage}")
    return p if vertical_sync else p - stage
