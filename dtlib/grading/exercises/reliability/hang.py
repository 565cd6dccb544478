"""reliability.5: why a job hangs, by the last collectives of each rank; on paper."""

from collections import Counter
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order
from dtlib.grading.exercises.kinds import by, on_paper, values
from dtlib.grading.exercises.oracle import remembered

KIND, SHAPE, BEHIND, ORDER, INSIDE, TOGETHER = (
    "other kind", "other shape", "behind", "other order", "inside", "together",
)  # fmt: skip
KEPT, STEPS = 4, 6  # of each group a rank's last calls are kept
Op = tuple[str, str, list[int], bool]  # group, kind, shape, and whether the rank waits for it
Groups = dict[str, list[int]]
Record = list[dict[str, Any]]

#: What is wrong, how it came about, ranks, and those of a slice: one group where this is all.
KINDS = (
    (KIND, "barrier", 4, 4), (KIND, "barrier", 2, 2), (KIND, "barrier", 6, 2), (KIND, "skipped", 4, 4),
    (KIND, "skipped", 4, 2), (KIND, "skipped", 6, 3), (KIND, "skipped twice", 4, 2), (KIND, "skipped twice", 6, 2),
    (SHAPE, "at once", 3, 3), (SHAPE, "at once", 4, 2), (SHAPE, "halves", 4, 4), (SHAPE, "halves", 2, 2),
    (SHAPE, "bucket", 4, 2), (SHAPE, "bucket", 6, 2), (SHAPE, "died later", 4, 4), (SHAPE, "died later", 6, 3),
    (BEHIND, "died", 2, 2), (BEHIND, "died", 4, 2), (BEHIND, "never came", 3, 3), (BEHIND, "two died", 6, 3),
    (BEHIND, "others ran on", 4, 2), (BEHIND, "others ran on", 6, 2), (BEHIND, "others ran on", 6, 3),
    (ORDER, "swapped", 4, 2), (ORDER, "swapped", 6, 3), (ORDER, "swapped", 6, 2), (ORDER, "round", 4, 2),
    (ORDER, "round again", 4, 2),
    (INSIDE, "all", 4, 4), (INSIDE, "some", 4, 2), (INSIDE, "some", 6, 3),
    (TOGETHER, "", 4, 2), (TOGETHER, "", 3, 3), (TOGETHER, "ahead", 4, 2), (TOGETHER, "ahead", 6, 3),
    (TOGETHER, "under way", 4, 2),
)  # fmt: skip


