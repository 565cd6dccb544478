"""tp.6: a cross-entropy from slices of the logits."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import ROOM, Ranges, held_at, keeps, order, own_work, sends, shows, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Theory, Wrong, every, only_if, some_rank

TOLERANCE = 2e-4  # of float32, on numbers up to 1000 of which differences are taken
NUMBERS = 3  # a token: the largest logit, the sum of exponentials, the target's logit


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Slices that are equal and not, of a single word too, of two ranks and more; logits around zero and around numbers
    up to 1000; targets at both edges of each slice and anywhere, and all on one rank; a case to be weighed."""
    cases: inputs.Cases = []
    for n, is_equal, largest, where in (
        (2, True, 0.0, "anywhere"), (3, False, 1000.0, "anywhere"), (2, False, 0.0, "on one rank"),
        (2, False, 1000.0, "anywhere"),
        (4, True, 1000.0, "on one rank"), (3, True, 0.0, "anywhere"), (4, False, 5.0, "anywhere"),
    ):  # fmt: skip
        own = int(rng.integers(12, 30))
        words = [own] * n if is_equal else [int(each) for each in own + rng.permutation(n) * 5]
        if n == 4 and not is_equal:
            words[int(rng.integers(n))] = 1
        cases.append(case(rng, int(rng.integers(300, 500)), words, largest, where))
    return [*cases, case(rng, 1024, [4096] * 4, 0.0, "anywhere", weighed=True)]


