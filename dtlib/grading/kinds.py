"""The kinds of check: each holds one thing that was seen or said against the theory of the right answer.

A kind returns a `Check`. Its `right` is a function of the case, and `wrong` names other functions of the same form:
theories of wrong answers. Recognising a mistake is then the same comparison, with the wrong theory in the place of the
right one. What no theory describes is a `Sign`. Names are those of the exercise's bank, where the feedback stands.

Every check also knows the mistakes that have one shape everywhere: right in certain cases only (properties that cases
name under ``"is"``), everybody waiting, and sums in which contributions are missing or counted twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plain
from .compare import close, compare, mixture, show, show_bytes
from .exercise import Check, Exercise, Finding, Fits, FormError, Kind, Mistake
from .oracle import FLOAT_BYTES
from .seen import Case, Observed, Seen

ROOM = 6 * 2**20  # for what libraries keep, where memory is weighed
Theory = Callable[[Case], Any]
Of = str | Callable[[Observed], Any]
Sums = Callable[[Case, int], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Sign:
    """Recognises a mistake by something else than the theory of what it gives."""

    fits: Fits


Ranges = Mapping[str, Sign | tuple[Callable[[Case, int], float], Callable[[Case, int], float] | None]]
Wrong = Mapping[str, Theory | Sign | tuple[Theory | Sign, ...]]


# Signs


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
    return every(lambda each: _same(_taken(each, of), theory(each.case), rtol, atol))


def first_step(of: Of, theory: Theory, rtol: float = 1e-6, atol: float = 0.0) -> Sign:
    """What was told of the first of the case's steps is as in `theory`; every step has as many entries in a list."""

    def holds(each: Observed) -> bool:
        told, wanted = _taken(each, of), theory(each.case)
        first = len(wanted[0]) // each.case["steps"]
        return _same([rank[:first] for rank in told], [rank[:first] for rank in wanted], rtol, atol)

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
    for kind, rank, peer, op, *_ in each.seen.log:
        if op == "send":
            ends[kind][(peer, rank) if kind == "receive" else (rank, peer)] += 1
    return _hangs(each) and any((ends["send"] & ends["receive"] - ends["data"]).values())


ABANDONED = Sign(lambda failing, passing: any(map(_thrown_away, failing)))
OVERWRITTEN = some_rank(lambda said, case: any(plain.is_array(each) and np.isnan(each).any() for each in said.values()))
DEADLOCK = Sign(lambda failing, passing: any(map(_hangs, failing)) and not any(map(_thrown_away, failing)))
NEVER_ENDS = Sign(lambda failing, passing: any(each.trouble and each.trouble.kind == "hung" for each in failing))
NOTHING_ELSE = every(lambda each: True)  # for the last of a check's mistakes
GATHERED = every(lambda each: "all_gather" in dict(each.seen.collectives()))


# Kinds


def values(
    points: int,
    name: str,
    description: str,
    right: Theory,
    *,
    of: Of = "answer",
    part: str | int | tuple[str, ...] | None = None,
    parts: str = "",
    wrong: Wrong | None = None,
    sums: Sums | None = None,
    where: str | Callable[[Case], bool] = "",
    kind: Kind = "value",
    rtol: float = 1e-6,
    atol: float = 0.0,
    names: Callable[[Case], Sequence[str]] | None = None,
    least_sent: Theory | None = None,
) -> Check:
    """Numbers against those of ``right(case)``: of every rank a list, on paper the answer or the `part` of it.

    `of` names what each rank said, or takes it from what was observed. `parts` says in words what a tuple must hold;
    without a `part` all of them are compared, with a tuple of names these entries of a dictionary.
    Where the right numbers are sums over the ranks, ``sums(case, rank)`` has for
    each rank what it contributes to those of `rank`, in pieces. `where` limits the check to
    the cases with a property, or with ``"not …"`` to those without. ``names(case)`` are those of a list's entries.
    Right numbers count where all ranks together sent ``least_sent(case)`` bytes, without which nobody can know them.
    """

    several = part if isinstance(part, tuple) else parts.split(", ") if part is None and parts else ()

    def taken(observed: Observed) -> Any:
        return _part(_taken(observed, of), part, parts)

    def expected(theory: Any) -> Any:
        return _part(theory, part, parts) if of == "answer" else theory

    def agrees(observed: Observed, theory: Any) -> bool:
        return _same(taken(observed), expected(theory), rtol, atol)

    def inspect(observed: Observed) -> Finding | None:
        seen, wanted = taken(observed), expected(right(observed.case))
        if of == "answer" and several:
            named = zip(several, seen, wanted, strict=True)
            return _first(compare(one, two, f"{name}; {observed.words}", rtol, atol) for name, one, two in named)
        if of == "answer":
            return compare(seen, wanted, observed.words, rtol, atol)
        off = _compare_ranks(observed, seen, wanted, names(observed.case) if names else (), rtol, atol)
        return off or (_unheard(observed, least_sent) if least_sent else None)

    mistakes = [*_known(wrong, agrees), *_common(where)]
    if sums is not None:
        mistakes += _of_sums(taken, right, sums)
    return Check(name, kind, points, description, inspect, tuple(mistakes), applies=_where(where), agrees=agrees)


