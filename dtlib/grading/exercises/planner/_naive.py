"""The machines of planner.5, and what a naive plan and the best one take on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from dtlib.theory import hardware, models, planner


def known(
    name: str,
    layers: int,
    card: str,
    cards: int,
    node: int,
    inside: float,
    across: float,
    seq: int,
    heads: int,
    kv: int,
) -> tuple[models.Architecture, planner.Machine]:
    """The model with so many layers, tokens, heads and heads of keys (0: its own), and the machine, whose links' rates
    are multiplied by `inside` and `across`."""
    of, network = hardware.accelerator(card), hardware.LINKS["InfiniBand NDR"]
    of = replace(of, link=replace(of.link, link_bytes_per_s=inside * of.link.link_bytes_per_s))
    network = replace(network, link_bytes_per_s=across * network.link_bytes_per_s)
    machine = planner.Machine(accelerator=of, gpus=cards, node=node, network=network)
    model = models.model(name)
    if heads:
        model = replace(model, num_heads=heads, num_kv_heads=kv, hidden=heads * model.head_dim)
    return replace(model, num_layers=layers, seq=seq or model.seq), machine


@cache
def limits(sequences: int, *named: Any) -> tuple[float, float]:
    """Seconds of the naive plan, and of the best."""
    model, machine = known(*named)
    space = planner.Space(shard=("all",), recompute=("none", "full"))  # as answers can say
    best = planner.search(model, machine, sequences=sequences, keep=1, space=space).best
    return naive(model, machine, sequences), best.time.total


def naive(model: models.Architecture, machine: planner.Machine, sequences: int) -> float:
    """Seconds of: tp over a node, as few stages as fit, everything computed again, no ZeRO, one sequence at a time."""
    tp = max(t for t in models.tp_degrees(model) if t <= machine.node)
    for pp in (p for p in range(1, model.num_layers + 1) if machine.gpus % (tp * p) == 0):
        dp = machine.gpus // (tp * pp)
        if sequences % dp == 0:
            plan = planner.Plan(dp=dp, tp=tp, pp=pp, micro_batches=sequences // dp, recompute="full")
            if planner.fit(planner.plan_memory(model, plan), machine).verdict == "yes":
                return planner.step_time(model, plan, machine).total
    raise ValueError(f"no naive plan of {model.name} fits")
