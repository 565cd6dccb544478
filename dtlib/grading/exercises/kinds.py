"""The kinds of check: each holds one thing that was seen or said against the theory of the right answer.

A kind returns a `Check`. Its `right` is a function of the case, and `wrong` names other functions of the same form,
theories of wrong answers, or signs of them (`signs`). Names are those of the exercise's bank, where the feedback
stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from . import plain
from .compare import close, compare, show, show_bytes
from .exercise import EARLY, Check, Exercise, Finding, FormError, Kind, Mistake
from .oracle import FLOAT_BYTES
from .seen import Case, Observed, Seen
from .signs import NEVER, Of, Sign, Sums, Theory, Wrong, common, every, known, of_sums, some_rank, taken_from

ROOM = 6 * 2**20  # for what libraries keep, where memory is weighed
Ranges = Mapping[str, Sign | tuple[Callable[[Case, int], float], Callable[[Case, int], float] | None]]


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
        return _part(taken_from(observed, of), part, parts)

    def expected(theory: Any) -> Any:
        return _part(theory, part, parts) if of == "answer" else theory

    def agrees(observed: Observed, theory: Any) -> bool:
        return theory is not None and close(taken(observed), expected(theory), rtol, atol)

    def inspect(observed: Observed) -> Finding | None:
        seen, wanted = taken(observed), expected(right(observed.case))
        if of == "answer" and several:
            named = zip(several, seen, wanted, strict=True)
            words = observed.words
            return _first(compare(one, two, f"{name}; {words}", rtol, atol, whole=False) for name, one, two in named)
        if of == "answer":
            return compare(seen, wanted, observed.words, rtol, atol, whole=part is None)
        called, whole = (
            names(observed.case) if names else (),
            kind != "gradient",
        )  # most are in `.grad`, which nobody returns
        off = _compare_ranks(observed, seen, wanted, called, rtol, atol, whole=whole)
        return off or (_unheard(observed, least_sent) if least_sent else None)

    mistakes = [*known(wrong, agrees), *common(where)]
    if sums is not None:
        mistakes += of_sums(taken, right, sums)
    return Check(name, kind, points, description, inspect, tuple(mistakes), applies=_where(where), agrees=agrees)


def by(key: str, right: Theory | None = None, **more: Any) -> Callable[..., Callable[..., Check]]:
    """`values` of some cases: ``by("wrong", right)(A, B)(3, "name", "description")`` looks at those whose "wrong", or
    the first entry of it, is A or B; where no theory says what is right, that entry is. `more` are options of
    `values`."""
    right = right or itemgetter(key)

    def of(*named: str) -> Callable[..., Check]:
        def applies(case: Case) -> bool:
            found = case[key]
            return (found if isinstance(found, str) else found[0]) in named

        return partial(values, right=right, where=applies, **more)

    return of


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

    mistakes = (*known(wrong, agrees), *common(where))
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
    early: Callable[[Observed, int], bool] | None = None,
) -> Check:
    """Memory, weighed from outside: ``of(seen, rank)`` is at most ``most(case, rank)`` bytes on every rank.

    Less than ``least(case, rank)`` cannot do the work. A mistake is a range: in every failing case some rank held so
    many bytes at least, and at most so many (None: any). ``early(observed, rank)`` says that a rank asked, and was
    weighed, before it had what it is to hold: that it did not show it.
    """

    def inspect(observed: Observed) -> Finding | None:
        for rank in range(len(observed.said)):
            seen, limit = of(observed.seen, rank), most(observed.case, rank)
            bound, told = least(observed.case, rank), "at most" if seen > limit else "at least"
            is_weighed = any(each.peak_bytes for each in observed.seen.asks)  # nobody can everywhere
            if early and early(observed, rank):
                place = f"on rank {rank}; {observed.words}" if len(observed.said) > 1 else observed.words
                return asked_early(place)
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
    signs |= {EARLY: NEVER} if early else {}
    mistakes = tuple(Mistake(name, sign.fits) for name, sign in signs.items())
    return Check(name, "memory", points, description, inspect, mistakes, applies=_where(where))


def asked_early(place: str) -> Finding:
    """That what comes next was asked for before it was due, which is a mistake by itself."""
    return Finding("the desk asked for what comes next before it was due", "its turn", place, EARLY)


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
    mistakes = (*known(wrong, lambda observed, theory: False), *common(where))
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


def shows(label: str, of: str, rtol: float = 1e-3) -> Callable[[Observed, int], bool]:
    """Whether what a rank showed at a question is not the norm of what it said in the end, and is held to theory."""

    def early(observed: Observed, rank: int) -> bool:
        said = observed.said[rank][of]
        norm = float(np.linalg.norm(said.astype(np.float64))) if plain.is_array(said) else math.nan
        shown = [ask.shown for ask in observed.seen.asked(rank, label)]
        return not np.allclose(shown, norm, rtol=rtol, atol=0, equal_nan=True)

    return early


def showed(*labels: str) -> Callable[[Observed, int], bool]:
    """Whether what a rank showed at questions of these labels is not what it says that it had to show there."""

    def early(observed: Observed, rank: int) -> bool:
        asked = [ask.shown for ask in observed.seen.asks if ask.rank == rank and ask.label in labels]
        return not np.allclose(asked, observed.said[rank]["shown"], rtol=1e-3, atol=0, equal_nan=True)

    return early


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


def _compare_ranks(
    observed: Observed, seen: Sequence[Any], wanted: Sequence[Any], names: Sequence[str], rtol: float, atol: float,
    *, whole: bool,
) -> Finding | None:  # fmt: skip
    if len(seen) != len(wanted):
        return Finding(f"{len(seen)} of them", f"{len(wanted)}, one for each rank", observed.words)
    for rank, (one, two) in enumerate(zip(seen, wanted, strict=True)):
        where = f"on rank {rank}; {observed.words}" if len(wanted) > 1 else observed.words
        if not names:
            finding = compare(one, two, where, rtol, atol, whole=whole)
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
