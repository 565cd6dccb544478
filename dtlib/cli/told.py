"""An answer in words: what ``dtlib plan`` prints and what the page of the planner shows, from one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.calibration.measured import FEWEST, Refit
from dtlib.theory.footprint import DEGREES, host_states
from dtlib.theory.models import Architecture
from dtlib.theory.planner import Answer, Fit, Found, Goal, Keeping, PlanMemory, margin_of
from dtlib.theory.planner.answer import TIE
from dtlib.theory.planner.errors import INSIDE
from dtlib.theory.planner.laws import recompute_of
from dtlib.theory.planner.memory import SURELY
from dtlib.theory.planner.regime import SEEN, outside, regime
from dtlib.theory.timing import FITTED, Constants, Plan, profile
from dtlib.theory.timing.space import EVERYTHING, FRAMEWORKS, OPEN
from dtlib.theory.units import GiB, format_bytes, format_seconds

_COLUMNS = (*DEGREES, "ZeRO", "batch", "schedule", "again", "GiB", "step", "MFU", "tie")


def columns(answer: Answer) -> tuple[str, ...]:
    """What `row` tells of a plan: whether it ties with the fastest, and its ep where the model has experts."""
    return tuple(name for name in _COLUMNS if name != "ep" or answer.model.experts is not None)


def row(answer: Answer, found: Found) -> tuple[str, ...]:
    """A plan of `answer` in the words of `columns`: "+sp" is sequence parallelism, "+sp*" one that keeps its gathered
    inputs, "3/8" ZeRO 3 among 8 ranks each, "1×128" the micro-batches, "≈" a tie with the fastest, "≟" one that may be
    as fast or not."""
    p = found.plan
    of_experts = () if answer.model.experts is None else (str(p.ep),)
    tie = "≟" if answer.best.unknown(found) else "≈" if len(answer.tied) > 1 and found in answer.tied else ""
    return (
        str(p.dp), f"{p.tp}{_split(p)}", str(p.pp), str(p.cp), *of_experts, _zero(p),
        f"{p.micro_batch}×{p.micro_batches}", schedule(p), recompute_of(p),
        f"{found.memory.total / GiB:.0f}±{found.fit.margin_bytes / GiB:.0f}", format_seconds(found.time.total),
        f"{answer.mfu(found):.1%}", tie,
    )  # fmt: skip


def head(answer: Answer, *, seq_given: bool = True, batch_given: bool = True) -> str:
    """What a step is, what of it nobody asked for, and what of all plans a framework is without."""
    seq = answer.best.plan.seq_of(answer.model)
    sequences = _number(answer.sequences, "sequence", "s") + ("" if batch_given else " (by default)")
    tokens = f"{seq:,} tokens" + ("" if seq_given else " (the model's own length)")
    name, plans = answer.space.framework, _number(answer.looked_at, "plan", "s")
    said = f"a step: {sequences} of {tokens}; {plans} looked at"
    return f"{said}; with {name} {of_framework(name)}" if name else said


def of_framework(name: str) -> str:
    """What plans of a framework are without, of all that is looked at."""
    of = FRAMEWORKS[name]
    gone = {name: [each for each in getattr(EVERYTHING, name) if each not in getattr(of, name)] for name in OPEN}
    words = [f"{name} {', '.join(map(str, some))}" for name, some in gone.items() if some]
    words += ["zero 2, 3 with a pipeline"] * (of.staged_zero < max(of.zero))
    words += [f"shard below zero {of.hybrid_zero}"] * (of.hybrid_zero > 2)
    words += ["lora" if name == "adapters" else name for name in of.without]
    *most, last = words
    return f"none has {', '.join(most)}{', or ' * bool(most)}{last}".replace("_", "-")


def terms(found: Found) -> tuple[list[tuple[str, str, float]], list[tuple[str, str, float]]]:
    """The terms of time and of memory that are not 0: name, amount in words, share of the total."""

    def told(parts: Breakdown, form: Any) -> list[tuple[str, str, float]]:
        return [(each.name, form(each.value), each.share) for each in parts.table()]

    return told(found.time, format_seconds), told(found.memory, format_bytes)


def in_words(answer: Answer) -> str:
    """The best plan as a sentence: its degrees, its micro-batches, its step time and its MFU."""
    best, p = answer.best, answer.best.plan
    order = f"{p.chunks} chunks a rank" if p.chunks > 1 else p.schedule
    split = " with sequence parallelism that " + ("keeps what it gathers" if p.keep_gathered else "gathers again")
    degrees = (
        f"dp {p.dp}",
        f"tp {p.tp}" + split * p.sequence_parallel + " behind products" * (p.tp_overlap and p.tp > 1),
        f"pp {p.pp}" + (f" ({order})" if p.pp > 1 else ""),
        f"cp {p.cp}",
        *([f"ep {p.ep} of dp"] if p.ep > 1 else []),
        f"ZeRO {p.zero}" + (f" among {p.shard} ranks each (hybrid)" if p.shard else ""),
        *([f"adapters of rank {p.adapters.rank} on {_and(p.adapters.modules)} trained alone"] if p.adapters else []),
        f"{_number(p.micro_batches, 'micro-batch', 'es')} of {_number(p.micro_batch, 'sequence', 's')} a rank",
        f"{_again(p)} computed again",
    )
    seconds, mfu = format_seconds(best.time.total), answer.mfu(best)
    of = "" if p.precision == "bf16" else f" of the rate in bf16, products in {p.precision}"
    return f"The fastest takes {seconds} at an MFU of {mfu:.1%}{of}: {', '.join(degrees)}."


def sentences(answer: Answer) -> list[str]:
    """The best plan, whether it fits, what takes its time, why the second lost, what more of each would buy."""
    best = answer.best
    said = [
        in_words(answer),
        f"It needs {_need(best.plan, best.memory, best.fit)}. {_seen(best.plan, best.fit.outside, 'This plan')}",
        *of_host(answer.model, best.plan, answer.machine.node),
        of_interval(best),
        _after_matmuls(best),
    ]
    if len(answer.tied) > 1:
        said.append(_of_ties(answer))
    if any(map(best.unknown, answer.plans)):
        whose = "the fastest plan has" if best.interval.high is None else "they have"
        said.append(f"Whether the plans marked ≟ are slower is unknown: {whose} no interval.")
    if answer.model.experts is not None:
        said.append(_of_experts(answer))
    if len(answer.plans) > 1:
        second, least = answer.plans[1], best.time.total / 1000
        worse = [(name, more) for name, more in answer.lost_to(second).items() if more > least][:2]
        lost = " and ".join(f"{format_seconds(more)} more of {name.replace('_', ' ')}" for name, more in worse)
        longer = format_seconds(second.time.total - best.time.total)
        said.append(
            f"The best of another kind, {_degrees(second.plan)}, takes {longer} longer, with "
            f"{lost or 'hardly more of any term'}."
        )
    if answer.too_large is not None:
        p, more = answer.too_large.plan, answer.too_large
        needed = format_bytes(more.memory.total + more.fit.margin_bytes, digits=3)
        said.append(
            f"{_degrees(p)}, {_number(p.micro_batch, 'sequence', 's')} in a micro-batch, recompute {recompute_of(p)} "
            f"would take {format_seconds(more.time.total)}, but may need {needed}."
        )
    seconds = best.time.total
    gains = {name: 1 - value / seconds for name, value in answer.buys.items() if name != "twice the cards"}
    told = ", ".join(f"{name} {gain:.1%}" for name, gain in sorted(gains.items(), key=lambda each: -each[1]))
    said.append(f"A tenth more of each shortens the step by: {told}.")
    if "twice the cards" in answer.buys:
        k, cards = answer.constants, answer.machine.gpus
        stalls = k.stall_seconds > 0 and cards < k.stall_cards <= 2 * cards
        why = f", if it stalls as runs on {k.stall_cards:.0f} cards did" if stalls else ""
        said.append(f"Twice the cards: {format_seconds(answer.buys['twice the cards'])} a step{why}.")
    return said


def of_host(model: Architecture, plan: Plan, node: int) -> list[str]:
    """What the host keeps of an optimizer, where it does."""
    if not plan.offload:
        return []
    kept = host_states(model, plan)
    return [f"The host keeps {format_bytes(kept)} for a card, {format_bytes(node * kept)} in a node of {node}."]


def of_interval(found: Found) -> str:
    """Between what the time of a plan is to be expected, or that nothing like it was measured."""
    off = found.interval
    if off.runs and off.unlike == (off.regime,):
        return f"Only {_number(off.runs, 'run', 's')} like it ({off.regime}) can be told: too few for an interval."
    if off.low is None or off.high is None:
        return f"Its time is not held to anything like this: {_and(off.unlike)}."
    said = (
        f"Of {_number(off.runs, 'run', 's')} like it ({off.regime}), {INSIDE:.0%} would lie between "
        f"{format_seconds(off.low)} and {format_seconds(off.high)}."
    )
    late = off.stall
    if late is None or late.low is None or late.high is None:
        return said
    return (
        f"{said} Of more such runs {off.stalled:.0%} stalled, each message between stages held up: then between "
        f"{format_seconds(late.low)} and {format_seconds(late.high)}."
    )


def _of_ties(answer: Answer) -> str:
    """Which plans tie, why, and which of them stands first."""
    number, first = len(answer.tied), answer.tied[0].plan
    others = [found for found in answer.tied if found is not answer.best]
    held = {answer.best.interval.high is not None and found.interval.low is not None for found in others}
    close = f"no time is known to {TIE:.0%}"
    why = {
        (True,): "since the intervals of their times overlap",
        (False,): f"since {close}",
        (False, True): f"since the intervals of their times overlap, or, where there is none, {close}",
    }[tuple(sorted(held))]
    some = {found.interval.is_held for found in answer.tied} == {True, False}
    whom = "those whose time runs hold" if some else "them"
    return f"The first {number} are a tie (≈), {why}; the simplest of {whom} stands first: {_degrees(first)}."


def _degrees(p: Plan) -> str:
    """What tells two plans apart at a glance."""
    return (
        f"dp {p.dp}, tp {p.tp}{_split(p)}, pp {p.pp}, cp {p.cp}, {f'ep {p.ep}, ' if p.ep > 1 else ''}ZeRO {_zero(p)}"
        + (f", {p.schedule}" if p.pp > 1 else "")
    )


def _and(words: Sequence[str]) -> str:
    *most, last = words
    return " and ".join([", ".join(most), last] if most else [last])


def of_goal(answer: Answer, goals: Sequence[Goal]) -> list[str]:
    """What the batch means for a goal, and the days to it; `goals` in the order in which plans are shown."""
    first, share = goals[0], goals[0].batch_share
    cards = f"beyond {_number(first.most_cards, 'card', 's')} of" if first.most_cards else "even with one rank of dp in"
    said = [
        f"A step of {answer.tokens:,} tokens is {share:.3g} of the critical batch: a goal takes {1 + share:.3g} times "
        f"its least tokens and {1 + 1 / share:.3g} times its least steps. Twice the cards with as much for each would "
        f"take {(1 + 2 * share) / (2 + 2 * share):.0%} of these steps and {(1 + 2 * share) / (1 + share):.0%} of these "
        f"tokens; {cards} the first plan a goal takes over twice its least tokens."
    ]
    if first.tokens is not None:
        days = ", ".join(_days(each.seconds) for each in goals)
        said.append(
            f"The goal takes {first.tokens:.3g} tokens, {'days by plan' if len(goals) > 1 else 'days'}: {days}. "
            f"However many cards join the first plan, it takes more than {_days(first.least_seconds)} days."
        )
    return said


def of_keeping(answer: Answer, found: Keeping) -> str:
    """How large the first plan's saves are, how often it makes them, and what failures leave of its time."""
    work = found.steps * answer.best.time.total
    return (
        f"The job fails each {found.mtbf / 3600:,.1f} hours. A save is {format_bytes(found.save_bytes, digits=3)} and "
        f"takes {found.save_seconds:,.1f} s; with one after every {_steps(found.steps)} "
        f"({work / 60:,.1f} minutes) {_share(found.goodput)} of the time is lasting work, if a failure is noticed and "
        f"a node replaced at once. Written in the background after every {_steps(found.behind_steps)}, "
        f"it is {_share(found.behind_goodput)}, less what copies stop the run for."
    )