def sends(
    points: int,
    name: str,
    description: str,
    right: Theory,
    *,
    wrong: Wrong | None = None,
    where: str | Callable[[Case], bool] = "",
) -> Check:
    """Bytes on the wire against ``right(case)``: of all ranks together, or a list with those of each rank."""

    def off(observed: Observed, theory: Any) -> Finding | None:
        n, each_rank = observed.case["world_size"], isinstance(theory, Sequence)
        for rank, wanted in enumerate(theory if each_rank else [theory]):
            seen = needed_bytes(observed.seen, n, rank if each_rank else None)
            if not near(seen, wanted):
                who = f"rank {rank}" if each_rank else "all ranks together"
                return Finding(f"{show_bytes(seen)} sent by {who}", show_bytes(wanted), observed.words)
        return None

    def agrees(observed: Observed, theory: Any) -> bool:
        return off(observed, theory) is None

    def inspect(observed: Observed) -> Finding | None:
        return off(observed, right(observed.case))

    mistakes = (*_known(wrong, agrees), *_common(where))
    return Check(name, "traffic", points, description, inspect, mistakes, applies=_where(where), agrees=agrees)


def keeps(
    points: int,
    name: str,
    description: str,
    of: Callable[[Seen, int], float],
    most: Callable[[Case, int], float],
    words: str,
    *,
    least: Callable[[Case, int], float] = lambda case, rank: 0.0,
    wrong: Ranges | None = None,
    where: str | Callable[[Case], bool] = "weighed",
) -> Check:
    """Memory, weighed from outside: ``of(seen, rank)`` is at most ``most(case, rank)`` bytes on every rank.

    Less than ``least(case, rank)`` cannot do the work. A mistake is a range: in every failing case some rank held so
    many bytes at least, and at most so many (None: any).
    """

    def inspect(observed: Observed) -> Finding | None:
        for rank in range(len(observed.said)):
            seen, limit = of(observed.seen, rank), most(observed.case, rank)
            bound, told = least(observed.case, rank), "at most" if seen > limit else "at least"
            is_weighed = any(each.peak_bytes for each in observed.seen.asks)  # nobody can everywhere
            if seen > limit or (seen < bound and is_weighed):
                place = f"on rank {rank}; {observed.words}" if len(observed.said) > 1 else observed.words
                limit = limit if seen > limit else bound
                return Finding(f"{show_bytes(seen)} {words}", f"{told} {show_bytes(limit)}", place)
        return None

    def within(least: Callable[[Case, int], float], highest: Callable[[Case, int], float] | None) -> Sign:
        def holds(case: Case, rank: int, seen: float) -> bool:
            return least(case, rank) <= seen and (highest is None or seen <= highest(case, rank))

        return every(lambda each: any(holds(each.case, rank, of(each.seen, rank)) for rank in range(len(each.said))))

    signs = {name: sign if isinstance(sign, Sign) else within(*sign) for name, sign in (wrong or {}).items()}
    mistakes = tuple(Mistake(name, sign.fits) for name, sign in signs.items())
    return Check(name, "memory", points, description, inspect, mistakes, applies=_where(where))


