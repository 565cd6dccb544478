"""Constants of one's own: a table of runs that somebody measured moves those that the runs decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dtlib.theory import models
from dtlib.theory.lookup import find
from dtlib.theory.models import Architecture, active_parameters, model_parameters
from dtlib.theory.timing import FITTED, Constants, Machine, Plan
from dtlib.theory.timing.space import PLAIN, SPLITS
from dtlib.theory.valid import number

from .fitting import PULL, TIME_CONSTANTS, fitted
from .published import Row
from .run import Run, mean_error

FEWEST = 4
"""Fewer runs move no constant."""

_FOLDS, _STEP = 4, 1e-3

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "gpus": "cards of the run",
        "mbs": "sequences of a micro-batch",
        "grad_acc": "micro-batches of a rank in a step",
        "tok_s_gpu": "tokens a second of one card, as measured",
        "model": "a published model [the one that is planned]",
        "seq": "tokens of a sequence [the model's]",
        "tp": "[1]",
        "pp": "[1]",
        "cp": "[1]",
        "ep": "[1]",
        "zero": "[0]",
        "chunks": "[1]",
        "shard": "ranks that share the states [all]",
        "recompute": "none, selective or full [none]",
        "recompute_layers": "of each piece of a stage, with full [all]",
        "sequence_parallel": "none, again or keep [none]",
    }
)
"""The columns of a table of runs; those with a default in brackets may be absent, and their fields empty."""


@dataclass(frozen=True)
class Refit:
    """What so many `runs` made of constants.

    `before` and `after` are the mean errors of their step times, and `left_out` the one of runs that were not among
    those fitted on, a quarter at a time. `moved` has for each constant that they decide its value before and now;
    `kept` those that they do not, which stay.
    """

    constants: Constants
    runs: int
    before: float
    after: float
    left_out: float
    moved: Mapping[str, tuple[float, float]]
    kept: tuple[str, ...]


def read(
    rows: Iterable[Row], model: Architecture, machine: Machine, recipe: str = "18-byte", *, node: int | None = None,
    as_plan: Plan = PLAIN,
) -> list[Run]:  # fmt: skip
    """The runs that `rows` of `COLUMNS` describe, on cards and a network as those of `machine`, and nodes of `node`.

    By default on nodes as those of `machine`, which has no more cards in one than in all. dp is what the cards leave;
    what no column names is that of `as_plan`.
    ``ValueError`` for a column that is missing or unknown, and for a row that is no run, with its number: the first
    below the heading is 1.
    """
    found, like = [], (machine, machine.node if node is None else node, as_plan.changed(recipe=recipe))
    for place, row in enumerate(map(_plain, rows), 1):
        unknown = [name for name in row if name not in COLUMNS]
        lacks = [name for name, meaning in COLUMNS.items() if "[" not in meaning and name not in row]
        if None in row:
            raise ValueError(f"row {place} has more fields than the heading")
        if unknown:
            raise ValueError(f"column {unknown[0]!r} is unknown; there are {', '.join(COLUMNS)}")
        if lacks:
            raise ValueError(f"column {lacks[0]!r} is missing: {COLUMNS[lacks[0]]}")
        try:
            found.append(_run({name: (value or "").strip() for name, value in row.items()}, like, model))
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from error
    return found


def _plain(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """`row` with names of columns as `COLUMNS` has them, however they are written, each once."""
    once(row)
    return {name and name.strip().lower(): value for name, value in row.items()}


def once(heading: Iterable[Any]) -> None:
    """``ValueError`` where two columns have one name."""
    names = [name and name.strip().lower() for name in heading]
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"column {name!r} must be there once, not {names.count(name)} times")


def _run(row: Row, like: tuple[Machine, int, Plan], model: Architecture) -> Run:
    def count(name: str, default: int | None) -> int:
        text = row.get(name, "")
        if not text and default is not None:
            return default
        if not text.isdecimal():
            raise ValueError(f"{name} must be a whole number, not {text!r}")
        if len(text) > 9:
            raise ValueError(f"{name} must have at most 9 digits, not {len(text)}")
        return int(text)

    if row.get("model"):
        model = models.model(row["model"])
    gpus, b, m, v = count("gpus", None), count("mbs", None), count("grad_acc", None), count("chunks", 1)
    degrees: dict[str, Any] = {name: count(name, 1) for name in ("tp", "pp", "cp", "ep")}
    ranks = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if ranks == 0 or gpus % ranks:
        raise ValueError(f"gpus must be a multiple of tp·pp·cp={ranks}, not {gpus}")
    splits, keeps = find("sequence_parallel", row.get("sequence_parallel") or "none", SPLITS)
    plan = like[2].changed(
        dp=gpus // ranks, **degrees, zero=count("zero", 0), micro_batch=b, micro_batches=m, chunks=v,
        schedule="interleaved" if v > 1 else "1F1B", recompute=row.get("recompute") or "none",
        sequence_parallel=splits, keep_gathered=keeps, seq=count("seq", model.seq), shard=count("shard", 0) or None,
        recompute_layers=count("recompute_layers", 0) or None,
    )  # fmt: skip
    plan.check(model)
    try:
        rate = number("tok_s_gpu", float(row["tok_s_gpu"]), positive=True)
    except ValueError as error:
        raise ValueError(f"tok_s_gpu must be finite and positive, not {row['tok_s_gpu']!r}") from error
    card, of = like[0].accelerator, model_parameters(model)
    products = active_parameters(model).total - of.total + of.without_input_embedding
    flop_per_s = card.half_flop_per_s if plan.precision == "bf16" else card.fp8_flop_per_s or 0
    most = flop_per_s / (2 * plan.passes * products)
    if 0 < most < rate:
        raise ValueError(f"tok_s_gpu must be at most {most:,.0f}, with products at the card's full rate, not {rate:g}")
    seconds = plan.sequences * plan.seq_of(model) / gpus / rate
    return Run(model, (plan,), replace(like[0], gpus=gpus, node=like[1]), seconds)


def refitted(runs: Sequence[Run], start: Constants = FITTED, names: Sequence[str] = TIME_CONSTANTS) -> Refit:
    """The constants called `names` that `runs` decide, fitted to them from `start`; the others stay as they are.

    Each run counts as a table of its own (`fitting.fitted`), so many of them outweigh the start. A constant is decided
    where the runs say more about it than its start does, whatever the others are: where they take away at least half of
    the variance that `fitting.PULL` leaves it. Fewer than `FEWEST` runs move nothing. ``ValueError`` for none.
    """
    if not runs:
        raise ValueError("runs must be at least one, not none")
    decided = _decided(runs, start, names) if len(runs) >= FEWEST else ()

    def fit(some: Sequence[Run], rounds: int) -> Constants:
        tables = {str(place): [run] for place, run in enumerate(some)}
        return fitted(tables, start, names=decided, rounds=rounds) if decided else start

    k, errors = fit(runs, 6), []  # a few rounds are enough: more move the last digits
    for fold in range(_FOLDS):
        others = [run for place, run in enumerate(runs) if place % _FOLDS != fold]
        left = runs[fold::_FOLDS]
        errors += [mean_error(left, fit(others, 4))] * len(left) if left else []
    moved = {name: (getattr(start, name), getattr(k, name)) for name in decided}
    kept = tuple(name for name in names if name not in decided)
    return Refit(k, len(runs), mean_error(runs, start), mean_error(runs, k), float(np.mean(errors)), moved, kept)


def _decided(runs: Sequence[Run], start: Constants, names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` of which `runs` take away half of the variance that the pull to `start` leaves."""
    here = np.array([run.log_error(start) for run in runs])

    def slope(name: str) -> Any:
        moved = replace(start, **{name: getattr(start, name) * np.exp(-_STEP)})
        return (here - [run.log_error(moved) for run in runs]) / _STEP

    slopes = np.stack([slope(name) for name in names], axis=1)
    left = PULL**2 * np.diag(np.linalg.inv(slopes.T @ slopes + PULL**2 * np.eye(len(names))))
    return tuple(name for name, share in zip(names, left, strict=True) if share <= 0.5)
