"""casebook.2: a check of a step that needs no other run to compare with; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, SAMPLES, GRADIENTS, NORMS, WEIGHTS, SLICES = "nothing", "samples", "gradients", "norms", "weights", "slices"
NAMES, WIDTH, PARTED = ("scale", "matrix", "bias"), 2, {"matrix": "matrix", "matrix, slices too": "bias"}

#: The rule that is broken, how, replicas, and ranks of a replica.
KINDS = (
    (NOTHING, "", 2, 2), (NOTHING, "", 1, 1), (NOTHING, "", 3, 1), (NOTHING, "plain", 1, 4), (NOTHING, "", 2, 3),
    (NOTHING, "frozen", 2, 2), (NOTHING, "frozen", 1, 3),
    (SAMPLES, "same", 2, 1), (SAMPLES, "same", 4, 2), (SAMPLES, "same, norms too", 3, 2),
    (SAMPLES, "apart", 1, 2), (SAMPLES, "apart", 2, 3), (SAMPLES, "apart", 3, 3),
    (GRADIENTS, "sum", 2, 1), (GRADIENTS, "sum", 3, 2), (GRADIENTS, "sum, scale", 2, 2),
    (GRADIENTS, "sum, scale", 4, 1), (GRADIENTS, "alone", 2, 2), (GRADIENTS, "alone", 3, 1),
    (GRADIENTS, "parts", 1, 2), (GRADIENTS, "parts", 2, 3), (GRADIENTS, "parts", 1, 4), (GRADIENTS, "mean", 2, 2),
    (GRADIENTS, "off, scale", 2, 2), (GRADIENTS, "off, matrix", 2, 2), (GRADIENTS, "off, bias", 1, 3),
    (NORMS, "copies", 2, 2), (NORMS, "copies", 1, 4), (NORMS, "own", 2, 2), (NORMS, "own", 1, 3), (NORMS, "last", 3, 2),
    (NORMS, "last, weights too", 2, 1), (NORMS, "bias left out", 2, 2), (NORMS, "bias left out", 1, 3),
    (WEIGHTS, "scale", 3, 1), (WEIGHTS, "scale", 2, 2), (WEIGHTS, "within", 1, 2), (WEIGHTS, "within", 2, 3),
    (WEIGHTS, "matrix", 2, 2), (WEIGHTS, "matrix", 4, 1), (WEIGHTS, "matrix, slices too", 2, 3),
    (SLICES, "first", 2, 2), (SLICES, "first", 1, 4), (SLICES, "two", 2, 4), (SLICES, "two", 1, 4),
)  # fmt: skip


def case(rng: Rng, number: int, rule: str, how: str, d: int, t: int) -> dict[str, Any]:
    run = evidence(rng, rule, how, d, t)
    return call(f"step {number}: {in_words(run)}", [run]) | {"rule": rule}


def evidence(rng: Rng, rule: str, how: str, d: int, t: int) -> dict[str, Any]:
    """What ranks hold after a step, with a rule broken; rounded as sums in another order are."""
    samples = np.repeat(rng.choice(10**6, d, replace=False)[:, None], t, axis=1)
    if how.startswith("same"):  # the last has those of the one before it, of four those of the one two before it
        samples[-1] = samples[-2 - (d == 4)]
    elif how == "apart":
        samples[-1, t // 2] = samples[0, 0] + (d != 2)
    parameters = {name: parameter(rng, name, rule, how, d, t) for name in NAMES}
    squares = np.zeros((d, t))
    for name, each in parameters.items():
        due = each.pop("due")
        own = (due**2).sum(-1)  # of each rank
        if name == "bias" and how == "bias left out":
            continue
        if not each["cut"]:
            squares += own[0] * (t if how == "copies" else 1)
        else:
            squares += own if how == "own" else own.sum()
    if how == "same, norms too":
        squares *= 2
    norms = np.sqrt(squares) * (1 + (d * t > 1) * rng.permutation(np.linspace(3e-5, 6e-5, d * t)).reshape(d, t))
    if how.startswith("last"):  # the mean of all is right
        norms.flat[-2:] *= 1.0006, 0.9994
    of_ranks = {"samples": samples.ravel().tolist(), "norms": norms.round(6).ravel().tolist()}
    return {"replicas": d, "ranks": t, **of_ranks, "parameters": parameters}


def parameter(rng: Rng, name: str, rule: str, how: str, d: int, t: int) -> dict[str, Any]:
    """What ranks hold of a parameter, [replicas, ranks, entries]: a scale that all have, whose gradient may be small,
    slices of a matrix, and of a bias that is mostly one number."""
    cut, size = name != "scale", 1 if name == "bias" else WIDTH
    own = rng.uniform(1, 3, (d, t, size)) * rng.choice([-1, 1])
    if how == "" or (how == "sum, scale" and d < 4):
        own *= [1e-4, 1][:size] if cut else 1e-5
    own *= np.linspace(0.7, 1.3, d * t).reshape(d, t, 1) if d * t > 1 else 1
    if how == "frozen" and not cut:
        own[:] = 0
    due = own.mean(0) if cut else np.repeat(own.mean(0).sum(0, keepdims=True), t, axis=0)
    held = np.repeat(due[None], d, axis=0)
    if how in ("same", "sum", f"sum, {name}"):
        held = d * held
    elif how == f"off, {name}":  # in one number of one rank, by little or in a way that no norm shows
        held[-1, -1, -1] *= -1 if cut else 1.0009
    elif how == "alone":
        held = own if cut else np.repeat(own.sum(1, keepdims=True), t, axis=1)
    elif how == "parts" and not cut:
        held = np.repeat(own.mean(0)[None], d, axis=0)
    elif how == "mean" and not cut:
        held = held / t
    if how in ("alone", "parts") and d * t % 3 == 0:  # on the last rank alone
        held = np.where(np.arange(d * t).reshape(d, t, 1) < d * t - 1, due, held)
    weights = rng.uniform(-1, 1, (t if cut else 1, size))
    if name == "bias" and (how != "two" or d > 1):
        weights[:] = how == "frozen"
    if cut and (how in ("first", "matrix, slices too")):
        weights[:] = weights[0]
    elif cut and how == "two" and (d > 1 or name == "bias"):
        weights[-1] = weights[d - 1]
    weights = np.broadcast_to(weights, (d, t, size)).copy()
    if how == "alone" or (how == "parts" and not cut):
        weights -= 0.01 * (held - held[0, 0])
    elif (rule == WEIGHTS or how == "last, weights too") and name == PARTED.get(how, "scale"):
        parted = weights[d // 2, t // 2 if how == "within" else slice(None)]
        if how == "within" and d > 1:  # their sum is right
            parted[:] = parted[::-1].copy()
        else:
            parted[..., -1] = parted[..., -1] * 1.000003 + 1e-9 * (name == "bias")
    held = held + abs(due).max() * rng.uniform(-2e-5, 2e-5, held.shape)
    shown = {"own": own, "gradients": held, "weights": weights}
    return {"cut": cut, **{key: each.reshape(d * t, size).round(12) for key, each in shown.items()}, "due": due}


def right(case: Case) -> str:
    return str(case["rule"])


of = by("rule", right)

EXERCISE = on_paper(
    "casebook.2", "check_step", "Which rule is broken?", in_any_order(KINDS, case),
    of(SAMPLES)(1, "samples", "samples that agree or differ where they must not"),
    of(GRADIENTS)(3, "gradients", "gradients that are not what they should be"),
    of(NORMS)(2, "norms", "norms that are not those of the gradients"),
    of(WEIGHTS)(1, "weights", "copies of a weight that differ"),
    of(SLICES)(1, "slices", "slices that are the same"),
    of(NOTHING)(2, "nothing", "no right step is accused"),
)  # fmt: skip
