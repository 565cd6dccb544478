"""What it costs to be able to go on: ours beside torch's own on the same work, each table in one run.

Saving and loading one state, 12 bytes a parameter: `zero.save` and `load` at stage 3, and torch's DCP with FSDP2; how
long training is held up where it is written behind its back; from the moment at which a rank is killed to the end of
the first step after it, with `lab.run` called again and with torchrun's elastic agent; and a collective that a flight
recorder writes down, or that is compared on all ranks before it is entered. A save counts what makes of a model what is
saved: planning here, `get_state_dict` there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks._killed import KILLED, RESUMED, STEPS, train
from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.ranks.reliability import Background, flight
from dtlib.theory.units import format_bytes, format_seconds

RANKS, ROUNDS, RESTARTS, CALLS = 2, 5, 3, 200
CONFIG = GPTConfig(num_layers=4, hidden=256, num_heads=8, seq=64, tied=False)
STATE_BYTES = 12 * CONFIG.num_params
adamw = partial(torch.optim.AdamW, lr=1e-4)
OURS, DCP, DCP_KEPT = "ours", "DCP", "DCP, copy kept"


def states() -> tuple[zero.Zero, Any, torch.optim.Optimizer]:
    """One model on our stage 3 and on FSDP2, with moments."""
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    ours = zero.Zero(GPT(CONFIG), adamw, stage=3)
    theirs = GPT(CONFIG)
    for block in theirs.blocks:
        fully_shard(block)
    theirs = fully_shard(theirs)
    optimizer = adamw(theirs.parameters())
    tokens = torch.zeros(1, CONFIG.seq, dtype=torch.int64)
    for model, each in ((ours, ours.optimizer), (theirs, optimizer)):
        model(tokens).sum().backward()
        each.step()
        each.zero_grad()
    return ours, theirs, optimizer


def theirs_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What DCP is given."""
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def saved_and_loaded(folder: Path) -> tuple[lab.Race, lab.Race, dict[str, int]]:
    """In a rank: the races of saving and of loading, and the bytes of each checkpoint."""
    ours, theirs, optimizer = states()

    def load_theirs() -> None:
        state = theirs_of(theirs, optimizer)
        dcp.load(state, checkpoint_id=folder / DCP)
        set_state_dict(theirs, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    saving: dict[str, Callable[[], Any]] = {
        OURS: lambda: zero.save(ours, folder / OURS),
        DCP: lambda: dcp.save(theirs_of(theirs, optimizer), checkpoint_id=folder / DCP),
    }
    loading: dict[str, Callable[[], Any]] = {OURS: lambda: zero.load(ours, folder / OURS), DCP: load_theirs}
    races = lab.race(saving, rounds=ROUNDS), lab.race(loading, rounds=ROUNDS)
    sizes = {name: sum(each.stat().st_size for each in (folder / name).rglob("*.distcp")) for name in saving}
    return *races, sizes


def stalls(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """In a rank: by contender and round, the seconds until training goes on and those until all is written."""
    ours, theirs, optimizer = states()
    background, gloo, stager = Background(), dist.new_group(backend="gloo"), DefaultStager(StagingOptions(*[False] * 4))

    def in_background() -> Callable[[], Any]:
        zero.save(ours, folder / OURS, background=background)
        return background.wait

    def of_dcp(stager: Any, name: str) -> Callable[[], Any]:
        state = theirs_of(theirs, optimizer)
        future: Any = dcp.async_save(state, checkpoint_id=folder / name, process_group=gloo, async_stager=stager)
        return lambda: future.result()

    def waiting() -> Callable[[], Any]:
        zero.save(ours, folder / "waiting")
        return lambda: None

    contenders = {
        "ours, waiting": waiting,
        OURS: in_background,
        DCP: lambda: of_dcp(None, DCP),
        DCP_KEPT: lambda: of_dcp(stager, DCP_KEPT),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 1):
        for name, start in contenders.items():
            lab.barrier()
            begun = time.perf_counter()
            wait = start()
            stalled = time.perf_counter()
            wait()
            if number:  # the first round makes what is kept
                took[name].append((stalled - begun, time.perf_counter() - begun))
    return took


def restarts(folder: Path) -> dict[str, list[float]]:
    """Seconds from a kill to the end of the first step after it."""
    took: dict[str, list[float]] = {"lab.run again": [], "torchrun": []}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    for number in range(RESTARTS):
        for name, seconds in took.items():
            at = folder / f"{name} {number}"
            at.mkdir()
            if name == "torchrun":
                command_here = [*command, "--max-restarts", "1", "-m", "benchmarks._killed", str(at)]
                root = Path(__file__).parents[1]
                environment = dict(os.environ, TMPDIR=str(at))
                subprocess.run(command_here, check=True, capture_output=True, cwd=root, env=environment)
            else:
                try:
                    lab.run(train, RANKS, args=(at,), faults=[lab.kill(rank=RANKS - 1, step=STEPS // 2)])
                except lab.RankError:
                    lab.run(train, RANKS, args=(at,))
            seconds.append(float((at / RESUMED).read_text()) - float((at / KILLED).read_text()))
    return took


def recorded(folder: Path) -> lab.Race:
    """In a rank: an all-reduce of one number, bare, written down, and compared."""
    number = torch.ones(1)

    def bare() -> None:
        for _ in range(CALLS):
            dist.all_reduce(number)

    def ours(compare: bool) -> None:
        with flight.recorded(folder, compare=compare):
            bare()

    contenders = {"bare": bare, OURS: partial(ours, False), "ours, compared": partial(ours, True)}
    return lab.race(contenders, rounds=ROUNDS)


def with_torchs() -> tuple[float, list[dict[str, Any]]]:
    """In a rank of a run that torch's environment variables change: seconds a call, and what its recorder has."""
    from torch._C import _distributed_c10d

    number, took = torch.ones(1), []
    for _ in range(ROUNDS):
        lab.barrier()
        begun = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(number)
        took.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(took), json.loads(_distributed_c10d._dump_fr_trace_json()).get("entries", [])


TORCHS = {  # in runs of their own: torch looks at these when a group is made
    "a run without": {},
    "torch's recorder": {"TORCH_FR_BUFFER_SIZE": "2000"},
    "torch's comparison (DETAIL)": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}


def slowest(by_rank: list[list[tuple[float, float]]]) -> list[list[float]]:
    """Of each round the longest of all ranks, until it went on and until all was written."""
    return torch.tensor(by_rank, dtype=torch.float64).amax(0).tolist()


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving, loading, sizes = lab.run(saved_and_loaded, RANKS, args=(folder,), timeout_s=300)[0]
        by_rank = lab.run(stalls, RANKS, args=(folder,), timeout_s=300)
        restarted = restarts(folder)
        written = lab.run(recorded, RANKS, args=(folder / "flight",))[0]
    torchs, entries = dict[str, float](), list[dict[str, Any]]()
    for name, variables in TORCHS.items():
        with mock.patch.dict(os.environ, variables):
            torchs[name], found = lab.run(with_torchs, RANKS)[0]
        entries = found or entries
    if min(sizes.values()) < STATE_BYTES:
        raise AssertionError(f"a checkpoint holds {sizes} bytes, and the state has {STATE_BYTES}")
    rows = [
        [f"{what}, {each}", format_seconds(race.median(each)), *ratio_cells(race.ratio(each, DCP))]
        for what, race in (("save", saving), ("load", loading))
        for each in (OURS, DCP)
    ]
    title = f"{format_bytes(STATE_BYTES)} of weights and moments on {RANKS} ranks"
    print_table(title, ["", "median", "over DCP's", "middle half"], rows)

    took = {name: slowest([each[name] for each in by_rank]) for name in by_rank[0]}
    medians = {name: [statistics.median(each) for each in zip(*of, strict=True)] for name, of in took.items()}
    rows = [
        [name, format_seconds(stall), format_seconds(whole), f"{stall / medians['ours, waiting'][0]:.3f}"]
        for name, (stall, whole) in medians.items()
    ]
    print_table("Held up by a save", ["", "held up", "until written", "over ours, waiting"], rows)

    usual = {name: statistics.median(each) for name, each in restarted.items()}
    rows = [
        [name, *map(format_seconds, (usual[name], min(each), max(each))), f"{usual[name] / usual['lab.run again']:.1f}"]
        for name, each in restarted.items()
    ]
    print_table("From a kill to the end of the next step", ["", "median", "fastest", "slowest", "times lab.run"], rows)

    rows = [
        [name, format_seconds(written.median(name) / CALLS), *ratio_cells(written.ratio(name, "bare"))]
        for name in written.seconds
    ]
    rows += [[name, format_seconds(each), "", ""] for name, each in torchs.items()]
    print_table("An all-reduce of one number", ["", "a call", "over bare", "middle half"], rows)
    states = dict(Counter(f"{each['profiling_name']}, {each['state']}" for each in entries))
    console.print(f"torch's own flight recorder has on gloo: {states}; load of the machine before: {load:.1f}")
    path = save("reliability", {
        "state_bytes": STATE_BYTES, "saving": saving.seconds, "loading": loading.seconds, "checkpoint_bytes": sizes,
        "stalls": took, "restarts": restarted, "calls": written.seconds, "calls_per_turn": CALLS,
        "torchs_seconds_a_call": torchs, "torchs_recorder_has": states, "load_before": load,
    })  # fmt: skip
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
