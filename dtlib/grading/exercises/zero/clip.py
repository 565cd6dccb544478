"""zero.7: the norm of gradients that nobody holds in full."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.inputs import Case, Cases, Pieces, Rng, rank_values
from dtlib.grading.exercises.kinds import order, own_work, values
from dtlib.grading.exercises.seen import Observed
from dtlib.grading.exercises.signs import Theory, Wrong, every, only_if

TENSORS = 6
RTOL = 1e-4  # of a sum of squares in float32


def draw(rng: Rng) -> Cases:
    """A `max_norm` below the norm of every rank and below most numbers, above the norm of all, between these; a rank
    with empty tensors alone; small gradients, and gradients of zeros."""
    cases: Cases = []
    for n, least, most in (
        (2, 0.002, 0.005),
        (3, 1.5, 4.0),
        (4, 0.1, 0.4),
        (3, 0.85, 0.95),
        *[(n, 0.1, 0.4) for n in (3, 3, 2)],
    ):
        sizes = [[*(int(each) for each in rng.integers(2000, 9000, TENSORS - 2)), 0, 1]] * n
        is_empty, scale = len(cases) == 4, (1.0, 2.0**-30, 0.0)[max(0, len(cases) - 4)]
        case: dict[str, Any] = {"world_size": n, "seed": int(rng.integers(2**31)), "scale": scale}
        case["sizes"] = [[0] * TENSORS, *sizes[1:]] if is_empty else sizes
        share = float(rng.uniform(least, most))
        case["max_norm"] = float(f"{share * norm(case):.4g}") if scale else 1.0
        special = ", those of rank 0 empty" if is_empty else "" if scale == 1 else f", numbers around {100 * scale:.0e}"
        told = f"max_norm {share:.2g} times the norm" if scale else "all zeros"
        case["words"] = f"{n} ranks, {TENSORS} tensors{special if scale else ''}, {told}"
        case["is"] = {"two ranks": n == 2, "clips": most < 1 and scale > 0, "far": not 0.8 < least < 1}
        case["is"] |= {"all have some": not is_empty, "large": scale in (0, 1), "not zero": scale > 0}
        cases.append(case)
    return cases


def shards(case: Case, rank: int) -> list[Any]:
    sizes = case["sizes"][rank]
    whole = rank_values({"seed": case["seed"], "num_elements": sum(sizes)}, rank)
    return [part * np.float32(case["scale"]) for part in np.split(whole, np.cumsum(sizes)[:-1])]


def handed_out(case: Case, rank: int) -> Pieces:
    return [("start", {"shards": shards(case, rank), "max_norm": case["max_norm"]})]


def of_tensors(case: Case) -> Any:
    """The norm of each tensor, a row a rank."""
    ranks = range(case["world_size"])
    return np.array([[np.linalg.norm(each.astype(np.float64)) for each in shards(case, rank)] for rank in ranks])


def of_ranks(case: Case) -> Any:
    """The norm of what each rank holds, a row a rank."""
    return np.linalg.norm(of_tensors(case), axis=1, keepdims=True)


def norm(case: Case) -> float:
    return float(np.linalg.norm(of_tensors(case)))


def told(length: Callable[[Case], Any]) -> Theory:
    return lambda case: np.broadcast_to(length(case), (case["world_size"], 1))[:, 0].tolist()


def scaled(factor: Callable[[Case], Any]) -> Theory:
    """The shards of each rank, times a number for all, for each rank or for each tensor; nothing where they are small,
    for there two theories may be the same."""

    def theory(case: Case) -> Any:
        if case["scale"] < 1:
            return None
        factors = np.broadcast_to(factor(case), (case["world_size"], TENSORS))
        return [[each * f for each, f in zip(shards(case, r), row, strict=True)] for r, row in enumerate(factors)]

    return theory


def clipped(length: Callable[[Case], Any]) -> Theory:
    """The shards of each rank where such a norm is clipped."""
    return scaled(lambda case: np.minimum(1.0, case["max_norm"] / np.maximum(length(case), 1e-9)))


def right(case: Case) -> Any:
    """What the shards of each rank should be."""
    factor = min(1.0, case["max_norm"] / (norm(case) or 1.0))
    return [[each * factor for each in shards(case, rank)] for rank in range(case["world_size"])]


def by_value(case: Case) -> Any:
    """The shards of each rank where numbers are clipped one by one."""
    if case["scale"] < 1:
        return None
    most = case["max_norm"] if case["is"]["clips"] else np.inf
    return [[np.clip(each, -most, most) for each in shards(case, rank)] for rank in range(case["world_size"])]


def as_they_were(each: Observed) -> bool:
    """Whether nothing was scaled although the norm that was found is too large."""
    found = [all(map(np.array_equal, said["shards"], shards(each.case, r))) for r, said in enumerate(each.said)]
    return all(found) and max(returned(each)) > each.case["max_norm"]


def returned(observed: Observed) -> list[Any]:
    """The number of each rank; a tensor of one element will do."""
    found = [said["returned"] for said in observed.said]
    return [each.item() if isinstance(each, np.ndarray) and each.size == 1 else each for each in found]


def calls(observed: Observed) -> list[str]:
    """What was called by all ranks together, and the messages that were sent."""
    return [op for op, _ in observed.seen.collectives()] + [each.op for each in observed.seen.data("send")]


def find_call(observed: Observed) -> Finding | None:
    """That there was one all-reduce, of a single number."""
    names, seen = calls(observed), observed.seen.total_bytes
    most = 2 * (observed.case["world_size"] - 1) * 8  # in double precision, say
    if names == ["all_reduce"] and seen <= most:
        return None
    told = ", ".join(names[:6]) or "no call"
    return Finding(f"{told}: {seen:,} B in all", f"one all_reduce of a number: {most} B at most", observed.words)


def a_number(case: Case) -> float:
    """Without so many bytes nobody has heard of all ranks."""
    return 4.0 * (case["world_size"] - 1)


LENGTHS: dict[str, Callable[[Case], Any]] = {
    "local norm": of_ranks,
    "norms added": lambda case: of_ranks(case).sum(),
    "a mean of the norms": lambda case: of_ranks(case).mean(),
    "norms of the tensors added": lambda case: of_tensors(case).sum(),
    "root forgotten": lambda case: norm(case) ** 2,
    "a mean over the ranks": lambda case: norm(case) / np.sqrt(case["world_size"]),
}
WHERE: Wrong = {
    "right for ranks with elements only": only_if("all have some"),
    "right for large numbers only": only_if("large"),
    "a norm of zero": only_if("not zero"),
}
NORM: Wrong = {name: told(length) for name, length in LENGTHS.items()} | {
    "the norm afterwards": told(lambda case: min(norm(case), case["max_norm"])),
    "nothing returned": every(lambda each: all(said["returned"] is None for said in each.said)),
}
CLIPPED: Wrong = {name: clipped(length) for name, length in LENGTHS.items()} | {
    "each tensor by itself": (clipped(of_tensors), clipped(lambda case: np.linalg.norm(of_tensors(case), axis=0))),
    "scaled up": scaled(lambda case: case["max_norm"] / norm(case)),
    "the own norm decides": only_if("far"),
    "nothing happened": every(as_they_were),
    "each number by itself": by_value,
    "right only where it clips": only_if("clips"),
}
CALLS: Wrong = {
    **WHERE,
    "gradients gathered": every(lambda each: each.seen.total_bytes > 1000),
    "a call for each tensor": every(lambda each: len(calls(each)) >= TENSORS - 1),
    "a gather of norms": every(lambda each: calls(each) == ["all_gather"]),
    "a number for each tensor": every(lambda each: calls(each) == ["all_reduce"]),
    "nothing sent": every(lambda each: not calls(each)),
}
SAME = "every shard scaled by the same factor, in place, and only where the norm is too large"
CHECKS = (
    own_work("clip_shards", built_in=True),
    values(
        2, "norm", "the norm of all gradients, on every rank", told(norm), of=returned, rtol=RTOL,
        wrong={**NORM, **WHERE}, least_sent=a_number,
    ),
    values(
        2, "clipped", SAME, right, of="shards", rtol=RTOL, wrong={**CLIPPED, **WHERE}, kind="gradient",
        least_sent=a_number,
    ),
    order(1, "one number", "one all-reduce of one number is all that travels", find_call, wrong=CALLS, kind="traffic"),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.7", function="clip_shards", title="The norm of what nobody holds", harness="zero.clip",
    draw=draw, handed_out=handed_out, checks=CHECKS,
)  # fmt: skip
