"""planner.5: a planner that has to beat a naive one, judged by the course's own; on paper."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dtlib.grading.compare import show
from dtlib.grading.exercise import Finding, FormError
from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, order
from dtlib.grading.seen import Observed
from dtlib.theory import hardware, models, planner

PARTS = "(dp, tp, pp, ZeRO stage, micro-batch, computed again)"

#: Model, card, cards, ranks of a node, sequences of a step.
KINDS = (
    ("llama3-8b", "H100", 64, 8, 512), ("llama3-8b", "A100", 16, 8, 256), ("llama2-13b", "A100", 64, 4, 1024),
    ("llama3-70b", "H100", 128, 8, 512), ("llama3-70b", "A100", 512, 8, 512), ("gpt3-175b", "A100", 256, 8, 2048),
    ("gpt3-175b", "H100", 1024, 8, 2048),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind in any order."""
    return [case(*KINDS[kind]) for kind in rng.permutation(len(KINDS))]


def case(name: str, card: str, cards: int, node: int, sequences: int) -> dict[str, Any]:
    model, machine = known(name, card, cards, node)
    of = machine.accelerator
    job = {
        "layers": model.num_layers, "hidden": model.hidden, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "vocab": model.vocab, "seq": model.seq, "params": models.model_parameters(model).total, "sequences": sequences,
        "cards": cards, "node": node, "card_bytes": of.memory_bytes, "rate": of.half_flop_per_s,
        "inside": of.link.link_bytes_per_s, "across": machine.network.link_bytes_per_s,
    }  # fmt: skip
    words = f"{name} on {cards} {card} in nodes of {node}, {sequences} sequences a step"
    slow, best = limits(name, card, cards, node, sequences)
    return call(words, [job]) | {"named": [name, card, cards, node, sequences], "naive": slow, "best": best}


@cache
def limits(name: str, card: str, cards: int, node: int, sequences: int) -> tuple[float, float]:
    """Seconds of the naive plan, and of the best."""
    model, machine = known(name, card, cards, node)
    best = planner.search(model, machine, sequences=sequences, keep=1).best.time.total
    return naive(model, machine, sequences), best


def known(name: str, card: str, cards: int, node: int) -> tuple[models.Architecture, planner.Machine]:
    return models.model(name), planner.Machine(accelerator=hardware.accelerator(card), gpus=cards, node=node)


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


def planned(observed: Observed) -> tuple[float, str]:
    """The seconds of the plan that was returned and whether it fits; (inf, why) where it is no plan of this machine."""
    answer, (name, card, cards, node, sequences) = observed.said[0]["answer"], observed.case["named"]
    entries = list(answer) if isinstance(answer, list | np.ndarray) else [answer]
    if len(entries) != 6 or not all(isinstance(each, int | bool | np.integer) for each in entries):
        raise FormError(show(answer), f"a tuple {PARTS} of whole numbers and a bool")
    dp, tp, pp, zero, micro_batch = map(int, entries[:5])
    model, machine = known(name, card, cards, node)
    try:
        if min(dp, tp, pp, micro_batch) < 1 or sequences % (dp * micro_batch):
            return float("inf"), f"dp · micro-batch has to divide the {sequences} sequences"
        plan = planner.Plan(
            dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=micro_batch, micro_batches=sequences // dp // micro_batch,
            sequence_parallel=tp > 1, recompute="full" if entries[5] else "none",
        )  # fmt: skip
        seconds = planner.step_time(model, plan, machine).total
        verdict = planner.fit(planner.plan_memory(model, plan), machine).verdict
    except ValueError as error:
        return float("inf"), str(error)
    return seconds, "" if verdict == "yes" else "it does not fit with its margin"


def agrees(observed: Observed, other: Any) -> bool:
    return list(np.ravel(observed.said[0]["answer"])) == list(np.ravel(other))


def find_unfit(observed: Observed) -> Finding | None:
    _, why = planned(observed)
    return Finding(f"{show(observed.said[0]['answer'])}: {why}", "a plan that fits", observed.words) if why else None


def slower_than(most: Any) -> Any:
    def find(observed: Observed) -> Finding | None:
        seconds, limit = planned(observed)[0], most(observed.case)
        told = f"{show(observed.said[0]['answer'])}, {seconds:.3g} s"
        return None if seconds <= limit else Finding(told, f"at most {limit:.3g} s", observed.words)

    return find


def beaten(case: Case) -> float:
    return float(case["naive"]) / 1.02


def near_the_best(case: Case) -> float:
    return 1.25 * float(case["best"])


EXERCISE = on_paper(
    "planner.5", "own_plan", "Beat the naive plan", draw,
    order(3, "fits", "a plan of this machine that fits", find_unfit, kind="value", agrees=agrees),
    order(3, "beats", "faster than the naive plan", slower_than(beaten), kind="value", agrees=agrees),
    order(2, "near", "within a quarter of the best there is", slower_than(near_the_best), kind="value", agrees=agrees),
)  # fmt: skip
