"""How fast the collectives from scratch are: `dtlib.ranks.collectives` against gloo's own, in one run.

Every contender moves the same float32 buffers between the same processes. They take turns, see `lab.race`.
The other all-reduces are shown beside the ring for information.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks._report import console, print_table, save
from dtlib import lab
from dtlib.ranks import collectives
from dtlib.theory.units import KiB, MiB, format_bytes, format_seconds

WORLD_SIZES = (2, 4)
REPEATS = {64 * KiB: 60, MiB: 60, 16 * MiB: 31, 64 * MiB: 15}
BATCH = {64 * KiB: 10, MiB: 3}  # short collectives are timed several in a row
TARGET_FROM = 16 * MiB
RACES = ("reduce-scatter", "all-gather", "all-reduce")
WAYS = ("ring", "gloo")
OTHER_ROUNDS = 5
OTHERS = ("tree", "recursive doubling", "halving-doubling", "two-level", "naive")


def target(race: str, n: int, full_bytes: int) -> float | None:
    """How many times as fast as gloo's the ring is meant to be; None where nothing was promised."""
    if full_bytes < TARGET_FROM:
        return None
    if race == "reduce-scatter":
        return 1.3 if n == 4 else None
    return 1.0


def contenders(full_bytes: int) -> dict[str, Callable[[], object]]:
    """What a rank calls, by name. Buffers are of zeros, so that sums stay what they are."""
    n, rank = dist.get_world_size(), dist.get_rank()
    full = torch.ones(full_bytes // 4).zero_()
    chunk = full.tensor_split(n)[rank].clone()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # newer name first
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return {
        "reduce-scatter, ring": lambda: collectives.ring_reduce_scatter(full, out=chunk),
        "reduce-scatter, gloo": lambda: scatter(chunk, full),
        "all-gather, ring": lambda: collectives.ring_all_gather(chunk, out=full),
        "all-gather, gloo": lambda: gather(full, chunk),
        "all-reduce, ring": lambda: collectives.ring_all_reduce(full),
        "all-reduce, gloo": lambda: dist.all_reduce(full),
        "all-reduce, tree": lambda: collectives.tree_all_reduce(full),
        "all-reduce, recursive doubling": lambda: collectives.recursive_doubling_all_reduce(full),
        "all-reduce, halving-doubling": lambda: collectives.halving_doubling_all_reduce(full),
        "all-reduce, two-level": lambda: collectives.two_level_all_reduce(full, ranks_per_node=2),
        "all-reduce, naive": lambda: collectives.naive_all_reduce(full),
    }


def race(full_bytes: int, repeats: int, batch: int) -> tuple[lab.Race, lab.Race]:
    """In a rank: the ring against gloo's own, then all ways of an all-reduce, in fewer rounds."""
    calls = contenders(full_bytes)
    in_race = {name: call for name, call in calls.items() if name.split(", ")[1] in WAYS}
    others = {name: call for name, call in calls.items() if name not in in_race or name == "all-reduce, ring"}
    first = lab.race(in_race, rounds=repeats, calls_per_turn=batch)
    return first, lab.race(others, rounds=OTHER_ROUNDS, calls_per_turn=batch)


def main() -> None:
    """Measure, print, save."""
    results, rows, others = [], [], []
    for n in WORLD_SIZES:
        for full_bytes, repeats in REPEATS.items():
            batch = BATCH.get(full_bytes, 1)
            first, second = lab.run(race, n, args=(full_bytes, repeats, batch), timeout_s=300)[0]
            for name in RACES:
                ring, gloo = f"{name}, ring", f"{name}, gloo"
                (ratio, low, high), wanted = first.ratio(gloo, ring), target(name, n, full_bytes)
                mark = "" if wanted is None else f"{'✓' if ratio >= wanted else '✗ missed'} ({wanted:g})"
                medians = [format_seconds(first.median(way) / batch) for way in (ring, gloo)]
                rows.append([name, str(n), format_bytes(full_bytes), *medians])
                rows[-1] += [f"{ratio:.2f}", f"{low:.2f} – {high:.2f}", mark]
                results.append(
                    {"collective": name, "ranks": n, "full_bytes": full_bytes, "ratio": ratio, "target": wanted}
                    | {f"{way}_seconds": [each / batch for each in first.seconds[f"{name}, {way}"]] for way in WAYS}
                )
            shown = [format_seconds(second.median(f"all-reduce, {name}") / batch) for name in ("ring", *OTHERS)]
            others.append([str(n), format_bytes(full_bytes), *shown])
    columns = ["collective", "ranks", "buffer", "ring", "gloo", "gloo / ring", "middle half", "target"]
    print_table(
        "The ring on send and receive against gloo's own: median seconds, and how often gloo's fits", columns, rows
    )
    print_table("All-reduce by other algorithms, for information", ["ranks", "buffer", "ring", *OTHERS], others)
    missed = [result for result in results if result["target"] and result["ratio"] < result["target"]]
    console.print(f"{'✗' if missed else '✓'} {len(missed)} of {sum(bool(r['target']) for r in results)} targets missed")
    path = save("collectives", {"races": results})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