def _share(part: float) -> str:
    """A part that is neither none nor all in per cent, rounded to neither."""
    return "less than 0.1%" if part < 0.0005 else "more than 99.9%" if part >= 0.9995 else f"{part:.1%}"


def _steps(number: int) -> str:
    return "step" if number == 1 else _number(number, "step", "s")


def of_refit(found: Refit) -> str:
    """What runs of one's own changed, and how well the constants tell them now."""
    runs = _number(found.runs, "run", "s")
    if not found.moved:
        few = f": {FEWEST} at least are wanted" if found.runs < FEWEST else ""
        decide = f"{runs} decide{'s' * (found.runs == 1)} no constant{few}."
        return f"{decide} The mean error of their step times is {found.before:.1%}."
    moved = ", ".join(f"{name} {old:.3g} → {new:.3g}" for name, (old, new) in found.moved.items())
    return (
        f"{runs} change the mean error of their step times from {found.before:.1%} to {found.after:.1%}, and of those "
        f"not fitted on, a quarter at a time, to {found.left_out:.1%}: {moved}. They do not decide "
        f"{', '.join(found.kept) or 'no other constant'}: {'these stay' if found.kept else 'none stays'}."
    )


def _days(seconds: float | None) -> str:
    return f"{(seconds or 0.0) / 86400:,.1f}"


