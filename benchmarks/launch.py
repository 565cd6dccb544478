"""How long it takes to have four ranks do one all-reduce: `lab.run` against what people use.

Every launcher does the same work: four fresh processes, a gloo group, one all-reduce, the results back in the parent.
Rounds alternate between launchers, so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable

import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks._ranks import elastic, spawned, work
from benchmarks._report import console, print_table, save
from dtlib import lab

WORLD_SIZE = 4
SLOW_ROUNDS, WARM_RUNS_PER_ROUND = 5, 6
TARGET_SECONDS, TARGET_RATIO = 0.25, 20


def with_lab() -> list[float]:
    """`lab.run`."""
    return lab.run(work, WORLD_SIZE)


def with_spawn() -> list[float]:
    """`torch.multiprocessing.spawn`."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").Array("d", WORLD_SIZE)
        mp.spawn(spawned, args=(WORLD_SIZE, os.path.join(folder, "store"), results), nprocs=WORLD_SIZE)
        return list(results)


def with_elastic() -> list[float]:
    """`torch.distributed.launcher.api.elastic_launch`, torchrun's own."""
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=WORLD_SIZE,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        by_rank = elastic_launch(config, elastic)()
    return [by_rank[rank] for rank in range(WORLD_SIZE)]


def timed(launch: Callable[[], list[float]]) -> float:
    """Seconds that one launch takes, its results checked."""
    start = time.perf_counter()
    results = launch()
    seconds = time.perf_counter() - start
    expected = [float(sum(range(WORLD_SIZE)))] * WORLD_SIZE
    if results != expected:
        raise RuntimeError(f"{launch.__name__} gave {results}, not {expected}")
    return seconds


def main() -> None:
    """Measure, print, save."""
    cold = timed(with_lab)
    warm, spawn, torchrun = [], [], []
    for _ in range(SLOW_ROUNDS):
        warm += [timed(with_lab) for _ in range(WARM_RUNS_PER_ROUND)]
        spawn.append(timed(with_spawn))
        torchrun.append(timed(with_elastic))
    usual = statistics.median(warm)
    rows = []
    for name, seconds in (
        ("lab.run, first of a process", [cold]),
        ("lab.run, warm", warm),
        ("torch.multiprocessing.spawn", spawn),
        ("elastic_launch", torchrun),
    ):
        median = statistics.median(seconds)
        rows.append(
            [name, f"{median:.3f} s", f"{min(seconds):.3f} s", f"{max(seconds):.3f} s", f"{median / usual:.1f}"]
        )
    columns = ["launcher", "median", "fastest", "slowest", "times lab.run"]
    print_table(f"{WORLD_SIZE} ranks, one all-reduce, results in the parent", columns, rows)
    ratio = statistics.median(spawn) / usual
    for what, met in (
        (f"warm start {usual:.3f} s, target at most {TARGET_SECONDS} s", usual <= TARGET_SECONDS),
        (f"spawn is {ratio:.0f} times slower, target at least {TARGET_RATIO}", ratio >= TARGET_RATIO),
    ):
        console.print(f"{'✓' if met else '✗ missed:'} {what}")
    path = save(
        "launch", {"lab_cold": cold, "lab_warm": warm, "multiprocessing_spawn": spawn, "elastic_launch": torchrun}
    )
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
