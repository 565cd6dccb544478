"""What a slow link costs: two nodes of four ranks on this machine, joined by links that the kernel shapes.

Four plans of an all-reduce beside what α–β says of them; a training step with each axis on each link; and ZeRO 3 over
all ranks beside hybrid sharding. Each table is one run, in which all take turns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks._report import print_table, ratio_cells, save
from dtlib import lab, ranks, theory
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.units import MB, KiB, MiB, format_bytes, format_rate, format_seconds

G, ROUNDS = 4, 5
LINKS = lab.cluster(2, G, inside=40 * MB, across=4 * MB)
BUFFERS = (64 * KiB, 256 * KiB, MiB, 4 * MiB)
CONFIG = GPTConfig(num_layers=2, hidden=128, num_heads=4, seq=128, vocab=64, tied=False)
MESHES: dict[str, dict[str, int]] = {
    "tp inside, dp across": {"dp": 2, "tp": G},
    "tp across, dp inside": {"tp": G, "dp": 2},
    "tp inside, pp across": {"pp": 2, "tp": G},
    "tp across, pp inside": {"tp": G, "pp": 2},
}

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def all_reduces(full_bytes: int) -> lab.Race:
    """In a rank: the four plans in turn."""
    of_nodes: dict[str, Any] = {
        "parallel_rings": ranks.collectives.parallel_rings_all_reduce,
        "two_level": ranks.collectives.two_level_all_reduce,
    }
    plans: dict[str, Any] = {"flat_ring": ranks.collectives.ring_all_reduce}
    plans |= {name: functools.partial(each, ranks_per_node=G) for name, each in of_nodes.items()}
    plans["flat_tree"] = ranks.collectives.tree_all_reduce
    tensor = torch.ones(full_bytes // 4)
    return lab.race({name: functools.partial(each, tensor) for name, each in plans.items()}, rounds=ROUNDS)


def steps() -> tuple[lab.Race, dict[str, tuple[int, int]]]:
    """In a rank: a step on each mesh in turn, and the bytes on its two cables."""
    taken, sent = {}, {}
    tokens = torch.randint(CONFIG.vocab, (2, CONFIG.seq + 1))
    for name, axes in MESHES.items():
        schedule = theory.pp.one_f_one_b(axes.get("pp", 1), 2)
        training = ranks.threed.Training(GPT(CONFIG), Mesh(axes), adamw, schedule=schedule)
        taken[name] = functools.partial(training.step, tokens[:, :-1], tokens[:, 1:])
        taken[name]()
        with lab.wire() as wire:
            taken[name]()
        sent[name] = wire.inside_bytes, wire.across_bytes
    return lab.race(taken, rounds=ROUNDS), sent


def shardings() -> tuple[lab.Race, dict[str, tuple[int, int]]]:
    """In a rank: a step of ZeRO 3 over all ranks and over those of the node, and the bytes on its two cables."""
    mesh, taken, sent = Mesh({"across": 2, "inside": G}), {}, {}
    groups = {"ZeRO 3 over all": {}, "hybrid": {"group": mesh.group("inside"), "replicas": mesh.group("across")}}
    tokens = torch.randint(CONFIG.vocab, (1, CONFIG.seq + 1))

    def step(model: Any) -> None:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    for name, over in groups.items():
        model = GPT(CONFIG)
        sharded = ranks.zero.Zero(model, adamw, stage=3, units=model.blocks, **over)
        taken[name] = functools.partial(step, sharded)
        taken[name]()
        with lab.wire() as wire:
            taken[name]()
        sent[name] = wire.inside_bytes, wire.across_bytes
    return lab.race(taken, rounds=ROUNDS), sent


def main() -> None:
    """Measure, print, save."""
    rows, records = [], []
    for size in BUFFERS:
        race, told = lab.run(all_reduces, args=(size,), cluster=LINKS, timeout_s=300)[0], {}
        told = theory.cluster.plans("all_reduce", LINKS, size)
        for plan in race.seconds:
            took = race.median(plan)
            cells = format_seconds(told[plan]), format_seconds(took), f"{took / told[plan]:.3f}"
            rows.append([plan, format_bytes(size), *cells])
            records.append({"plan": plan, "full_bytes": size, "theory": told[plan], "seconds": race.seconds[plan]})
    links = f"{format_rate(LINKS.inside_bytes_per_s)} inside, {format_rate(LINKS.across_bytes_per_s)} across"
    print_table(f"All-reduce on {links}", ["", "buffer", "α–β", "measured", "over α–β"], rows)
    found: dict[str, Any] = {"links": links, "all_reduce": records}
    for title, measured in (("A step by placement of its axes", steps), ("A step by sharding", shardings)):
        by_rank = lab.run(measured, cluster=LINKS, timeout_s=300)
        race, first, rows = by_rank[0][0], next(iter(by_rank[0][0].seconds)), []
        for name in race.seconds:
            inside, across = (sum(sent[name][cable] for _, sent in by_rank) for cable in (0, 1))
            ratio = race.ratio(name, first)
            took = format_seconds(race.median(name))
            rows.append([name, took, *ratio_cells(ratio), format_bytes(inside), format_bytes(across)])
            record = {"name": name, "ratio": ratio, "inside_bytes": inside, "across_bytes": across}
            found.setdefault(measured.__name__, []).append(record | {"seconds": race.seconds[name]})
        print_table(title, ["", "step", f"over {first}", "middle half", "all inside", "all across"], rows)
    save("cluster", found)


if __name__ == "__main__":
    main()