def order(
    points: int,
    name: str,
    description: str,
    find: Callable[[Observed], Finding | None],
    *,
    wrong: Wrong | None = None,
    where: str | Callable[[Case], bool] = "",
    kind: Kind = "schedule",
    gate: bool = False,
    is_told: bool = False,
    agrees: Callable[[Observed, Any], bool] | None = None,
) -> Check:
    """Whatever else can be seen: ``find(observed)`` says what is wrong, None where nothing is.

    On paper ``agrees(observed, answer)`` says whether an answer comes to the same as that of a program of the bank.
    """
    mistakes = (*_known(wrong, lambda observed, theory: False), *_common(where))
    return Check(
        name, kind, points, description, find, mistakes, gate=gate, is_told=is_told, applies=_where(where),
        agrees=agrees,
    )  # fmt: skip


def own_work(function: str, wanted: str = "your own code", *, built_in: bool = False) -> Check:
    """The gate that an answer neither calls the library nor hides what it calls: told by its own process.

    With `built_in`, that it does not call what torch itself has for the task either.
    """

    def find(observed: Observed) -> Finding | None:
        for rank, said in enumerate(observed.said):
            where = f" on rank {rank}" if len(observed.said) > 1 else ""
            if said["library"]:
                return Finding(f"a call of dtlib.{said['library'][0]}{where}", wanted)
            if built_in and said["built_in"]:
                return Finding(f"{said['built_in'][0]} called{where}", wanted)
            if said["escaped"]:
                return Finding(f"{said['escaped'][0]} used{where}", "calls that can be seen")
        return None

    signs: Wrong = {
        "library called": some_rank(lambda said, case: bool(said["library"])),
        "built-in called": some_rank(lambda said, case: built_in and bool(said["built_in"])),
        "out of sight": some_rank(lambda said, case: bool(said["escaped"])),
    }
    name = f"`{function}` does its work itself"
    return order(0, "own work", name, find, wrong=signs, gate=True, is_told=True)


def messages_alone(points: int, function: str) -> Check:
    """The gate that ranks exchange messages, and no collective does the work: seen on the wire."""

    def find(observed: Observed) -> Finding | None:
        built_in = observed.seen.collectives()
        if built_in:
            return Finding(f"torch's {built_in[0][0]} called", "`send` and `recv` alone", observed.words)
        is_long = observed.case["is"].get("long enough", True)  # else messages may be empty
        if observed.case["world_size"] > 1 and is_long and not observed.seen.data("send"):
            return Finding("not a single message", "messages between the ranks", observed.words)
        return None

    signs: Wrong = {
        "built-in called": every(lambda each: bool(each.seen.collectives())),
        "nothing sent": every(lambda each: not each.seen.data()),
    }
    return order(points, "messages", f"`{function}` is built from send and receive", find, wrong=signs, gate=True)


def heard(function: str, least: Theory) -> Check:
    """The gate that ranks have heard of each other at all: who knows what was never sent has not computed it.

    ``least(case)`` are the bytes that all ranks together must send, whatever they do.
    """

    signs: Wrong = {"nothing sent": every(lambda each: not each.seen.total_bytes)}
    words = f"the ranks of `{function}` hear of each other"
    return order(0, "heard", words, lambda each: _unheard(each, least), wrong=signs, gate=True)


def _unheard(observed: Observed, least: Theory) -> Finding | None:
    seen, wanted = observed.seen.total_bytes, least(observed.case)
    if seen >= 0.99 * wanted:
        return None
    return Finding(f"{show_bytes(seen)} sent in all", f"at least {show_bytes(wanted)}", observed.words)


def on_paper(
    id: str,
    function: str,
    title: str,
    draw: Callable[[np.random.Generator], list[dict[str, Any]]],
    *checks: Check,
    own: Check | None = None,
    harness: str = "paper.call",
) -> Exercise:
    """An exercise on paper: its checks, and the gate that the formula is one's own, or another gate."""
    gate = own or own_work(function, "your own formula")
    return Exercise(id=id, function=function, title=title, harness=harness, draw=draw, checks=(gate, *checks))


# Bytes


def near(seen: float, theory: float) -> bool:
    """Whether counted payload is that of theory: gloo rounds the pieces of a collective up, and a count may travel."""
    return abs(seen - theory) <= 0.01 * theory + 256


def needed_bytes(seen: Seen, world_size: int, rank: int | None = None) -> float:
    """What `rank` sent, or all ranks, as if each `reduce` had met its bound: gloo's sends a gather more."""
    sent = seen.total_bytes if rank is None else seen.sent_bytes(rank)
    surplus = sum(size for op, size in seen.collectives() if op == "reduce") / (world_size + 1)
    return sent - surplus * (1 if rank is None else 1 / world_size)


