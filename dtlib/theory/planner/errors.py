"""How far a step time is to be believed: its error on runs like it, each with constants that had not seen it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dtlib.theory.models import Architecture, checked_model, model_parameters
from dtlib.theory.timing import Constants, Machine, Plan, profile, step_time

INSIDE = 0.8
"""The share of left-out runs that an interval holds: a tenth lies below, a tenth above."""

FEWEST = 4
"""With fewer runs in a regime no interval is told."""

_DATA = Path(__file__).parent / "errors.json"


@dataclass(frozen=True)
class Interval:
    """`low` and `high` seconds that `INSIDE` of the `runs` of one `regime` stay between; None, and the reason in
    `unlike`, for a plan that the planner was not held to anything like. A share `stalled` of such runs is not among
    them: each message between their stages was held up, and they took from `low` to `high` of `stall`."""

    regime: str
    runs: int
    low: float | None = None
    high: float | None = None
    unlike: tuple[str, ...] = ()
    stalled: float = 0.0
    stall: Interval | None = None

    @property
    def is_held(self) -> bool:
        """Whether any runs hold the time."""
        return self.low is not None


def regime(plan: Plan, model: Architecture, framework: str = "megatron", *, stalled: bool = False) -> str:
    """What a plan shares with runs whose error may be its own; `stalled` where it waits on fewer cards than all do."""
    k = profile(framework)
    axes = [
        framework,
        "a pipeline" if plan.pp > 1 else "no pipeline",
        *(["tp over 8"] if plan.tp > 8 else []),
        *(["stalled"] if stalled or k.stalls(plan) else []),
        *(["cp"] if plan.cp > 1 else []),
        *(["experts"] if model.experts is not None else []),
        *(["sharded weights"] if plan.zero > 1 and plan.dp * plan.cp > 1 else []),
        *(["offload"] if plan.offload else []),
        *(["adapters"] if plan.adapters else []),
        *([plan.precision] if plan.precision != "bf16" else []),
        *(["some layers computed again"] if plan.recompute_layers is not None else []),
        *(["hybrid shards"] if plan.shard is not None else []),
    ]
    return ", ".join(axes)


def interval(plan: Plan, model: Architecture | str, machine: Machine, framework: str = "megatron") -> Interval:
    """The seconds between which `INSIDE` of the runs of the plan's regime would lie, left out of the fit.

    None where fewer than `FEWEST` such runs are known, or the job has another schedule or card, messages of tp behind
    products or attention as a matrix, which fewer than `FEWEST` of them had, twice their cards, parameters or tokens a
    sequence, or half their parameters or tokens. ``ValueError`` for an unknown framework or what `step_time` refuses.
    """
    model, constants = checked_model(model), profile(framework)
    usual = _interval(plan, model, machine, framework, constants, stalled=False)
    share = known()[usual.regime]["stalled"] if usual.low is not None else 0
    if not share or machine.gpus <= machine.node:
        return usual
    everywhere = replace(constants, stall_cards=0)
    return replace(usual, stalled=share, stall=_interval(plan, model, machine, framework, everywhere, stalled=True))


def _interval(
    plan: Plan, model: Architecture, machine: Machine, framework: str, constants: Constants, *, stalled: bool
) -> Interval:
    name = regime(plan, model, framework, stalled=stalled)
    of = known().get(name)
    if of is None or of["runs"] < FEWEST:
        return Interval(name, 0 if of is None else of["runs"], unlike=(name,))
    size, seq = model_parameters(model).total, plan.seq_of(model)
    unlike = {
        "another schedule": plan.pp > 1 and plan.schedule not in of["schedules"],
        "another card": machine.accelerator.name not in of["cards"],
        "messages of tp behind products": plan.tp_overlap and plan.tp > 1 and of["tp_overlap"] < FEWEST,
        "attention as a matrix": plan.attention == "matrix" and of["matrix"] < FEWEST,
        "more cards": machine.gpus > 2 * of["gpus"][1],
        "a model of another size": not of["parameters"][0] / 2 <= size <= 2 * of["parameters"][1],
        "sequences of another length": not of["seq"][0] / 2 <= seq <= 2 * of["seq"][1],
    }
    if any(unlike.values()):
        return Interval(name, of["runs"], unlike=tuple(each for each, is_so in unlike.items() if is_so))
    seconds = step_time(model, plan, machine, constants).total
    return Interval(name, of["runs"], seconds * of["low"], seconds * of["high"])


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Of each regime: how many runs, the quantiles `low` and `high` of measured over planned seconds, the `median` and
    `mean` of the error's size, and what the runs had. `calibration.folds.measured` computes them."""
    return MappingProxyType(json.loads(_DATA.read_text("utf-8")))
