"""Training that does not wait: local steps against torch's, a slow rank, a slow link.

Three parts, each in one run. *race*: `LocalSGD` and torch's `PostLocalSGDOptimizer` with its two averagers do the same
work, and end with the same weights to the bit and the same bytes; the target is torch's time. *slow rank*: a server
and four workers, of which one takes four times as long, train a small GPT synchronously, with a backup worker, with
bounded staleness and without a bound, each at the rate of `RATES` that ends lowest. *slow link*: data parallelism,
local SGD and DiLoCo on four nodes with a thin cable each, with 1 to 64 local steps, over three seeds. What a worker
computes takes milliseconds: a sleep stands for the rest, so that two cores are enough for five ranks. Losses are of a
part of the text that nobody trains on, and are computed after the clock has stopped.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import asynchrony, dp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory.units import MB, format_bytes, format_seconds

WORLD_SIZES, LOCAL_STEPS, NODE_STEPS, ROUNDS = (2, 4), 4, 2, 15
RACED = GPTConfig(num_layers=4, hidden=256, seq=16)
SMALL = GPTConfig(num_layers=1, hidden=48, seq=32)
SEEDS, HELD_OUT = (0, 1, 2), 4000  # bytes at the end of the text

WORKERS, FAST_S, SLOW_S, DURATION_S, BATCH = 4, 0.04, 0.16, 8.0, 4
RATES = (0.05, 0.1, 0.2, 0.4)
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"collect": WORKERS},
    "one backup worker": {"collect": WORKERS - 1, "drop_stale": True},
    "staleness bounded by 4": {"bound": 4},
    "asynchronous": {},
    "asynchronous, rate over τ + 1": {"rate_of_staleness": lambda delay: 1 / (delay + 1)},
}

LINK, STEPS, PERIODS = 6 * MB, 256, (1, 4, 16, 64)
INNER_RATE, OUTER_RATE = 3e-3, 0.7
Made = tuple[nn.Module, Any]


def split_text() -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on, and what is not."""
    text = load_text()
    return text[:-HELD_OUT], text[-HELD_OUT:]


def held_out_loss(model: nn.Module) -> float:
    """In nats a byte, on 64 sequences of the text that nobody trains on."""
    tokens, targets = next(batches(split_text()[1], batch=64, seq=SMALL.seq, seed=1))
    with torch.no_grad():
        return next_token_loss(model(tokens), targets).item()


# race


def ours(model: nn.Module, inside: Any) -> Any:
    """Local steps of this library; inside of nodes of two more often, if there are any."""
    options = {} if inside is None else {"inside": (NODE_STEPS, inside)}
    return asynchrony.LocalSGD(model, sgd(model), local_steps=LOCAL_STEPS, **options)


def torchs(model: nn.Module, inside: Any) -> Any:
    """The same of torch, whose counters begin with 0: it would meet after the first step, as we do after the fourth."""
    if inside is None:
        return PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(LOCAL_STEPS, warmup_steps=LOCAL_STEPS - 1))
    sizes = OrderedDict([(NODE_STEPS, 2), (LOCAL_STEPS, dist.get_world_size())])
    averager = HierarchicalModelAverager(period_group_size_dict=sizes)
    averager.step = 1
    return PostLocalSGDOptimizer(sgd(model), averager)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer of the race."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Contender:
    """A model and its optimizer, which trains until all have met once more."""

    def __init__(self, make: Callable[[nn.Module, Any], Any], config: GPTConfig, inside: Any) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self.model = GPT(config)
        self.optimizer = make(self.model, inside)
        self.data = batches(load_text(), batch=n, seq=config.seq, rank=rank, world_size=n)

    def period(self) -> None:
        """The steps from one meeting to the next."""
        for _ in range(LOCAL_STEPS):
            tokens, targets = next(self.data)
            self.optimizer.zero_grad()
            next_token_loss(self.model(tokens), targets).backward()
            self.optimizer.step()