def full_bytes(case: Case) -> int:
    """The bytes of the full buffer of a case."""
    return FLOAT_BYTES * int(case["num_elements"])


def held_at(label: str) -> Callable[[Seen, int], float]:
    """What a rank held when it asked for a piece called `label`."""
    return lambda seen, rank: seen.held(rank, label)


# Inside


def _where(where: str | Callable[[Case], bool]) -> Callable[[Case], bool]:
    if callable(where):
        return where
    name, wanted = where.removeprefix("not "), not where.startswith("not ")
    if name == "weighed":
        return lambda case: bool(case.get("weighed")) == wanted
    return lambda case: not name or bool(case["is"][name]) == wanted


def _taken(observed: Observed, of: Of) -> Any:
    if callable(of):
        return of(observed)
    return observed.said[0]["answer"] if of == "answer" else [said[of] for said in observed.said]


def _part(value: Any, part: str | int | tuple[str, ...] | None, parts: str) -> Any:
    """An item of an answer, or several: a pair may come as an array, a dictionary must have the key."""
    if part is None and not parts:
        return value
    if part is None or isinstance(part, tuple):
        return [_part(value, each, parts) for each in part or range(len(parts.split(",")))]
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist() if value.ndim == 1 else list(value)
    if isinstance(part, int):
        if not isinstance(value, list | tuple) or len(value) != len(parts.split(",")):
            raise FormError(show(value), f"a tuple ({parts})")
    elif not isinstance(value, Mapping) or part not in value:
        raise FormError(show(value), f"a dictionary with {parts or part}")
    found = value[part]
    is_row = isinstance(found, list) and bool(found) and all(map(plain.is_number, found))
    return np.asarray(found, np.float64) if is_row else found  # a row of numbers may come as a list


def _same(seen: Any, expected: Any, rtol: float, atol: float) -> bool:
    return expected is not None and close(seen, expected, rtol, atol)


def _compare_ranks(
    observed: Observed, seen: Sequence[Any], wanted: Sequence[Any], names: Sequence[str], rtol: float, atol: float
) -> Finding | None:
    if len(seen) != len(wanted):
        return Finding(f"{len(seen)} of them", f"{len(wanted)}, one for each rank", observed.words)
    for rank, (one, two) in enumerate(zip(seen, wanted, strict=True)):
        where = f"on rank {rank}; {observed.words}" if len(wanted) > 1 else observed.words
        if not names:
            finding = compare(one, two, where, rtol, atol)
        elif not isinstance(one, list) or len(one) != len(two):
            told = f"a list of {len(one)}" if isinstance(one, list) else show(one)
            finding = Finding(told, f"{len(two)} tensors", where)
        else:
            named = zip(names, one, two, strict=True)
            finding = _first(_compare_one(a, b, f"`{name}` {where}", rtol, atol) for name, a, b in named)
        if finding:
            return finding
    return None


def _first(findings: Iterable[Finding | None]) -> Finding | None:
    return next((each for each in findings if each), None)


def _compare_one(seen: Any, expected: Any, where: str, rtol: float, atol: float) -> Finding | None:
    if seen is None and expected is not None:
        return Finding("None", f"a tensor of {np.size(expected)} elements", where)
    return compare(seen, expected, where, rtol, atol)


def _known(wrong: Wrong | None, agrees: Callable[[Observed, Any], bool]) -> list[Mistake]:
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


def _common(where: str | Callable[[Case], bool]) -> list[Mistake]:
    """Mistakes that any check may meet; its bank decides whether it does."""
    told = [Mistake(name, _has(only_if(key).fits, key)) for key, name in PROPERTIES.items() if key != where]
    early = {"a message is thrown away": ABANDONED, "returned before it had left": OVERWRITTEN}
    hangs = {"everybody waits": DEADLOCK, "it never ends": NEVER_ENDS}
    first, last = ([Mistake(name, sign.fits) for name, sign in some.items()] for some in (early, hangs))
    return [*first, *told, *last]


def _has(fits: Fits, key: str) -> Fits:
    return lambda failing, passing: all(key in each.case.get("is", {}) for each in failing) and fits(failing, passing)


def _of_sums(taken: Callable[[Observed], Any], right: Theory, sums: Sums) -> list[Mistake]:
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
