"""From what ranks hold to the kind of mistake: explanations in order, the simplest that fits is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .case import Case, Held, Kind, joined
from .cut import cut_off
from .expected import COARSE, MOST_RUNS, Expected
from .linear import decoded, multiples, never_reduced, scaled, weighted
from .matched import hidden, seems_hidden
from .mesh import Axes
from .norms import of_norms
from .pieces import Array, Told, index_of
from .placed import alone, of_names, of_steps, over_pieces, reordered, some_rows, swapped, zeros
from .report import Report, Row
from .rounding import TIMES
from .terms import another_term, coarser, copies_apart, ends, of_logarithms, of_own_part, other_rows, too_late

_VAGUE = ("unknown", "copies apart", "factor", "another order", "some rows")
"""What an optimizer makes of gradients that differ in another way: Adam's first step moves each weight by one size."""

Tolds = Sequence[Mapping[str, Told]]


def refusals(expected: Mapping[str, Told], tolds: Tolds, axes: Axes) -> str:
    """What makes a comparison impossible, in words; empty where nothing does. It needs no values."""
    names = {name for told in tolds for name in told}
    lacking = [name for name in expected if name not in names]
    extra = [name for name in sorted(names) if name not in expected]
    problems = []
    if lacking:
        problems.append(f"no rank returned {joined(lacking[:6])}{_more(lacking)}, which the reference has")
    if extra:
        who = next(rank for rank, told in enumerate(tolds) if extra[0] in told)
        problems.append(f"rank {who} returned {joined(extra[:6])}{_more(extra)}, which the reference does not have")
    for name, whole in expected.items():
        for rank, told in enumerate(tolds):
            if name not in told:
                continue
            try:
                kind, cut = told[name].place
                unknown = [axis for axis, _ in cut if axis not in axes.sizes] if kind == "cut" else []
                if unknown:
                    raise ValueError(f"is cut over {joined(unknown)}, and the mesh has {joined(axes.sizes)}")
                if kind == "whole" and told[name].shape != whole.shape:
                    raise ValueError(f"has the shape {told[name].shape}, and the reference's is {whole.shape}; "
                                     "of a piece, say where it lies: lab.piece")  # fmt: skip
                index_of(told[name], whole.shape, offsets(name, rank, tolds, axes))
            except ValueError as error:
                problems.append(f"{name!r} on {axes.words(rank)} {error}")
                break
    return "; ".join(problems[:8]) + ("; …" if len(problems) > 8 else "")


def _more(names: Sequence[str]) -> str:
    return f" ({len(names)} in all)" if len(names) > 6 else ""


def offsets(name: str, rank: int, tolds: Tolds, axes: Axes) -> dict[int, int]:
    """Where a rank's piece begins in each dimension that axes cut: after those of the ranks before it."""
    kind, cut = tolds[rank][name].place
    if kind != "cut":
        return {}
    starts = {}
    for dim in {dim for _, dim in cut}:
        along = [axis for axis, each in cut if each == dim]
        peers = axes.group(rank, along, [r for r, told in enumerate(tolds) if name in told])
        place = [axes.places[rank][axis] for axis in along]
        before = [r for r in peers if [axes.places[r][axis] for axis in along] < place]
        starts[dim] = sum(tolds[r][name].shape[dim] for r in before if dim < len(tolds[r][name].shape))
    return starts


def judge(
    expected: Expected, found: Sequence[Mapping[str, tuple[Told, Array]]], axes: Axes, micro_batches: int
) -> Report:
    """Every name of the reference, in its order, with what was found of it."""
    tolds = [{name: told for name, (told, _) in each.items()} for each in found]
    held: dict[str, list[Held]] = {name: [] for name in expected.whole}
    for rank, each in enumerate(found):
        for name, (told, values) in each.items():
            index = index_of(told, expected.told[name].shape, offsets(name, rank, tolds, axes))
            inside = index >= 0
            held[name].append(Held(rank, values.ravel()[inside], index[inside]))
    rows, cases = _rows(expected, held, axes, micro_batches)
    sure = any(not row.agrees and row.kind.code not in _VAGUE for row in rows)
    doubted = not sure and expected.eps > COARSE and any(seems_hidden(case) for case in cases.values())
    few = any(len(each) < MOST_RUNS for each in expected.perturbed.values())
    if doubted and few and expected.source is not None:
        expected.source.measure(expected, expected.eps, MOST_RUNS)
        rows, cases = _rows(expected, held, axes, micro_batches)
    rows = [row if row.agrees else replace(row, kind=_likeliest(row, cases, rows)) for row in rows]
    rows = _cut_off(rows, cases, expected, doubted)
    rows = [replace(row, kind=_following(row, rows[:n])) if row.kind.code in _VAGUE else row
            for n, row in enumerate(rows)]  # fmt: skip
    return Report(rows, dict(axes.sizes), expected.noticed, expected.copy_bytes)