def _of_experts(answer: Answer) -> str:
    """What the seconds of experts rest on."""
    load = max(found.plan.imbalance for found in answer.plans)
    even = "as many tokens as the others" if load == 1 else f"up to {load:g} times the mean of tokens"
    said = f"The busiest rank of experts is taken to get {even}"
    if any(found.plan.ep > 1 for found in answer.plans):
        said += "; nothing hides the exchange of tokens"
    if answer.constants != profile(answer.framework):
        return f"{said}."
    return f"{said}; no constant of these times was fitted to a run of a model with experts."


def _after_matmuls(found: Found) -> str:
    """What takes the most time after the products of matrices, and its part of what they leave."""
    name, rest = found.bottleneck, found.time.total - found.time.matmuls
    share = found.time.parts[name] / rest
    return f"The largest term beside the products of matrices is {name.replace('_', ' ')}, {share:.0%} of the rest."


_VERDICTS = {
    "yes": "it fits with the margin added",
    "no": "it does not fit even with the margin taken off",
    "unsure": "the margin decides, so only a try can tell",
    "unknown": "whether it fits is unknown",
}


def _verdict(fitted: Fit) -> str:
    """Whether it fits, and where it is far from that, how far."""
    card = fitted.usable_bytes
    if fitted.states_bytes > card:
        return f"it does not fit, its states alone are {fitted.states_bytes / card:,.1f} times the card"
    said = "it does not fit" if fitted.needed_bytes > SURELY * card else _VERDICTS[fitted.verdict]
    far = f", the count is {fitted.needed_bytes / card:,.1f} times the card"
    return said + far * (fitted.free_bytes < -card)


