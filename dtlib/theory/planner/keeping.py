"""What failures leave of a plan's time: how large its saves are, how often it makes them, and its goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtlib.theory import reliability
from dtlib.theory.models import Architecture, model_parameters
from dtlib.theory.timing import Plan
from dtlib.theory.valid import number

from .answer import Answer


@dataclass(frozen=True)
class Keeping:
    """Saves of `save_bytes`, each of `save_seconds`, after every `steps` of a job that fails each `mtbf` seconds.

    `goodput` is the share of its time that is lasting work, by `reliability.goodput`, where a save stops the run;
    `behind_goodput`, by `reliability.background_goodput`, where it is written while the run goes on, after every
    `behind_steps`, and the copy that is written takes no time: what saving in the background comes to at best.
    """

    save_bytes: float
    save_seconds: float
    mtbf: float
    steps: int
    goodput: float
    behind_steps: int
    behind_goodput: float


def keeping(answer: Answer, node_mtbf: float, storage_bytes_per_s: float) -> Keeping:
    """The best plan of `answer`, on nodes that fail each `node_mtbf` seconds, saved at `storage_bytes_per_s` in all.

    What is trained, weights and what the optimizer keeps, once; a restart reads as much at the same rate. A failure is
    noticed at once and a node replaced at once: both add to what is lost. The steps between two saves are those of
    `reliability.best_interval`, a whole number, or as few as a save in the background is written in. ``ValueError``
    unless both are positive.
    """
    nodes = answer.machine.gpus // answer.machine.node
    mtbf = float(reliability.mtbf(nodes, number("node_mtbf", node_mtbf, positive=True)))
    return kept(answer.model, answer.best.plan, answer.best.time.total, mtbf, storage_bytes_per_s)


def kept(model: Architecture, plan: Plan, step: float, mtbf: float, storage_bytes_per_s: float) -> Keeping:
    """`keeping` of a plan whose step takes `step` seconds, in a job that fails each `mtbf` seconds."""
    rate, of = number("storage_bytes_per_s", storage_bytes_per_s, positive=True), plan.adapters
    trained = model_parameters(model).total if of is None else model.num_layers * of.layer_parameters(model)
    size = reliability.save_bytes(trained, plan.recipe)
    seconds = size / rate
    steps = max(1, round(reliability.best_interval(seconds, mtbf) / step))
    share = reliability.goodput(steps * step, seconds, mtbf, restart=seconds)
    behind = max(1, math.ceil(reliability.background_interval(0, seconds, mtbf) / step))
    later = reliability.background_goodput(behind * step, 0, seconds, mtbf, restart=seconds)
    return Keeping(size, seconds, mtbf, steps, share, behind, later)
