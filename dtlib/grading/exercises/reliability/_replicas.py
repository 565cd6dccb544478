"""Replicas that get other bits: the cases, what each rank is told, and what replicas hold when they are checked."""

import hashlib
import zlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.seen import Case

Words = list[inputs.Array]

#: Shapes, bits of their elements, and which lie the other way round in memory.
LAYOUTS: dict[str, Any] = {
    "float32": ([[6, 5], [7], [7], []], [32] * 4, [True, False, False, False]),
    "bfloat16": ([[8, 4], [9], [9]], [16] * 3, [False] * 3),
    "float64": ([[5, 4], [7], [7], [3]], [64] * 4, [False] * 4),
    "mixed": ([[4, 3], [5], [5], [3, 2]], [32, 64, 64, 16], [False] * 3 + [True]),
    "large": ([[100], [100], [150, 100]], [32] * 3, [False] * 3),
    "many": ([[4]] * 90, [32] * 90, [False] * 90),
    "scalars": ([[5], [], []], [32] * 3, [False] * 3),
}
LOW, FIRST, LAST, SIGN, SIGN_2 = "low bit", "first element", "last element", "sign of an odd one", "sign of an even one"
SWAP, ACROSS, CARRY, PAIR = "two swapped", "two swapped across parameters", "one up, one down", "a bit of two"
SIGNS, OF_TWO, MIRROR = "signs of two", "signs in two parameters", "one swapped with its negative"
THREE = "one up, one down by two, one up"
NAN, NANS, ZERO, NOTHING, STAYS = "NaN on all", "NaN on all, or another", "0.0 on all, or -0.0", "nothing", "as before"
CRC8 = [reduce(lambda crc, _: (crc << 1) ^ (0x107 if crc & 128 else 0), range(8), byte) for byte in range(256)]
#: Digests of one byte, each of which misses one of 256 changes.
BYTES: dict[str, Callable[[bytes], int]] = {
    "a change that the first byte of sha256 misses": lambda data: hashlib.sha256(data).digest()[0],
    "a change that the last byte of sha256 misses": lambda data: hashlib.sha256(data).digest()[-1],
    "a change that the first byte of md5 misses": lambda data: hashlib.md5(data).digest()[0],
    "a change that the last byte of crc32 misses": lambda data: zlib.crc32(data) % 256,
    "a change that crc8 misses": lambda data: reduce(lambda crc, byte: CRC8[crc ^ byte], data, 0),
    "a change that a polynomial misses": lambda data: reduce(lambda total, byte: (31 * total + byte) % 256, data, 0),
}
ONE: tuple[tuple[int, ...], ...] = ((1,),)
ALL: tuple[tuple[int, ...], ...] = ()
Event = tuple[str, tuple[tuple[int, ...], ...]]
"""What changes, and on whom: those that stand together in the same way, others in another."""

