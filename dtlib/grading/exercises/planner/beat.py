"""planner.5: a planner that has to beat a naive one, judged by the course's own; on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Finding, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order
from dtlib.grading.exercises.seen import Observed
from dtlib.grading.exercises.signs import Sign, Wrong
from dtlib.theory import models, planner

from ._naive import known, limits

PARTS = "(dp, tp, pp, ZeRO stage, micro-batch, computed again)"

#: Model, its layers, card, cards, ranks of a node, sequences of a step.
KINDS = (
    ("llama3-8b", 32, "H100", 64, 8, 512), ("llama3-8b", 40, "A100", 32, 8, 256),
    ("llama2-13b", 40, "A100", 64, 4, 1000), ("llama3-70b", 80, "H100", 128, 8, 512),
    ("llama3-70b", 80, "A100", 512, 8, 512), ("llama3-8b", 36, "A100", 16, 8, 256),
    ("gpt3-175b", 96, "A100", 256, 8, 2048), ("gpt3-175b", 96, "H100", 1024, 8, 2048),
)  # fmt: skip
#: Where nothing fits unless it is computed again, with the factors of the rates inside and across, and the tokens of a
#: sequence; one with few sequences, for which a pipeline fills and drains.
LONG = (
    (("llama3-8b", 32, "A100", 8, 8, 64), 1.0, 1.0, 65536), (("llama3-70b", 80, "H100", 64, 8, 256), 1.0, 1.0, 16384),
    (("gpt3-175b", 96, "H100", 256, 4, 32), 1.0, 0.02, 32768),
)  # fmt: skip
#: Machines and models on which what the others have alike decides, with the same: a card of another size and rate on a
#: slow link; small nodes far apart; heads that tp 8 does not divide; heads of keys that tp 4 does not divide, 24 and 6;
#: a fast link inside, and a slow one across.
ODD: tuple[tuple[Any, ...], ...] = (
    (("bloom-7.1b", 30, "B200", 8, 8, 256), 0.1, 1.0, 16384), (("bloom-3b", 30, "H100", 16, 2, 64), 1.0, 0.05, 8192),
    (("qwen2.5-7b", 28, "A100", 128, 16, 384), 1.0, 0.02, 16384),
    (("qwen2.5-7b", 28, "H100", 32, 8, 384), 1.0, 0.05, 16384, 24, 6),
    (("gpt3-175b", 96, "B200", 128, 8, 128), 1.0, 0.02, 8192),
)  # fmt: skip
#: What machines are drawn from beside them: model, layers, card, the least cards and sequences.
DRAWN = (
    ("llama3-8b", (24, 28, 36, 40), "A100", 16, 256), ("llama2-13b", (32, 36, 44, 48), "H100", 32, 1024),
    ("llama3-70b", (64, 72, 76, 84), "H100", 128, 1024),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind, and machines that nobody has seen before, in any order."""
    cases = [case(*kind, 1.0, 1.0) for kind in KINDS]
    cases += [case(*kind, *more) for kind, *more in (*LONG, *ODD)]
    for name, layers, card, cards, sequences in DRAWN:
        more, longer = (2 ** int(rng.integers(3)) for _ in range(2))
        inside, across = (float(rng.uniform(0.8, 1.2)) for _ in range(2))
        cases.append(case(name, int(rng.choice(layers)), card, more * cards, 8, longer * sequences, inside, across))
    return [cases[place] for place in rng.permutation(len(cases))]


def case(
    name: str, layers: int, card: str, cards: int, node: int, sequences: int, inside: float, across: float,
    seq: int = 0, heads: int = 0, kv_heads: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`inside` and `across` are factors of the rates of the links; `seq`, `heads` and `kv_heads` are given where they
    are not the model's own."""
    named = (name, layers, card, cards, node, inside, across, seq, heads, kv_heads)
    model, machine = known(*named)
    of = machine.accelerator
    job = {
        "layers": layers, "hidden": model.hidden, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "vocab": model.vocab, "seq": model.seq, "params": models.model_parameters(model).total, "sequences": sequences,
        "cards": cards, "node": node, "card_bytes": of.memory_bytes, "rate": float(of.half_flop_per_s),
        "inside": of.link.link_bytes_per_s, "across": machine.network.link_bytes_per_s,
    }  # fmt: skip
    told = f", {seq} tokens each" * bool(seq) + f", {heads} heads and {kv_heads} of keys" * bool(heads)
    told += f", links {inside:g} and {across:g} times as fast as theirs" * bool({inside, across} != {1.0})
    words = f"{layers} layers of {name} on {cards} {card} in nodes of {node}, {sequences} sequences a step{told}"
    slow, best = limits(sequences, *named)
    is_long = (name, layers, card, cards, node, sequences) in [kind for kind, *_ in LONG]
    judged_by = {"named": list(named), "sequences": sequences, "naive": slow, "best": best}
    return call(words, [job], long=is_long) | judged_by


def planned(observed: Observed) -> tuple[float, str]:
    """The seconds of the plan that was returned and whether it fits; (inf, why) where it is no plan of this machine."""
    answer, sequences = observed.said[0]["answer"], observed.case["sequences"]
    answer = answer.tolist() if isinstance(answer, np.ndarray) else answer
    entries = answer if isinstance(answer, list) else [answer]
    if len(entries) != 6 or not all(isinstance(each, int | float) and each == each // 1 for each in entries):
        raise FormError(show(answer), f"a tuple {PARTS} of whole numbers and a bool")
    dp, tp, pp, zero, micro_batch = map(int, entries[:5])
    model, machine = known(*observed.case["named"])
    if min(dp, tp, pp, micro_batch) < 1 or dp * tp * pp != machine.gpus:
        return float("inf"), f"dp · tp · pp has to be the {machine.gpus} cards, and a micro-batch has a sequence"
    if sequences % (dp * micro_batch):
        return float("inf"), f"dp · micro-batch has to divide the {sequences} sequences"
    try:
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


def never_again(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether it goes wrong where all has to be computed again, for want of a plan or with one that would then fit, and
    goes right without."""
    return all(again_it_fits(each) if each.has_come else each.case["is"]["long"] for each in failing) and not any(
        computes_again(each) for each in passing
    )


def computes_again(observed: Observed) -> bool:
    return bool(np.ravel(observed.said[0]["answer"] or 0)[-1])


def again_it_fits(observed: Observed) -> bool:
    """Whether what was returned computes nothing again, and fits if it does."""
    answer = np.ravel(observed.said[0]["answer"] or 0).tolist()
    again = replace(observed, said=({**observed.said[0], "answer": [*answer[:-1], True]},))
    return not computes_again(observed) and (observed.case["is"]["long"] or not planned(again)[1])


WRONG: Wrong = {"nothing computed again": Sign(never_again)}


def slower_than(most: Any) -> Any:
    def find(observed: Observed) -> Finding | None:
        seconds, limit = planned(observed)[0], most(observed.case)
        told = f"{show(observed.said[0]['answer'])}, {f'{seconds:.3g} s' if seconds < np.inf else 'no plan'}"
        return None if seconds <= limit else Finding(told, f"at most {limit:.3g} s", observed.words)

    return find


of = partial(order, wrong=WRONG, kind="value", agrees=agrees)
EXERCISE = on_paper(
    "planner.5", "own_plan", "Beat the naive plan", draw,
    of(3, "fits", "a plan of this machine that fits", find_unfit),
    of(3, "beats", "faster than the naive plan", slower_than(lambda case: case["naive"] / 1.02)),
    of(2, "near", "within a third of the best there is", slower_than(lambda case: 4 / 3 * case["best"])),
)  # fmt: skip