def case(rng: Rng, number: int, wrong: str, how: str, n: int, tp: int) -> dict[str, Any]:
    """The ranks run their programs, of which some are not like the others, until nothing moves any more."""
    groups: Groups = {"world": list(range(n))}
    if tp < n:  # no name says which ranks
        slices, same = rng.permutation(n // tp), rng.permutation(tp)
        # Where all groups decide: in one run they have the names that the others have in the next.
        if how.startswith("round"):
            slices, same = (np.arange(2)[:: -1 if "again" in how else 1],) * 2
        groups |= {f"tp {i}": list(range(at, at + tp)) for i, at in enumerate(tp * slices)}
        groups |= {f"dp {i}": list(range(at, n, tp)) for i, at in enumerate(same)}
    sizes = [64 * int(each) for each in rng.permutation(range(2, 40))[:4]]
    programs = [program(groups, rank, sizes, how) for rank in range(n)]
    # Once the first: who takes that for right is found out. Between two that agree. In a slice between two others.
    bad = {(3, 3, how): 0, (4, 4, "barrier"): 1, (6, 2, "skipped twice"): 3}.get((n, tp, how), int(rng.integers(n)))
    own, stuck, step = programs[bad], ("", 0, [-1]), len(programs[bad]) // STEPS
    at = step * int(rng.integers(2, 4))
    if how == "barrier":
        own[at:] = [("world", "barrier", [], True)]
    elif how.startswith("skipped"):
        del own[at + 3 : at + 3 + (how == "skipped twice")], own[at]
    elif wrong == SHAPE:
        at += (3 + 2 * step) * (how == "bucket")  # so late that it is not forgotten
        for each in [each for each in range(n) if each % 2 == bad % 2] if how == "halves" else [bad]:
            group, kind, shape, waits = programs[each][at]
            programs[each][at] = (group, kind, [shape[0] // 2, *shape[1:]], waits)
        del own[len(own) if how != "died later" else at + 2 :]
    elif wrong == BEHIND:
        for each in (bad, (bad + n // 2) % n) if how == "two died" else (bad,):
            del programs[each][0 if how == "never came" else at % (3 * step) + 1 :]
    elif wrong == ORDER:
        for each in [bad] if how == "swapped" else (0, 3) if bad % 2 else (1, 2):
            mine, far = programs[each], at + (5 if how == "swapped" else 3)
            mine[at + 2], mine[far] = mine[far], mine[at + 2]
    elif wrong == INSIDE:
        group = own[at][0]
        stuck = (group, sum(op[0] == group for op in own[: at + 1]), [bad] if how == "some" else groups[group])
    elif how == "under way":  # a bucket, in some group, for which nobody waits
        at += 3
        group = own[at][0]
        stuck = (group, sum(op[0] == group for op in own[: at + 1]), groups[group])
    for rank in range(n if wrong == TOGETHER and how else 0):
        del programs[rank][at + 1 + (how == "ahead" and rank < tp) :]
    records = played(rng, groups, programs, how in ("skipped", "skipped twice", "died later"), stuck)
    words = f"run {number}: {n} ranks" + "".join(f"; rank {rank}: {said(each)}" for rank, each in enumerate(records))
    return call(words, [groups, records]) | {"wrong": wrong}


def program(groups: Groups, rank: int, sizes: list[int], how: str) -> list[Op]:
    """What a rank calls: in each step thrice its slice, two buckets for which it need not wait, and all."""
    tp, dp = (next((name for name in groups if name[:2] == axis and rank in groups[name]), "") for axis in ("tp", "dp"))
    mine, waits = tp or "world", not dp or how.startswith("round")
    step: list[Op] = [
        (mine, "all_gather", [sizes[0], 16], True), (mine, "all_reduce", [sizes[1], 16], True),
        (mine, "all_gather", [sizes[0], 16], True), (dp or "world", "all_reduce", [sizes[2]], waits),
        (dp or "world", "all_reduce", [sizes[3]], waits), ("world", "all_reduce", [1], True),
    ]  # fmt: skip
    return step * STEPS if how != "others ran on" else step[:-1] * STEPS + step[-1:]


def played(
    rng: Rng, groups: Groups, programs: list[list[Op]], passes: bool, stuck: tuple[str, int, list[int]]
) -> list[Record]:
    """Of what ranks have called in the end, the last of each group. Calls that are not alike hang, or pass; one is
    stuck on some ranks."""
    records: list[Record] = [[] for _ in programs]
    entered: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in rng.permutation(len(programs)).tolist():
            mine = records[rank]
            if len(mine) == len(programs[rank]) or (mine and mine[-1]["state"] == "waits"):
                continue
            group, kind, shape, waits = programs[rank][len(mine)]
            number, state = 1 + sum(each["group"] == group for each in mine), "waits" if waits else "started"
            mine.append({"group": group, "number": number, "kind": kind, "shape": shape, "state": state})
            calls = entered.setdefault((group, number), {})
            calls[rank] = mine[-1]
            is_moving = True
            if len(calls) == len(groups[group]) and (passes or len({what(each) for each in calls.values()}) == 1):
                for each in calls.keys() - set(stuck[2] if stuck[:2] == (group, number) else []):
                    calls[each]["state"] = "finished"
    totals = [Counter(each["group"] for each in record) for record in records]
    kept = zip(records, totals, strict=True)
    return [[each for each in record if each["number"] > total[each["group"]] - KEPT] for record, total in kept]


def what(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["kind"], *one["shape"]


def said(record: Record) -> str:
    """The last three calls, in words."""
    told = (f"{each['group']} #{each['number']} {each['kind']} {each['shape']} {each['state']}" for each in record[-3:])
    return "… " * (len(record) > 3) + (", ".join(told) or "nothing")


@remembered
def right(case: Case) -> dict[str, Any]:
    """What is wrong is known; the rest follows from what all ranks have entered."""
    groups, records = case["arguments"]
    calls: dict[tuple[str, int], dict[int, Any]] = {}
    for rank, record in enumerate(records):
        for each in record:
            calls.setdefault((each["group"], each["number"]), {})[rank] = each
    stands = {rank: key for key, each in calls.items() for rank in each if each[rank]["state"] == "waits"}
    last = {(name, rank): 0 for name, ranks in groups.items() for rank in ranks}
    for group, number in sorted(calls, key=lambda key: key[1]):
        last |= {(group, rank): number for rank in calls[group, number]}
    late = {key: {rank for rank in groups[key[0]] if last[key[0], rank] < key[1]} for key in calls}
    keys: set[tuple[str, int]] = set()
    ranks: set[int] = set()
    if case["wrong"] in (KIND, SHAPE):
        odd = {key for key, each in calls.items() if len(set(map(what, each.values()))) > 1}
        order = [[key for key in ((each["group"], each["number"]) for each in one) if key in odd] for one in records]
        keys = odd - {key for one in order for key in one[1:]}
        (of,) = (calls[key] for key in keys)
        (most, votes), *_ = Counter(map(what, of.values())).most_common(1)
        ranks = {rank for rank, each in of.items() if what(each) != most or 2 * votes <= len(of)}
    elif case["wrong"] == BEHIND:
        ranks = set.union(*late.values()) - stands.keys()
        heads = {group: max(last[group, rank] for rank in each) for group, each in groups.items()}
        keys = {(group, have + 1) for (group, rank), have in last.items() if rank in ranks and have < heads[group]}
    elif case["wrong"] == INSIDE:
        keys = {key for key in stands.values() if not late[key]}
        ranks = {rank for key in keys for rank, each in calls[key].items() if each["state"] != "finished"}
    elif case["wrong"] == ORDER:
        waits_for = {rank: late[key] for rank, key in stands.items()}
        for _ in stands:
            waits_for = {rank: each.union(*(waits_for[one] for one in each)) for rank, each in waits_for.items()}
        ranks = {rank for rank, each in waits_for.items() if rank in each}
        keys = {stands[rank] for rank in ranks}
    held = sorted(stands.keys() - ranks)
    return {"wrong": case["wrong"], "calls": [list(key) for key in sorted(keys)], "ranks": sorted(ranks), "held": held}


of = by("wrong", right, part=("wrong", "calls", "ranks"), kind="schedule")

EXERCISE = on_paper(
    "reliability.5", "diagnose_hang", "Why does this job hang?", in_any_order(KINDS, case),
    of(KIND, SHAPE)(3, "differ", "the first call in which ranks differ"),
    of(BEHIND, INSIDE)(3, "behind", "who has not come, or does not get out"),
    of(ORDER)(2, "order", "who waits for each other"),
    of(TOGETHER)(1, "together", "nothing where nobody waits"),
    values(2, "held", "who is held up by it", right, part=("held",), kind="schedule"),
)  # fmt: skip