def measured(config: GPTConfig, on_two_levels: bool, rounds: int) -> tuple[lab.Race, dict[str, int], bool]:
    """In a rank: the race; by contender the bytes of all ranks in a period; whether weights end the same."""
    warnings.simplefilter("ignore")
    inside = Mesh({"node": dist.get_world_size() // 2, "card": 2}).group("card") if on_two_levels else None
    contenders = {name: Contender(make, config, inside) for name, make in (("ours", ours), ("torch's", torchs))}
    sent = {}
    for name, one in contenders.items():
        one.period()
        with lab.wire() as wire:
            one.period()
        sent[name] = wire.total_bytes
    race = lab.race({name: one.period for name, one in contenders.items()}, rounds=rounds)
    weights = [parameters_to_vector(one.model.parameters()) for one in contenders.values()]
    return race, sent, torch.equal(*weights)


def the_race() -> list[dict[str, Any]]:
    """Run, print, and return what is kept."""
    rows, records = [], []
    for n, on_two_levels in [*((n, False) for n in WORLD_SIZES), (4, True)]:
        race, sent, same = lab.run(measured, n, args=(RACED, on_two_levels, ROUNDS), timeout_s=300)[0]
        ratio, cpu = race.ratio("ours", "torch's"), race.cpu_ratio("ours", "torch's")
        what = f"a node of 2 every {NODE_STEPS}, all every {LOCAL_STEPS}" if on_two_levels else f"every {LOCAL_STEPS}"
        times = [format_seconds(race.median(each)) for each in ("ours", "torch's")]
        rows.append([what, str(n), *times, *ratio_cells(ratio), f"{cpu.median:.3f}", *map(format_bytes, sent.values())])
        record = {"meeting": what, "ranks": n, "ratio": ratio.median, "middle_half": ratio[1:], "same_weights": same}
        records.append({**record, "total_bytes": list(sent.values()), "cpu_ratio": cpu.median})
        equal = same and len(set(sent.values())) == 1
        good, told = "✓" if equal and ratio.median <= 1 else "✗ missed", "the same" if equal else "differ"
        console.print(
            f"{good} {what}, {n} ranks: {ratio.median:.3f} of torch's time (at most 1); weights and bytes {told}"
        )
    columns = ["all meet", "ranks", "ours", "torch's", "ratio", "middle half", "core time", "sent by all", "torch's"]
    print_table(f"{LOCAL_STEPS} local steps and a meeting, against torch's averagers", columns, rows)
    return records


# slow rank


class Recording(torch.optim.SGD):
    """SGD that keeps every so many of the weights that it has made, and when."""

    def __init__(self, parameters: list[nn.Parameter], rate: float, every: int) -> None:
        super().__init__(parameters, lr=rate)
        self.every, self.made, self.kept = every, 0, list[tuple[int, float, torch.Tensor]]()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then keep."""
        super().step(closure)
        self.made += 1
        if self.made % self.every == 0:
            self.kept.append((self.made, time.perf_counter(), self.param_groups[0]["params"][0].detach().clone()))


def updates_in(seconds: float, mode: str) -> int:
    """How many updates a server makes in so many seconds at most, of what workers sleep."""
    rates = sorted([1 / FAST_S] * (WORKERS - 1) + [1 / SLOW_S])
    options = MODES[mode]
    if "collect" in options:
        return int(seconds * (rates[0] if options["collect"] == WORKERS else rates[1]))
    return int(seconds * (WORKERS * rates[0] if "bound" in options else sum(rates)))


def with_slow_rank(mode: str, rate: float, seed: int, seconds: float) -> dict[str, Any]:
    """In a rank: train; from the server, rank 0, the curve and what its log says."""
    rank, model, recording = dist.get_rank(), GPT(SMALL, seed=seed), list[Recording]()
    if rank == 0:

        def optimizer(parameters: list[nn.Parameter]) -> Recording:
            recording.append(Recording(parameters, rate, max(1, updates // 30)))
            return recording[0]

        updates, began = updates_in(seconds, mode), time.perf_counter()
        log = asynchrony.serve(model, optimizer, updates=updates, **MODES[mode])
        losses = []
        for _, _, weights in recording[0].kept:
            vector_to_parameters(weights, model.parameters())
            losses.append(held_out_loss(model))
        delays = [each.staleness for each in log if each.used]
        pushes = [sum(each.worker == worker for each in log) for worker in range(1, WORKERS + 1)]
        curve = {
            "updates": [made for made, _, _ in recording[0].kept],
            "seconds": [round(at - began, 3) for _, at, _ in recording[0].kept],
            "losses": [round(each, 4) for each in losses],
        }
        return {**curve, "used": len(delays), "dropped": len(log) - len(delays), "pushes": pushes,
                "mean_staleness": sum(delays) / len(delays), "max_staleness": max(delays)}  # fmt: skip
    data = batches(split_text()[0], batch=WORKERS * BATCH, seq=SMALL.seq, seed=seed, rank=rank - 1, world_size=WORKERS)

    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = next(data)
        time.sleep(SLOW_S if rank == WORKERS else FAST_S)
        return next_token_loss(model(tokens), targets)

    asynchrony.work(model, loss_of)
    return {}


def slow_rank(duration_s: float = DURATION_S) -> list[dict[str, Any]]:
    """Run, print, and return what is kept: each mode's rate is chosen with the first seed, in half the time."""
    rows, records = [], []
    for mode in MODES:
        train = partial(lab.run, with_slow_rank, WORKERS + 1, timeout_s=300)
        tried = {rate: train(args=(mode, rate, SEEDS[0], duration_s / 2))[0]["losses"][-1] for rate in RATES}
        rate = min(tried, key=lambda each: tried[each] if tried[each] == tried[each] else float("inf"))
        runs = [train(args=(mode, rate, seed, duration_s))[0] for seed in SEEDS]
        records.append(
            {"mode": mode, "rate": rate, "tried": tried, "runs": dict(zip(map(str, SEEDS), runs, strict=True))}
        )
        mean = [sum(run[key] for run in runs) / len(runs) for key in ("used", "mean_staleness")]
        took, loss = (sum(run[key][-1] for run in runs) / len(runs) for key in ("seconds", "losses"))
        rows.append([mode, f"{rate:g}", f"{mean[0] / took:.0f}", f"{mean[1]:.2f}", f"{took:.1f} s", f"{loss:.3f}"])
    columns = ["mode", "rate", "gradients a second", "mean τ", "time", "loss at the end"]
    print_table(f"{WORKERS} workers, one takes {SLOW_S / FAST_S:g} times as long", columns, rows)
    return records


# slow link


def data_parallel(model: nn.Module, local_steps: int) -> Made:
    """The mean gradient at each step."""
    wrapped = dp.BucketedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=INNER_RATE)


def local_sgd(model: nn.Module, local_steps: int) -> Made:
    """The mean of the weights."""
    inner = torch.optim.AdamW(model.parameters(), lr=INNER_RATE)
    return model, asynchrony.LocalSGD(model, inner, local_steps=local_steps)


def diloco(model: nn.Module, local_steps: int, momentum: float = 0.9) -> Made:
    """A step of Nesterov's momentum along the mean of what the weights have moved; by default with DiLoCo's numbers."""
    outer = partial(torch.optim.SGD, lr=OUTER_RATE, momentum=momentum, nesterov=True)
    inner = torch.optim.AdamW(model.parameters(), lr=INNER_RATE)
    return model, asynchrony.LocalSGD(model, inner, local_steps=local_steps, outer=outer)


WAYS: dict[str, Callable[[nn.Module, int], Made]] = {
    "data parallelism": data_parallel,
    "local SGD": local_sgd,
    "DiLoCo": diloco,
    "DiLoCo, outer momentum 0.5": partial(diloco, momentum=0.5),
}


def on_slow_link(way: str, local_steps: int, seed: int, steps: int) -> dict[str, Any]:
    """In a rank: train; the curve at meetings, eight steps apart at least, and what a rank sent on its cable."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = WAYS[way](GPT(SMALL, seed=seed), local_steps)
    data = batches(split_text()[0], batch=n * BATCH, seq=SMALL.seq, seed=seed, rank=rank, world_size=n)
    kept = []
    with lab.wire() as wire:
        lab.barrier()
        began = time.perf_counter()
        for step in range(1, steps + 1):
            tokens, targets = next(data)
            optimizer.zero_grad()
            next_token_loss(model(tokens), targets).backward()
            optimizer.step()
            if step % max(local_steps, 8) == 0:
                weights = parameters_to_vector(model.parameters()).detach().clone()
                kept.append((step, time.perf_counter() - began, weights))
    judge, losses = GPT(SMALL), []
    for _, _, weights in kept if rank == 0 else ():
        vector_to_parameters(weights, judge.parameters())
        losses.append(round(held_out_loss(judge), 4))
    times = [round(seconds, 3) for _, seconds, _ in kept]
    return {"steps": [s for s, _, _ in kept], "seconds": times, "losses": losses, "sent_bytes": wire.sent_bytes}


def slow_link(steps: int = STEPS) -> list[dict[str, Any]]:
    """Run, print, and return what is kept."""
    cluster = lab.cluster(4, 1, inside=100 * MB, across=LINK)
    cases = [("data parallelism", 1), *((way, h) for way in list(WAYS)[1:] for h in PERIODS)]
    records = []
    for way, h in cases:
        train = partial(lab.run, on_slow_link, cluster=cluster, timeout_s=300)
        runs = {str(seed): train(args=(way, h, seed, steps))[0] for seed in SEEDS}
        records.append({"way": way, "local_steps": h, "runs": runs})
    target = max(run["losses"][-1] for run in records[0]["runs"].values())  # what data parallelism reaches with each
    rows = []
    for record in records:
        runs = list(record["runs"].values())
        reached = [next((s for s, each in zip(run["seconds"], run["losses"], strict=True) if each <= target), None)
                   for run in runs]  # fmt: skip
        record["seconds_to_target"] = reached
        loss, took = (sum(run[key][-1] for run in runs) / len(runs) for key in ("losses", "seconds"))
        told = ", ".join("not" if each is None else f"{each:.1f} s" for each in reached)
        sent = format_bytes(runs[0]["sent_bytes"])
        rows.append([record["way"], str(record["local_steps"]), sent, f"{took:.1f} s", f"{loss:.3f}", told])
    columns = ["way", "local steps", "sent by a rank", "time", "loss at the end", f"until {target:.3f}, by seed"]
    print_table(f"{steps} steps on four nodes with {LINK / MB:g} MB/s each", columns, rows)
    return records


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    race = the_race()
    slow = {"workers": WORKERS, "fast_seconds": FAST_S, "slow_seconds": SLOW_S, "modes": slow_rank()}
    full_bytes = 4 * sum(each.numel() for each in GPT(SMALL).parameters())
    link = {"link_bytes_per_s": LINK, "nodes": 4, "full_bytes": full_bytes, "ways": slow_link()}
    path = save("asynchrony", {"race": race, "slow_rank": slow, "slow_link": link, "load_before": load})
    console.print(f"load of the machine before: {load:.1f}")
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
