"""How fast the collectives from scratch are: `dtlib.ranks.collectives` against gloo's own, in one run.

Every contender moves the same float32 buffers between the same processes. They take turns, repetition by
repetition, so that a slow moment of the machine falls on all; a repetition ends when the last rank has
finished. The other all-reduces are shown beside the ring for information.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
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


def race(full_bytes: int, repeats: int, batch: int) -> dict[str, list[float]]:
    """In a rank: seconds of each repetition, by contender."""
    calls = contenders(full_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repeats + 1):
        for name, call in calls.items():
            if repetition > 5 and name.split(", ")[1] in OTHERS:
                continue
            lab.barrier()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            if repetition:  # the first warms up
                seconds[name].append((time.perf_counter() - start) / batch)
    return seconds


def median(seconds: np.ndarray) -> str:
    return format_seconds(float(np.median(seconds)))


def main() -> None:
    """Measure, print, save."""
    results, rows, others = [], [], []
    for n in WORLD_SIZES:
        for full_bytes, repeats in REPEATS.items():
            by_rank = lab.run(race, n, args=(full_bytes, repeats, BATCH.get(full_bytes, 1)), timeout_s=300)
            seconds = {name: np.max([taken[name] for taken in by_rank], axis=0) for name in by_rank[0]}
            for name in RACES:
                ring, gloo = seconds[f"{name}, ring"], seconds[f"{name}, gloo"]
                ratio, wanted = float(np.median(gloo) / np.median(ring)), target(name, n, full_bytes)
                low, high = np.quantile(gloo / ring, [0.25, 0.75])
                mark = "" if wanted is None else f"{'✓' if ratio >= wanted else '✗ missed'} ({wanted:g})"
                spread = f"{low:.2f} – {high:.2f}"
                size = format_bytes(full_bytes)
                rows.append([name, str(n), size, median(ring), median(gloo), f"{ratio:.2f}", spread, mark])
                results.append(
                    {"collective": name, "ranks": n, "full_bytes": full_bytes, "ratio": ratio, "target": wanted}
                    | {"ring_seconds": ring.tolist(), "gloo_seconds": gloo.tolist()}
                )
            shown = [median(seconds[f"all-reduce, {name}"]) for name in ("ring", *OTHERS)]
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