def _rows(
    expected: Expected, held: dict[str, list[Held]], axes: Axes, micro_batches: int
) -> tuple[list[Row], dict[str, Case]]:
    cases = {name: Case(name, right.shape, right.ravel(), held[name], axes, expected, micro_batches, held)
             for name, right in expected.whole.items()}  # fmt: skip
    rows = [_row(case) for case in cases.values()]
    sure = {(row.kind.code, row.kind.axes) for row in rows if row.kind.alone is None}
    alone = [None if (row.kind.code, row.kind.axes) in sure else row.kind.alone for row in rows]
    return [replace(row, kind=kind or row.kind) for row, kind in zip(rows, alone, strict=True)], cases


def _cut_off(rows: list[Row], cases: dict[str, Case], expected: Expected, doubted: bool) -> list[Row]:
    """Where the first that differs is not known, or zero, or something seems hidden: whether a gradient is cut off."""
    first = next((row for row in rows if not row.agrees), None)
    vague = first is not None and first.kind.code in (*_VAGUE, "zeros", "other weights")
    if expected.source is None or not (vague or (doubted and first is None)):
        return rows
    kinds = cut_off(expected.source, list(cases.values()), first.name if first is not None else "")
    return [replace(row, kind=kinds[row.name], ranks=row.ranks or tuple(cases[row.name].ranks))
            if row.name in kinds else row for row in rows]  # fmt: skip


def _row(case: Case) -> Row:
    off = max(case.off.values(), default=0.0)
    missing = case.right.size - len(np.unique(np.concatenate([h.index for h in case.held])))
    if missing and case.right.size:
        words = f"no rank holds {missing} of its {case.right.size} elements"
        return Row(case.name, case.shape, Kind("nobody holds", (), words), off, ())
    kinds = [] if case.differing else hidden(case) or _lost(case)
    if not case.differing and not kinds:
        same = all(np.array_equal(h.values, case.right[h.index]) for h in case.held)
        words = "" if same else f"rounding: {100 * off:.2g} % of what it explains"
        return Row(case.name, case.shape, Kind("equal" if same else "rounding", (), words), off, (), blind(case))
    kind = kind_of(case) if case.differing else _either(kinds, case)
    return Row(case.name, case.shape, kind, off, tuple(case.differing or case.ranks))


def _lost(case: Case) -> list[Kind]:
    """What rounding would hide where a gradient is half of itself off: zeros, copies that are not the same,
    values of a coarser dtype."""
    kind = zeros(case) or copies_apart(case) or coarser(case) if case.expected.eps > COARSE else None
    return [kind] if kind else []


def blind(case: Case) -> float:
    """Which share of a result could be off and not be told from rounding."""
    size = float(np.linalg.norm(case.right))
    limit = TIMES * case.allowed.spread + case.allowed.floor
    return float(np.linalg.norm(limit)) / size if size else 0.0


def kind_of(case: Case) -> Kind:
    """The simplest explanation that fits, or that fits those elements that differ."""
    kind = _explained(case)
    if kind.code not in ("unknown", "some ranks", "rank alone") or (part := case.where_it_differs()) is None:
        return kind
    count = len(np.unique(np.concatenate([h.index for h in part.held])))
    closer = _explained(part)
    if closer.code in ("unknown", "some ranks", "rank alone") and (rows := some_rows(case)):
        return rows
    if closer.code in ("unknown", "some ranks", "rank alone", "another order", "noise", "factor"):
        return kind
    if closer.code == "zeros" and not closer.axes:
        closer = replace(closer, axes=case.axes.parting(case.differing, case.ranks), ranks=tuple(case.differing))
    alone = kind if case.is_chance(count) else None
    return replace(closer, words=f"{closer}, in {count} of {case.right.size} elements", alone=alone)