#: What it is about, ranks, groups, layout, every how many steps, and what is to be seen at each of its checks.
KINDS: tuple[tuple[str, int, int, str, int, tuple[Event, ...]], ...] = (
    ("bits", 3, 1, "float32", 1, tuple((each, ONE) for each in (LOW, FIRST, LAST, SIGN, SIGN_2, LOW))),
    ("bits", 3, 1, "float64", 1, tuple((each, ONE) for each in (SIGN, SIGN_2, FIRST, LAST, LOW))),
    ("bits", 3, 1, "bfloat16", 2, tuple((each, ONE) for each in (LAST, LOW, SIGN, FIRST))),
    ("bits", 4, 1, "mixed", 1, tuple((each, ONE) for each in (LOW, LOW, LAST, FIRST, SIGN, SIGN_2))),
    ("bits", 3, 1, "large", 2, tuple((each, ONE) for each in (LOW, FIRST, LAST))),
    ("bits", 3, 1, "many", 1, tuple((each, ONE) for each in (LOW, LAST, LOW))),
    ("bits", 3, 1, "scalars", 1, tuple((each, ONE) for each in BYTES)),
    ("places", 3, 1, "float32", 1, tuple((each, ONE) for each in (SWAP, ACROSS, CARRY, PAIR, SIGNS, THREE))),
    ("places", 4, 1, "float64", 1, tuple((each, ONE) for each in (ACROSS, SWAP, SIGNS, MIRROR, OF_TWO, PAIR, CARRY))),
    ("places", 3, 1, "bfloat16", 1, tuple((each, ONE) for each in (CARRY, PAIR, SWAP, ACROSS, MIRROR, THREE))),
    ("places", 3, 1, "many", 1, ((ACROSS, ONE), (SWAP, ONE), (ACROSS, ONE))),
    ("places", 3, 1, "scalars", 1, ((ACROSS, ONE),)),
    ("equal", 3, 1, "float32", 1, ((NOTHING, ALL), (NAN, ALL), (ZERO, ALL), (NAN, ONE), (ZERO, ONE), (NANS, ONE))),
    ("equal", 2, 1, "bfloat16", 2, ((NAN, ALL), (NOTHING, ALL))),
    ("equal", 3, 1, "mixed", 1, ((ZERO, ONE), (NAN, ALL), (NAN, ONE), (NANS, ONE))),
    ("who", 2, 1, "float32", 1, ((LOW, ((0,),)), (NOTHING, ALL), (SWAP, ((1,),)))),
    ("who", 3, 1, "float32", 1, ((LOW, ((0,), (1,), (2,))), (LOW, ((0,), (2,))), (LOW, ((1, 2),)))),
    ("who", 4, 1, "float32", 1, ((LOW, ((0, 3),)), (LOW, ((1,), (2,))), (LOW, ((2,),)), (LOW, ((0, 1, 2),)))),
    ("who", 5, 1, "bfloat16", 1, ((LOW, ((1, 4),)), (LOW, ((0,), (3,))), (LOW, ((0, 1, 2),)), (LOW, ((0, 1), (2, 3))))),
    ("who", 4, 2, "float32", 1, ((LOW, ONE), (NOTHING, ALL), (SWAP, ((0,),)))),
    ("who", 6, 2, "float32", 2, ((LOW, ONE), (LOW, ((0,),)), (LOW, ((2,),)))),
    ("steps", 3, 1, "float32", 3, ((LOW, ONE), (STAYS, ONE), (NOTHING, ALL), (LOW, ((2,),)))),
    ("steps", 2, 1, "bfloat16", 2, ((NOTHING, ALL), (LOW, ONE), (STAYS, ONE))),
    ("quiet", 2, 1, "scalars", 60, ((LOW, ONE), (NOTHING, ALL))),
)  # fmt: skip


def drawn(
    rng: inputs.Rng, about: str, n: int, groups: int, layout: str, each: int, events: tuple[Event, ...]
) -> dict[str, Any]:
    """Ranks in any order."""
    watched = int(rng.integers(groups))
    names = rng.permutation(range(watched, n, groups)).tolist()
    told = [[what, [[names[one] for one in some] for some in who]] for what, who in events]
    said = "; ".join(f"{what} on {' and otherwise on '.join(map(str, who)) or 'no rank'}" for what, who in told)
    shapes, bits, turned = LAYOUTS[layout]
    return {
        "world_size": n, "groups": [list(range(i, n, groups)) for i in range(groups)], "watched": watched,
        "every": each, "steps": each * len(events) + (each > 1), "events": told, "about": about, "shapes": shapes,
        "bits": bits, "turned": turned, "seed": int(rng.integers(2**31)), "weights_seed": int(rng.integers(2**31)),
        "words": f"{n} ranks, {f'in {groups} slices, ' * (groups > 1)}{layout}, every {each}; at the checks: {said}",
        "is": {"two ranks": n == 2},
    }  # fmt: skip


def of_group(case: Case, group: int) -> dict[str, Any]:
    """What the ranks of a group are told: its replicas are those of one slice."""
    told = {name: case[name] for name in ("every", "steps", "shapes", "bits", "turned")}
    return told | {"replicas": case["groups"][group], "weights_seed": case["weights_seed"] + group}


draw = inputs.in_order(KINDS, drawn)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    group = next(i for i, ranks in enumerate(case["groups"]) if rank in ranks)
    told, place = of_group(case, group), case["groups"][group].index(rank)
    mine = [each[place] if group == case["watched"] else [] for each in played(case)[0]]
    return [("start", told), *(("step", each) for each in mine), ("end", None)]


