"""casebook.1: what is wrong with a run, by losses, norms and checksums of its ranks; on paper."""

from math import log
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, COPIES, SLICES = "nothing wrong", "copies counted", "slices left out"
WHOLE, SUM, TWICE = "whole logits", "sum for mean", "mean twice"
SAME, APART, MASKS, START, ALONE = "same samples", "samples apart", "same masks", "no broadcast", "not reduced"

#: What is wrong, replicas, ranks of a replica, and whether there is dropout.
KINDS = (
    (NOTHING, 2, 1, False), (NOTHING, 1, 4, True), (NOTHING, 4, 2, True), (NOTHING, 2, 3, False), (NOTHING, 1, 1, True),
    (COPIES, 2, 2, False), (COPIES, 1, 4, True), (COPIES, 3, 2, True),
    (SLICES, 1, 2, False), (SLICES, 2, 4, True), (SLICES, 3, 2, False),
    (WHOLE, 2, 2, False), (WHOLE, 1, 4, True), (WHOLE, 2, 3, True),
    (SUM, 2, 1, False), (SUM, 3, 2, True), (SUM, 4, 1, True),
    (TWICE, 2, 2, True), (TWICE, 3, 1, False), (TWICE, 4, 2, False),
    (SAME, 2, 1, False), (SAME, 4, 2, True), (SAME, 3, 1, True),
    (APART, 1, 2, False), (APART, 2, 2, True), (APART, 2, 4, False),
    (MASKS, 2, 1, True), (MASKS, 3, 2, True), (MASKS, 4, 1, True),
    (START, 2, 1, False), (START, 3, 2, True), (START, 4, 1, False),
    (ALONE, 2, 1, True), (ALONE, 3, 2, False), (ALONE, 4, 1, True),
)  # fmt: skip


def case(rng: Rng, number: int, kind: str, d: int, t: int, dropout: bool) -> dict[str, Any]:
    run = evidence(rng, kind, d, t, dropout)
    return call(f"run {number}: {in_words(run)}", [run]) | {"wrong": kind}


def evidence(rng: Rng, kind: str, d: int, t: int, dropout: bool) -> dict[str, Any]:
    """What a colleague sends: by rank, replica after replica, rounded as numbers of real runs are."""

    def checksums(replicas: int) -> Array:
        drawn = rng.choice(10**6, replicas, replace=False)
        return np.repeat(drawn[:, None], t, axis=1) if replicas == d else np.full((d, t), drawn[0])

    def alike(sums: Array) -> None:  # the last replica has what the one before it has, of four the one two before it
        sums[-1] = sums[-2 - (d == 4)]

    samples, masks = checksums(d), checksums(d) if dropout else np.zeros((d, t), int)
    start, after = checksums(1), checksums(1)
    own = np.repeat(rng.uniform(1.5, 3.5, d)[:, None], t, axis=1)
    one, shares = float(own.mean()), rng.permutation(np.linspace(0.6, 1.4, t)) / t
    copies, split = rng.uniform(0.5, 2), rng.uniform(2, 9)
    squares = np.full((d, t), copies + split)
    if kind == COPIES:
        squares += (t - 1) * copies
    elif kind == SLICES:
        squares = np.tile(copies + split * shares, (d, 1))
    elif kind in (SUM, TWICE):
        squares *= float(d) ** (2 if kind == SUM else -2)
    elif kind == WHOLE:
        own = own + log(t)
    elif kind == SAME:
        alike(samples)
        own[-1] = own[-2 - (d == 4)]
        squares *= rng.uniform(1.05, 1.3)
    elif kind == MASKS:
        alike(masks)
        squares *= rng.uniform(1.01, 1.1)
    elif kind == APART:
        samples[-1, t // 2] += 1
        squares *= rng.uniform(0.8, 0.95)
    elif kind == START:
        start[d // 2, -1] += 1
        after[d // 2, -1] += 1
        squares *= rng.uniform(1.05, 1.2)
    elif kind == ALONE:
        after += np.arange(d)[:, None] * int(rng.integers(1, 99))
        squares *= rng.uniform(1.1, 2, d)[:, None]
    noise = 1 + rng.uniform(-1e-5, 1e-5, d)[:, None]
    rows = {"samples": samples, "masks": masks, "start": start, "after": after}
    rows |= {"losses": own * noise, "norms": np.sqrt(squares) * noise}
    told: dict[str, Any] = {name: [float(f"{x:.6g}") if name in ("losses", "norms") else int(x) for x in each.ravel()]
            for name, each in rows.items()}  # fmt: skip
    if not dropout:
        told["masks"] = None
    one_process = {"loss": one, "copies": float(np.sqrt(copies)), "slices": float(np.sqrt(split))}
    return {"replicas": d, "ranks": t, **told, "one": one_process}


of = by("wrong")

EXERCISE = on_paper(
    "casebook.1", "name_the_mistake", "Why does this run differ?", in_any_order(KINDS, case),
    of(SAME, APART, MASKS)(2, "data", "what is wrong with samples or masks"),
    of(START, ALONE)(2, "weights", "what is wrong with copies of a weight"),
    of(COPIES, SLICES, SUM, TWICE)(3, "norms", "what is wrong with the norm"),
    of(WHOLE)(1, "loss", "what is wrong with the loss"),
    of(NOTHING)(2, "nothing", "nothing where nothing is wrong"),
)  # fmt: skip