def margin(
    memory: PlanMemory, plan: Plan, model: Architecture, fitted: Fit | None, constants: Constants = FITTED
) -> str:
    """What a rank needs by the planner, and where its margin is from; with `fitted` whether it fits a card."""
    verdict = "" if fitted is None else f": {_verdict(fitted)}"
    return (
        f"With what the runtime and libraries take, the planner expects "
        f"{_need(plan, memory, fitted, constants)}{verdict}. "
        f"{_seen(plan, outside(plan, model) if fitted is None else fitted.outside, 'This one', constants)}"
    )


def _seen(plan: Plan, unseen: tuple[str, ...], what: str, constants: Constants = FITTED) -> str:
    """What the margin was seen on, and what of a plan none of these runs had."""
    like = regime(plan)
    said = (
        f"The margin, {margin_of(plan, constants):.0%}, is the error that nine of ten stay within of {like.rows} "
        f"{SEEN}, {like.name}"
    )
    if not unseen:
        return f"{said}."
    return f"{said}. {what} has {_and(unseen)}: its error is unknown."


def _need(plan: Plan, memory: PlanMemory, fitted: Fit | None, constants: Constants = FITTED) -> str:
    """The bytes with their margin, and those of a card."""
    off = margin_of(plan, constants) * memory.total if fitted is None else fitted.margin_bytes
    said = f"{format_bytes(memory.total, digits=3)} ± {format_bytes(off, digits=3)}"
    return said if fitted is None else f"{said} of {format_bytes(fitted.usable_bytes, digits=3)}"


def _number(count: int, thing: str, ending: str) -> str:
    return f"{count:,} {thing}{ending if count > 1 else ''}"


def _split(p: Plan) -> str:
    return ("+sp*" if p.keep_gathered else "+sp") if p.sequence_parallel else ""


def schedule(p: Plan) -> str:
    """The order of a pipeline, or its chunks; a dash where there is none."""
    if p.pp == 1:
        return "–"
    return f"{p.chunks} chunks" if p.chunks > 1 else p.schedule


def _again(p: Plan) -> str:
    if p.recompute_layers is None:
        return {"none": "nothing", "selective": "each core of attention", "full": "each layer"}[p.recompute]
    return f"the first {recompute_of(p)} of each {'chunk' if p.chunks > 1 else 'stage'}"


def _zero(p: Plan) -> str:
    return f"{p.zero}/{p.shard}" if p.shard else str(p.zero)