@oracle.remembered
def played(case: Case) -> tuple[list[list[list[list[int]]]], list[list[Words]]]:
    """Of each step what is written into each replica of the group that is watched, as [parameter, element, word], and
    what they hold when they are checked. What differs is mended when the next step begins."""
    given, n = of_group(case, case["watched"]), len(case["groups"][0])
    clean = inputs.words(given)
    replicas = [[each.copy() for each in clean] for _ in range(n)]
    writes, checked = [], []
    for step in range(case["steps"]):
        for held in (clean, *replicas):
            for each, mask in zip(held, inputs.words(given, step), strict=True):
                each ^= mask
        due, left = divmod(step, case["every"])
        written: list[list[list[int]]] = [[] for _ in range(n)]
        what, who = case["events"][due] if due < len(case["events"]) else (NOTHING, [])
        if what != STAYS and left == 0:
            for own, held in zip(written, replicas, strict=True):
                for place, (one, two) in enumerate(zip(held, clean, strict=True)):
                    own += [[place, int(at), int(two[at])] for at in np.flatnonzero(one != two)]
        if what not in (STAYS, NOTHING) and left == (case["every"] - 1 if case["about"] != "steps" else 0):
            common, changes = changed(np.random.default_rng([case["seed"], step]), case, what, clean, len(who))
            for place, at, word in common:
                clean[place][at] = word
            for rank, own in zip(case["groups"][case["watched"]], written, strict=True):
                mine = [change for some, change in zip(who, changes, strict=True) if rank in some]
                own += common + [one for change in mine for one in change]
        for own, held in zip(written, replicas, strict=True):
            for place, at, word in own:
                held[place][at] = word
        writes.append(written)
        if left == case["every"] - 1 and due < len(case["events"]):
            checked.append([[each.copy() for each in held] for held in replicas])
    return writes, checked


def changed(
    rng: inputs.Rng, case: Case, what: str, clean: Words, ways: int
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """What is written on all ranks, and, in so many ways, what changes on some."""
    if what in BYTES:
        return [], [[missed(rng, BYTES[what], clean)]]
    drawn = int(rng.choice([place for place, each in enumerate(clean) if each.size > 3]))
    place = {FIRST: 0, LAST: len(clean) - 1, ACROSS: 1}.get(what, drawn)
    words, bits = clean[place].astype(object), case["bits"][place]
    at = {FIRST: 0, LAST: words.size - 1, SIGN: 1, SIGN_2: 2}.get(what, int(rng.integers(words.size)))
    if what == ACROSS:
        at = next(int(each) for each in rng.permutation(words.size) if clean[1][each] != clean[2][each])
    word, sign, low = words[at], -(2 ** (bits - 1)), {16: 7, 32: 23, 64: 52}[bits]
    other = next((int(each) for each in rng.permutation(words.size) if words[each] != word), at)
    two = at + 2 if at + 2 < words.size else max(0, at - 2)
    nan = (2 ** (bits - low) - 1) << (low - 1)
    row = [(each & ~255) | 64 for each in words[:3]]  # no byte carries
    common = {
        NAN: [[place, at, nan]], NANS: [[place, at, nan | 1]], ZERO: [[place, at, 0]],
        MIRROR: [[place, two, word ^ sign]], THREE: [[place, i, each] for i, each in enumerate(row)],
    }.get(what, [])  # fmt: skip
    change = {
        SIGN: [[place, at, word ^ sign]], SIGN_2: [[place, at, word ^ sign]], ZERO: [[place, at, sign]],
        SWAP: [[place, at, words[other]], [place, other, word]], NAN: [[place, other, words[other] ^ 1]],
        NANS: [[place, at, nan ^ (1 << (low - 1)) | 1]],  # a wider format makes one of both
        ACROSS: [[1, at, int(clean[2][at])], [2, at, int(clean[1][at])]] if what == ACROSS else [],
        CARRY: [[place, at, word + 1], [place, other, words[other] - 1]],
        PAIR: [[place, at, word ^ 4], [place, other, words[other] ^ 4]],
        SIGNS: [[place, at, word ^ sign], [place, two, words[two] ^ sign]],
        THREE: [[place, i, each + (1, -2, 1)[i]] for i, each in enumerate(row)],
        OF_TWO: [[each, 0, int(clean[each][0]) ^ sign] for each in (1, 2)],
        MIRROR: [[place, at, word ^ sign], [place, two, word]],
    }.get(what)  # fmt: skip
    return common, [change or [[place, at, word ^ (1 << way)]] for way in range(ways)]


def missed(rng: inputs.Rng, digest: Callable[[bytes], int], clean: Words) -> list[int]:
    """Another word in the first parameter, of which `digest` sees nothing."""
    while True:
        words = [each.copy() for each in clean]
        at = int(rng.integers(words[0].size))
        words[0][at] ^= rng.integers(1, 2**31)
        if len({digest(b"".join(each.tobytes() for each in held)) for held in (clean, words)}) == 1:
            return [0, at, int(words[0][at])]
