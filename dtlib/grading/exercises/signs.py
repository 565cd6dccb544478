"""What mistakes look like: a `Sign` recognises one by the cases of a check that failed and those that passed.

A mistake that has a theory needs none: it is recognised by the same comparison, with the wrong theory in the place of
the right one. Every check also knows the mistakes that have one shape everywhere: right in certain cases only
(properties that cases name under ``"is"``), everybody waiting, and sums in which contributions are missing or counted
twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plain
from .compare import close, mixture
from .exercise import Fits, Mistake
from .seen import Case, Observed

Theory = Callable[[Case], Any]
Of = str | Callable[[Observed], Any]
Sums = Callable[[Case, int], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Sign:
    """Recognises a mistake by something else than the theory of what it gives."""

    fits: Fits


Wrong = Mapping[str, Theory | Sign | tuple[Theory | Sign, ...]]


def only_if(condition: str | Callable[[Case], bool]) -> Sign:
    """Right in just the cases that satisfy a condition, or have the property of that name."""
    holds = (lambda case: bool(case["is"][condition])) if isinstance(condition, str) else condition

    def fits(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
        good = bool(passing) and all(holds(each.case) for each in passing)
        return good and bool(failing) and not any(holds(each.case) for each in failing)

    return Sign(fits)


def every(predicate: Callable[[Observed], bool]) -> Sign:
    """``predicate(observed)`` holds in every failing case that came back, and one did."""

    def fits(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
        back = [each for each in failing if each.has_come]
        return bool(back) and all(predicate(each) for each in back)

    return Sign(fits)


def some_rank(predicate: Callable[[Any, Case], bool]) -> Sign:
    """In every failing case that came back, ``predicate(said, case)`` holds for what some rank said."""
    return every(lambda each: any(predicate(said, each.case) for said in each.said))


def instead(of: Of, theory: Theory, rtol: float = 1e-6, atol: float = 0.0) -> Sign:
    """What `theory` gives stands elsewhere than it should."""
    return every(lambda each: same(taken_from(each, of), theory(each.case), rtol, atol))


def first_step(of: Of, theory: Theory, rtol: float = 1e-6, atol: float = 0.0) -> Sign:
    """What was told of the first of the case's steps is as in `theory`; every step has as many entries in a list."""

    def holds(each: Observed) -> bool:
        told, wanted = taken_from(each, of), theory(each.case)
        first = len(wanted[0]) // each.case["steps"]
        return same([rank[:first] for rank in told], [rank[:first] for rank in wanted], rtol, atol)

    return every(holds)


def raised(pattern: str) -> Sign:
    """Every failing case raised an error whose text has `pattern` in it."""
    return Sign(
        lambda failing, passing: all(each.trouble and re.search(pattern, each.trouble.text) for each in failing)
    )


_WAITS = re.compile(r"recv|send|wait|batch|barrier|all_reduce|all_gather|all_to_all|synchronize")


def _hangs(each: Observed) -> bool:
    return each.trouble is not None and each.trouble.kind == "hung" and _WAITS.search(each.trouble.line) is not None


def _thrown_away(each: Observed) -> bool:
    """Whether both ends of a message had begun, and it did not leave: its sender holds it no more."""
    ends = {kind: Counter[Any]() for kind in ("send", "receive", "data")}
    for kind, rank, peer, op, tag, *_ in each.seen.log:
        if op == "send":
            ends[kind][(peer, rank, tag) if kind == "receive" else (rank, peer, tag)] += 1
    return _hangs(each) and any(((ends["send"] & ends["receive"]) - ends["data"]).values())


ABANDONED = Sign(lambda failing, passing: any(map(_thrown_away, failing)))
OVERWRITTEN = every(lambda each: any(op == "send" for _, _, _, op, *_ in each.seen.log) and any(
    plain.is_array(told) and np.isnan(told).any() for said in each.said for told in said.values()
))  # fmt: skip
DEADLOCK = Sign(lambda failing, passing: any(map(_hangs, failing)) and not any(map(_thrown_away, failing)))
NEVER_ENDS = Sign(lambda failing, passing: any(each.trouble and each.trouble.kind == "hung" for each in failing))
NEVER = Sign(lambda failing, passing: False)  # of what a finding names by itself
NOTHING_ELSE = every(lambda each: True)  # for the last of a check's mistakes
GATHERED = every(lambda each: "all_gather" in dict(each.seen.collectives()))


# What checks recognise


def taken_from(observed: Observed, of: Of) -> Any:
    """What a check looks at: the answer, what each rank said under a name, or what a function takes."""
    if callable(of):
        return of(observed)
    return observed.said[0]["answer"] if of == "answer" else [said[of] for said in observed.said]


def same(seen: Any, expected: Any, rtol: float, atol: float) -> bool:
    """Whether numbers are those of a theory, which says None where it says nothing."""
    return expected is not None and close(seen, expected, rtol, atol)


def known(wrong: Wrong | None, agrees: Callable[[Observed, Any], bool]) -> list[Mistake]:
    """The mistakes that a check names itself: theories that agree, and signs."""
    return [
        Mistake(name, _any([_sign(each, agrees) for each in (theory if isinstance(theory, tuple) else (theory,))]))
        for name, theory in (wrong or {}).items()
    ]


