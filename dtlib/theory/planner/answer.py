"""What a search answers: the best plans, why the others lost, and what more of each resource would buy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dtlib.theory.footprint import DEGREES
from dtlib.theory.memory import training_flops_per_token
from dtlib.theory.models import Architecture, active_parameters
from dtlib.theory.timing import FITTED, Constants, Machine, Plan, StepTime, step_time
from dtlib.theory.timing.space import EVERYTHING, Space

from .errors import Interval
from .memory import Fit, PlanMemory

TIE = 0.02
"""Plans whose times differ by less are a tie, where no runs say how far off these are: no time is known so well."""

_COMMON = ("1F1B", "interleaved", "ZB-H1")


def effort(mesh: Plan, schedule: str) -> tuple[int, int]:
    """What makes a plan the less simple: its axes, then how rare its schedule is."""
    return sum(mesh.size(name) > 1 for name in DEGREES), _COMMON.index(schedule)


@dataclass(frozen=True)
class Found:
    """A plan with its seconds and bytes, term by term, whether it fits, and how far its time is to be believed."""

    plan: Plan
    time: StepTime
    memory: PlanMemory
    fit: Fit
    interval: Interval

    @property
    def bottleneck(self) -> str:
        """What takes the most time, apart from the products of matrices, which the model needs."""
        parts = {name: value for name, value in self.time.parts.items() if name != "matmuls"}
        return max(parts, key=lambda name: parts[name])

    def ties(self, other: Found) -> bool:
        """Whether a slower plan may be as fast: their intervals overlap, or without such their times are within `TIE`.

        An interval is that of a regime: its runs are off by as much each, not all by the same.
        """
        low, high = other.interval.low, self.interval.high
        if low is not None and high is not None:
            return low <= high
        return other.time.total < (1 + TIE) * self.time.total

    def unknown(self, other: Found) -> bool:
        """Whether nobody can say that a slower plan is slower: one of them has no interval, and they are no tie."""
        return (self.interval.high is None or other.interval.low is None) and not self.ties(other)


@dataclass(frozen=True)
class Answer:
    """What a search found.

    `plans` are the best of each mesh, the fastest first. `looked_at` counts all plans, those too that surely do not
    fit. `too_large` is the fastest that a tenth more memory would let in, or None. `buys` has for a tenth more of each
    resource (memory, the card's rate, its memory's rate, both links) and for twice the cards the seconds that the best
    plan then takes; for memory those of `too_large`. `constants` are those that all was counted with, of
    `framework` or moved from them. `simpler` is a plan within `TIE` of the best, if there is one that is simpler than
    all those of `plans` that tie. `space` is what was looked at.
    """

    model: Architecture
    machine: Machine
    sequences: int
    plans: tuple[Found, ...]
    looked_at: int
    too_large: Found | None
    buys: dict[str, float]
    constants: Constants = FITTED
    framework: str = "megatron"
    simpler: Found | None = None
    space: Space = EVERYTHING

    @property
    def best(self) -> Found:
        """The fastest plan that fits."""
        return self.plans[0]

    @property
    def tied(self) -> tuple[Found, ...]:
        """The fastest plan and those that tie with it: first those whose time runs hold, of them the simplest."""
        found = [each for each in (*self.plans, self.simpler) if each is not None and self.best.ties(each)]
        return tuple(sorted(found, key=lambda each: (
            not each.interval.is_held, effort(each.plan, each.plan.schedule), each.time.total,
        )))  # fmt: skip

    @property
    def shown(self) -> tuple[Found, ...]:
        """All plans, those that tie with the fastest first (`tied`)."""
        return (*self.tied, *(each for each in self.plans if not self.best.ties(each)))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.best.plan.seq_of(self.model)

    def mfu(self, found: Found) -> float:
        """Model FLOPs utilisation of a plan, 0 to 1.

        6Ψ + 12 l (a d) s operations a token, with the active parameters and the width of all query heads (h for most
        models; in the mean with that of the values, where they differ); of the scores those that a window leaves.
        Where adapters are trained 4Ψ, and 6 for each parameter of theirs (`Plan.passes`).
        """
        model, seq = self.model, found.plan.seq_of(self.model)
        width = (model.query_width + model.output_width) // 2
        each = training_flops_per_token(active_parameters(model).total, model.num_layers, width, seq)
        dense, of = each.dense * found.plan.passes / 3, found.plan.adapters
        dense += 0 if of is None else 6 * model.num_layers * of.layer_parameters(model)
        flops = dense + model.score_share(seq) * each.attention
        peak = self.machine.accelerator.half_flop_per_s * self.machine.gpus
        return flops * self.tokens / found.time.total / peak

    def lost_to(self, found: Found) -> dict[str, float]:
        """Seconds that `found` takes more than the best plan in each term (negative: less), the largest first."""
        best = self.best.time.parts
        more = {name: value - best[name] for name, value in found.time.parts.items()}
        return dict(sorted(more.items(), key=lambda each: -each[1]))


def what_buys(model: Architecture, best: Found, machine: Machine, k: Constants) -> dict[str, float]:
    """Seconds of the best plan with a tenth more of each resource, and with twice the cards in dp."""
    card, measured = machine.accelerator, machine.accelerator.measured_half_flop_per_s
    faster = card.at_rate(1.1 * card.half_flop_per_s, measured and 1.1 * measured)

    def link(of: Any) -> Any:
        return replace(of, link_bytes_per_s=1.1 * of.link_bytes_per_s)

    tried = {
        "matmul rate": replace(machine, accelerator=faster),
        "memory rate": replace(machine, accelerator=replace(card, memory_bytes_per_s=1.1 * card.memory_bytes_per_s)),
        "link inside": replace(machine, accelerator=replace(card, link=link(card.link))),
        "link across": replace(machine, network=link(machine.network)),
    }
    if best.plan.offload:
        tried["host link"] = replace(machine, accelerator=replace(card, host_link=link(card.host_link)))
        tried["host memory"] = replace(machine, host_memory_bytes_per_s=1.1 * (machine.host_rate or 0))
    seconds = {name: step_time(model, best.plan, each, k).total for name, each in tried.items()}
    m = best.plan.micro_batches
    if m % 2 == 0 and machine.gpus % machine.node == 0 and (m // 2 % best.plan.pp == 0 or best.plan.chunks == 1):
        wider = best.plan.changed(dp=2 * best.plan.dp, micro_batches=m // 2)
        seconds["twice the cards"] = step_time(model, wider, replace(machine, gpus=2 * machine.gpus), k).total
    return seconds
