"""An answer in words: what ``dtlib plan`` prints and what the page of the planner shows, from one place."""

from __future__ import annotations

from typing import Any

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.units import GiB, format_bytes, format_seconds

from .answer import Answer, Found
from .plan import Plan

COLUMNS = ("dp", "tp", "pp", "cp", "ZeRO", "batch", "schedule", "again", "GiB", "step", "MFU")
"""What `row` tells of a plan."""


def row(answer: Answer, found: Found) -> tuple[str, ...]:
    """A plan of `answer` in the words of `COLUMNS`: "+sp" is sequence parallelism, "1×128" the micro-batches."""
    p = found.plan
    return (
        str(p.dp), f"{p.tp}{'+sp' if p.sequence_parallel else ''}", str(p.pp), str(p.cp), str(p.zero),
        f"{p.micro_batch}×{p.micro_batches}", _schedule(p), p.recompute,
        f"{found.memory.total / GiB:.0f}±{found.fit.margin_bytes / GiB:.0f}", format_seconds(found.time.total),
        f"{answer.mfu(found):.1%}",
    )  # fmt: skip


def head(answer: Answer) -> str:
    """What a step is."""
    seq = answer.best.plan.seq_of(answer.model)
    return f"a step: {answer.sequences:,} sequences of {seq:,} tokens; {answer.looked_at:,} plans timed"


def terms(found: Found) -> tuple[list[tuple[str, str, float]], list[tuple[str, str, float]]]:
    """The terms of time and of memory that are not 0: name, amount in words, share of the total."""

    def told(parts: Breakdown, form: Any) -> list[tuple[str, str, float]]:
        return [(each.name, form(each.value), each.share) for each in parts.table()]

    return told(found.time, format_seconds), told(found.memory, format_bytes)


def sentences(answer: Answer) -> list[str]:
    """Whether the best plan fits, what takes its time, why the second lost, what more of each resource would buy."""
    best = answer.best
    card = format_bytes(answer.machine.accelerator.memory_bytes, digits=3)
    margin = format_bytes(best.fit.margin_bytes, digits=3)
    said = [
        f"It needs {format_bytes(best.memory.total, digits=3)} ± {margin} of {card}.",
        f"Most of the rest of its time is {best.bottleneck.replace('_', ' ')}.",
    ]
    if len(answer.plans) > 1:
        worse = [(name, more) for name, more in answer.lost_to(answer.plans[1]).items() if more > 0][:2]
        lost = " and ".join(f"{format_seconds(more)} more of {name.replace('_', ' ')}" for name, more in worse)
        said.append(f"The second has {lost}." if lost else "The second takes exactly as long.")
    if answer.too_large is not None:
        p, more = answer.too_large.plan, answer.too_large
        needed = format_bytes(more.memory.total + more.fit.margin_bytes, digits=3)
        said.append(
            f"dp {p.dp}, tp {p.tp}, pp {p.pp}, cp {p.cp}, ZeRO {p.zero} would take {format_seconds(more.time.total)}, "
            f"but may need {needed}."
        )
    seconds = best.time.total
    gains = {name: 1 - value / seconds for name, value in answer.buys.items() if name != "twice the cards"}
    told = ", ".join(f"{name} {gain:.1%}" for name, gain in sorted(gains.items(), key=lambda each: -each[1]))
    said.append(f"A tenth more of each shortens the step by: {told}.")
    if "twice the cards" in answer.buys:
        said.append(f"Twice the cards: {format_seconds(answer.buys['twice the cards'])} a step.")
    return said


def _schedule(p: Plan) -> str:
    if p.pp == 1:
        return "–"
    return f"{p.chunks} chunks" if p.chunks > 1 else p.schedule