def _sign(theory: Theory | Sign, agrees: Callable[[Observed, Any], bool]) -> Fits:
    """Every failing case that came back agrees with the theory, where this says anything about it."""
    if isinstance(theory, Sign):
        return theory.fits

    def fits(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
        told = [(each, theory(each.case)) for each in failing if each.has_come]
        telling = [agrees(each, value) for each, value in told if value is not None]
        return bool(telling) and all(telling)

    return fits


def _any(recognisers: Sequence[Fits]) -> Fits:
    return lambda failing, passing: any(fits(failing, passing) for fits in recognisers)


#: Properties of cases, as they name them under ``"is"``, and the mistake of being right only there.
PROPERTIES = {
    "two ranks": "right for two ranks only",
    "divisible": "right for divisible lengths only",
    "a power of two": "right for powers of two only",
    "long enough": "too short to go round",
    "root 0": "right for root 0 only",
    "one dimension": "right for one dimension only",
}


def common(where: str | Callable[[Case], bool]) -> list[Mistake]:
    """Mistakes that any check may meet; its bank decides whether it does."""
    told = [Mistake(name, _has(only_if(key).fits, key)) for key, name in PROPERTIES.items() if key != where]
    early = {"a message is thrown away": ABANDONED, "returned before it had left": OVERWRITTEN}
    hangs = {"everybody waits": DEADLOCK, "it never ends": NEVER_ENDS}
    first, last = ([Mistake(name, sign.fits) for name, sign in some.items()] for some in (early, hangs))
    return [*first, *told, *last]


def _has(fits: Fits, key: str) -> Fits:
    return lambda failing, passing: all(key in each.case.get("is", {}) for each in failing) and fits(failing, passing)


def of_sums(taken: Callable[[Observed], Any], right: Theory, sums: Sums) -> list[Mistake]:
    """Mistakes that are other sums of the same contributions, told by the coefficients: one line a piece."""

    def named(shape: Callable[[Any, Any, int], bool]) -> Fits:
        def holds(each: Observed) -> bool | None:
            """Whether a case looks so; None where its tensors are too short to tell."""
            told, off = False, False
            for rank, (row, wanted) in enumerate(zip(taken(each), right(each.case), strict=True)):
                parts = sums(each.case, rank)
                if all(np.size(piece) < len(parts) for piece in parts[0]):
                    continue
                found, expected = _coefficients(row, parts), _coefficients(wanted, parts)
                if found is None or expected is None or not shape(found, expected, rank):
                    return False
                told, off = True, off or not np.allclose(found, expected, atol=0.02 * np.abs(expected).max())
            return off if told else None

        def fits(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
            telling = [told for told in (holds(each) for each in failing if each.has_come) if told is not None]
            return bool(telling) and all(telling)

        return fits

    def differs(factor: float) -> Callable[[Any, Any, int], bool]:
        def shape(found: Any, wanted: Any, rank: int) -> bool:
            atol = 0.02 * np.abs(wanted).max()
            off = ~np.isclose(found, wanted, atol=atol)
            return not off.all(1).any() and bool(np.allclose(found[off], factor * wanted[off], atol=atol))

        return shape

    def times(power: int, of_mean: bool) -> Callable[[Any, Any, int], bool]:
        """N to a power times the right mean, or the right sum."""

        def shape(found: Any, wanted: Any, rank: int) -> bool:
            is_mean, n = wanted.sum() < 1.5 * len(wanted), wanted.shape[1]
            return is_mean == of_mean and bool(np.allclose(found, wanted * float(n) ** power, rtol=0.02))

        return shape

    shapes: dict[str, Callable[[Any, Any, int], bool]] = {
        "sum for mean": times(1, True),
        "mean for sum": times(-1, False),
        "divided twice": times(-1, True),
        "no sync": _is_own,
        "partly no sync": _is_partly_own,
        "nothing added": lambda found, wanted, rank: np.allclose(np.abs(found).max(1), np.abs(found).sum(1), rtol=0.02),
        "a contribution is missing": differs(0.0),
        "a contribution counted twice": differs(2.0),
    }
    return [Mistake(name, named(shape)) for name, shape in shapes.items()]


def _is_partly_own(found: Any, wanted: Any, rank: int) -> bool:
    """Whether each piece is either right or the rank's own contribution alone."""
    is_right = np.isclose(found, wanted, rtol=0.02, atol=0.005).all(axis=1)
    return all(right or _is_own(piece[None], wanted, rank) for right, piece in zip(is_right, found, strict=True))


def _is_own(found: Any, wanted: Any, rank: int) -> bool:
    others = np.delete(found, rank, axis=1)
    return bool(np.all(np.abs(others) < 0.02) and np.all(found[:, rank] > 0.02))


def _coefficients(row: Any, parts: Sequence[Sequence[Any]]) -> np.ndarray[Any, Any] | None:
    """Of each piece of a row, with which coefficients it is a sum of the ranks' contributions; None if it is none."""
    if isinstance(row, np.ndarray):
        row = np.split(row, np.cumsum([len(piece) for piece in parts[0]])[:-1]) if len(parts[0]) > 1 else [row]
    pieces = [(one, [part[i] for part in parts]) for i, one in enumerate(row) if one is not None]
    lines = [mixture(one, contributed) for one, contributed in pieces if np.size(one) >= len(parts)]
    return np.stack(lines) if lines and all(line is not None for line in lines) else None  # type: ignore[arg-type]