def _explained(case: Case) -> Kind:
    odd = [h.rank for h in case.held if not np.isfinite(h.values).all()]
    if odd:
        return Kind("not finite", (), f"not finite on {joined(map(case.axes.words, odd[:4]))}", tuple(odd))
    some = None if len(case.differing) == len(case.ranks) else case.differing
    zero = [h.rank for h in case.held if not h.values.any() and case.right[h.index].any()]
    if kinds := hidden(case):
        return _either(kinds, case)
    for explain in (multiples, of_norms, of_logarithms, of_steps):
        if kinds := case.best(explain(case), some):
            return _either(kinds, case)
    if some is not None and len(zero) == len(case.differing) and (kind := of_names(case) or alone(case)):
        return Kind(kind.code, kind.axes, f"{kind.words}; it holds zeros alone", kind.ranks)
    sums = never_reduced(case) or case.best(weighted(case)) or case.best(over_pieces(case)) or case.best(too_late(case))
    if kinds := sums:
        return _either(kinds, case)
    for find in (swapped, of_names, zeros, of_own_part, coarser, another_term, other_rows, reordered):
        if kind := find(case):
            return kind
    if (spread := case.expected.noise.get(case.name, 0.0)) > case.near * np.linalg.norm(case.right):
        apart = max(_whole_distance(case, h) for h in case.held)
        if 0.2 < apart / spread < 5:
            times = f"(× {apart / spread:.2g})"
            words = f"another stream of random numbers: with other dropout the reference moves as much {times}"
            return Kind("noise", (), words)
    if some is not None and (kind := alone(case)):
        return kind
    if kind := scaled(case) or decoded(case) or copies_apart(case):
        return kind
    return Kind("unknown", case.axes.apart(case.differing), f"unknown: {case.numbers()}")


def _whole_distance(case: Case, held: Held) -> float:
    """How far a rank is off, as if the whole were as far off as its piece is."""
    off = float(np.linalg.norm(held.values - case.right[held.index]))
    return off * float(np.sqrt(case.right.size / max(1, held.values.size)))


def _either(kinds: Sequence[Kind], case: Case) -> Kind:
    """The first of several that fit, with the others' axes after its own."""
    first = kinds[0]
    others = [k for k in kinds[1:] if (k.code, k.axes) != (first.code, first.axes)]
    if not others:
        return first
    said = "; or ".join(dict.fromkeys(str(k) for k in others[:3]))
    only = first.ranks or (tuple(case.differing) if len(case.differing) < len(case.ranks) else ())
    return Kind(first.code, first.axes, f"{first}; or {said}", only, tuple(others))


def _likeliest(row: Row, cases: Mapping[str, Case], rows: Sequence[Row]) -> Kind:
    """Of several explanations that fit this name, the one that the other names speak for."""
    kind = row.kind
    if not kind.others:
        return kind
    codes = {kind.code, *(each.code for each in kind.others)}
    affected = {each.name for each in rows if each.kind.code in codes}
    tensors = [each.name for each in rows if each.shape and cases[each.name].held]
    right = [name for name in tensors if name not in affected and not _silent(cases[name])]

    def fits(one: Kind) -> int:
        axes = [axis for axis in one.axes if axis in cases[row.name].axes.sizes]
        copied = {name: _is_copied(cases[name], axes) for name in tensors}
        if axes and one.code == "once per rank":  # of what is cut over the axis no rank has the same
            cut = sum(not copied[name] for name in affected if name in copied)
            return -cut + sum(not copied[name] for name in right)
        return 0

    def votes(one: Kind) -> int:
        return sum((one.code, one.axes) in [(k.code, k.axes) for k in (r.kind, *r.kind.others)] for r in rows)

    ordered = sorted([kind, *kind.others], key=lambda one: (fits(one), votes(one)), reverse=True)
    first, *others = ordered
    if first is kind:
        return kind
    words = "; or ".join([first.words, *(each.words.split("; or ")[0] for each in others)])
    return Kind(first.code, first.axes, words, first.ranks, tuple(others))


def _following(row: Row, before: Sequence[Row]) -> Kind:
    """Whether the same parameter differs before it, where no explanation is sure: a weight after its gradient."""
    causes = [each for each in before if not each.agrees and each.kind.code not in _VAGUE and "/" in each.name
              and ends(each.name) == ends(row.name)]  # fmt: skip
    if not causes:
        return row.kind
    words = f"follows from {causes[0].name!r}, which differs before it"
    return Kind("follows", causes[0].kind.axes, words, row.kind.ranks)


def _silent(case: Case) -> bool:
    return not case.right.any()


def _is_copied(case: Case, axes: Sequence[str]) -> bool:
    """Whether the ranks along `axes` hold the same elements of a name."""
    held = {h.rank: h.index for h in case.held}
    groups = [case.axes.group(rank, axes, held) for rank in held]
    return all(
        len(group) == case.axes.size(axes) and all(np.array_equal(held[a], held[group[0]]) for a in group)
        for group in groups
    )