def case(
    rng: inputs.Rng, tokens: int, words: list[int], largest: float, where: str, *, weighed: bool = False
) -> dict[str, Any]:
    n, ends = len(words), list(accumulate(words))
    edges = [each for end, size in zip(ends, words, strict=True) for each in (end - size, end - 1)]
    targets = [*edges, *rng.integers(0, ends[-1], tokens - len(edges))]
    if where == "on one rank":
        owner = int(rng.integers(n)) if len(set(words)) == 1 else n - 1  # for rank 0 every offset is right
        targets = list(ends[owner] - 1 - rng.integers(0, words[owner], tokens))
    told = f"{n} ranks with {', '.join(map(str, words))} words, logits up to {largest + 4:g}, targets {where}"
    properties = {"two ranks": n == 2, "equal slices": len(set(words)) == 1}
    drawn = {"world_size": n, "tokens": tokens, "words_of": words, "targets": [int(each) for each in targets]}
    drawn |= {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
    return drawn | {"largest": largest, "weighed": weighed, "words": told, "is": properties}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    seed = int(np.random.default_rng([case["seed"], rank]).integers(2**62))
    own = {"own_seed": seed, "words": case["words_of"][rank]}
    common = {name: case[name] for name in ("tokens", "weights_seed", "largest")}
    told = {"targets": np.array(case["targets"]), "first": sum(case["words_of"][:rank])}
    return [("start", {**own, **common, **told, "positions": places(case, rank)}), ("between", upstream(case))]


def upstream(case: Case) -> Any:
    """The gradient that comes back to each token."""
    return inputs.noise({**case, "weights_seed": case["seed"]}, "upstream", (case["tokens"],)) + np.float32(1.5)


def places(case: Case, rank: int) -> Any:
    """The elements of the gradient that are asked for: all, or of many a few, the targets of the first tokens too."""
    if not case["weighed"]:
        return np.arange(case["tokens"] * case["words_of"][rank])
    first, size = sum(case["words_of"][:rank]), case["words_of"][rank]
    mine = [row * size + each - first for row, each in enumerate(case["targets"]) if first <= each < first + size]
    return np.concatenate([mine[:50], np.random.default_rng(case["seed"]).integers(0, case["tokens"] * size, 500)])


class Slice(NamedTuple):
    """A rank's logits: the largest of each token, the sum of exponentials beside it, whether the target is among them,
    its place or the nearest that there is, the logits there and of the first word; then, where elements of the gradient
    are asked for, the logit, its token, and its place."""

    largest: Any
    total: Any
    here: Any
    local: Any
    target: Any
    first: Any
    logit: Any
    row: Any
    column: Any


class Whole(NamedTuple):
    """Of each token the largest logit of all words, the sum of exponentials beside it, and the target's logit; and the
    slices."""

    largest: Any
    total: Any
    target: Any
    slices: list[Slice]


@oracle.remembered
def known(case: Case) -> Whole:
    """From the ranks' logits, in double precision where they are added."""
    found = []
    for rank in range(case["world_size"]):
        ((_, given), *_) = handed_out(case, rank)
        logits, tokens = inputs.logits(given), np.arange(case["tokens"])
        largest, local = logits.max(1).astype(float), given["targets"] - given["first"]
        here, nearest = (local >= 0) & (local < given["words"]), local.clip(0, given["words"] - 1)
        row, column = np.divmod(places(case, rank), given["words"])
        total = np.exp(logits - largest[:, None]).sum(1)
        target, start, logit = (logits[at].astype(float) for at in ((tokens, nearest), (tokens, 0), (row, column)))
        found.append(Slice(largest, total, here, nearest, target, start, logit, row, column))
    largest = np.max([each.largest for each in found], 0)
    total = sum(each.total * np.exp(each.largest - largest) for each in found)
    return Whole(largest, total, sum(np.where(each.here, each.target, 0) for each in found), found)


def losses(formula: Callable[[Whole, Slice], Any]) -> Theory:
    """What the formula gives for the whole and each rank's own slice."""

    def theory(case: Case) -> list[Any]:
        whole = known(case)
        return [formula(whole, own) for own in whole.slices]

    return theory


def gradients(
    formula: Callable[[Any, Any, Any], Any] = lambda p, one, back: (p - one) * back,
    *, own: bool = False, masked: bool = True, nearest: bool = True, times: Callable[[Case], float] = lambda case: 1.0,
) -> Theory:  # fmt: skip
    """``formula(softmax, 1 at the target, what comes back)`` of the rank's words, so many times: softmax of its `own`
    words or of all, the target if the rank has it, or not `masked` at the `nearest` place or the first."""

    def theory(case: Case) -> list[Any]:
        whole, back, found = known(case), upstream(case).astype(float), []
        for each in whole.slices:
            over = each if own else whole
            softmax = np.exp(each.logit - over.largest[each.row]) / over.total[each.row]
            local = each.local if nearest else each.local * each.here
            one = (each.column == local[each.row]) & (each.here[each.row] | (not masked))
            found.append(times(case) * formula(softmax, one, back[each.row]))
        return found

    return theory


def needed(case: Case) -> float:
    return 2.0 * (case["world_size"] - 1) * NUMBERS * oracle.FLOAT_BYTES * case["tokens"]


def tensors(number: float, room: float = ROOM) -> Callable[[Case, int], float]:
    """The bytes of so many tensors as large as a rank's logits."""
    return lambda case, rank: number * oracle.FLOAT_BYTES * case["tokens"] * case["words_of"][rank] + room


def infinite(of: str) -> Any:
    """Numbers that are not finite, of logits whose exponentials are not."""
    odd: Any = lambda found: isinstance(found, np.ndarray) and not np.isfinite(found).all()  # noqa: E731
    return some_rank(lambda said, case: case["largest"] > 80 and odd(said[of]))


def brought(
    w: Whole, here: Callable[[Slice], Any] = lambda one: one.here, own: Callable[[Slice], Any] | None = None,
    absent: Callable[[Slice], Any] = lambda one: 0,
) -> Any:  # fmt: skip
    """What the ranks bring, added: the target's logit, less the largest of all or their `own`, where it is `here`;
    something else where it is `absent`."""
    return sum(np.where(here(one), one.target - (own(one) if own else w.largest), absent(one)) for one in w.slices)


def find_logits(each: Observed) -> Finding | None:
    """That logits travelled, of which there are many times as many as numbers that have to."""
    seen, wanted = each.seen.total_bytes, needed(each.case)
    return Finding(f"{show_bytes(seen)} sent in all", show_bytes(wanted), each.words) if seen > 3 * wanted else None


LOSSES: Wrong = {
    "too large for a number": infinite("losses"),
    "own words only": losses(lambda w, own: own.largest + np.log(own.total) - own.target),
    "sums not added": losses(lambda w, own: own.largest + np.log(own.total) - w.target),
    "each rank its own largest": losses(
        lambda w, own: np.log(sum(one.total for one in w.slices)) - brought(w, own=lambda one: one.largest)
    ),
    "only one rank knows the target": losses(lambda w, own: np.log(w.total) - own.here * (own.target - w.largest)),
    "a word of each rank": (
        losses(lambda w, own: np.log(w.total) - brought(w, lambda one: True)),
        losses(lambda w, own: np.log(w.total) - brought(w, absent=lambda one: one.first - w.largest)),
    ),
    "largest logit lost": losses(lambda w, own: np.log(w.total) - w.target),
    "first word of a slice lost": losses(
        lambda w, own: np.log(w.total) - brought(w, lambda one: one.here * one.local > 0)
    ),
    "largest subtracted by each rank": losses(lambda w, own: np.log(w.total) - w.target + len(w.slices) * w.largest),
    "zero for an absent target": losses(
        lambda w, own: w.largest + np.log(w.total) - np.max([np.where(one.here, one.target, 0) for one in w.slices], 0)
    ),
    "means for sums": losses(lambda w, own: np.log(w.total / len(w.slices)) - brought(w) / len(w.slices)),
    "right for equal slices only": only_if("equal slices"),
}
GRADIENT: Wrong = {
    "too large for a number": infinite("gradient"),
    "target forgotten": gradients(lambda p, one, back: p * back),
    "what comes back is ignored": gradients(lambda p, one, back: p - one),
    "softmax of the own words": gradients(own=True),
    "one subtracted on each rank": (gradients(masked=False), gradients(masked=False, nearest=False)),
    "as often as there are ranks": gradients(times=lambda case: case["world_size"]),
    "divided by the tokens": gradients(times=lambda case: 1 / case["tokens"]),
    "no gradient": some_rank(lambda said, case: said["gradient"] is None),
    "right for equal slices only": only_if("equal slices"),
}
TRAFFIC: Wrong = {
    "logits gathered": every(lambda each: each.seen.total_bytes > 3 * needed(each.case)),
    "numbers gathered": lambda case: case["world_size"] / 2 * needed(case),
    "a number too many": lambda case: (NUMBERS + 1) / NUMBERS * needed(case),
    "twice as wide": lambda case: 2 * needed(case),
    "nothing sent": every(lambda each: not each.seen.total_bytes),
}
KEPT: Ranges = {"one tensor too many": (tensors(2), tensors(3)), "room for all words": (tensors(3), None)}
right = partial(values, rtol=TOLERANCE, atol=TOLERANCE, least_sent=lambda case: needed(case) / 4)

EXERCISE = Exercise(
    id="tp.6", function="split_cross_entropy", title="A loss whose logits nobody has", harness="tp.loss", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("split_cross_entropy", built_in=True),
        order(0, "split", "no logit leaves its rank", find_logits, gate=True, kind="traffic",
              wrong={"logits gathered": every(lambda each: True)}),
        right(3, "losses", "the loss of each token, on every rank", of="losses", wrong=LOSSES,
              right=losses(lambda w, own: w.largest + np.log(w.total) - w.target)),
        right(2, "gradient", "the gradient of each rank's logits", gradients(), of="gradient", wrong=GRADIENT,
              kind="gradient"),
        sends(2, "traffic", "three numbers a token travel, and no logits", needed, wrong=TRAFFIC),
        keeps(1, "kept", "one tensor as large as the logits is kept for the way back", held_at("between"), tensors(2),
              "held between forward and backward, the logits among them", wrong=KEPT, early=shows("between", "losses")),
    ),
)  # fmt: skip
