"""pp.6: one loop that carries out any schedule, forward and backward, on ranks that have a stage each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import messages_alone, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Theory, Wrong, every, only_if
from dtlib.theory import pp

RTOL_SHOWN = 1e-2
RTOL, ATOL = 1e-4, 1e-5  # float32, sums of some dozen numbers around 1
GIVEN, REVERSED, MIXED, OWN = "as numbered", "back in reverse", "mixed", "each rank in an order of its own"


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Schedules of two ranks and more, micro-batches of different sizes, in their order and in others, a single
    one; and ranks that go through micro-batches of one size each in an order of its own."""
    cases = []
    for n, schedule, m, way in (
        (2, "1F1B", 4, GIVEN), (3, "GPipe", 3, GIVEN), (4, "1F1B", 6, GIVEN), (2, "sequential", 3, MIXED),
        (3, "GPipe", 4, REVERSED), (4, "1F1B", 3, MIXED), (3, "1F1B", 7, MIXED), (2, "1F1B", 1, GIVEN),
        (3, "GPipe", 4, OWN), (2, "GPipe", 3, OWN),
    ):  # fmt: skip
        actions = [[(kind, i) for kind, _, i, _ in own] for own in pp.SCHEDULES[schedule](n, m).actions]
        places = rng.permutation(m).tolist() if way == MIXED else list(range(m))
        if way == REVERSED:
            actions = [[(kind, m - 1 - i if kind == "B" else i) for kind, i in own] for own in actions]
        told = [[[kind, places[i]] for kind, i in own] for own in actions]
        rows = [int(each) for each in 2 + rng.permutation(3 * m)[:m]]
        if way == OWN:  # a rank goes forward through the micro-batches of the one before it from the next one on
            told = [
                [[kind, (i + (rank if kind == "F" else 2 * rank + 1)) % m] for kind, i in own]
                for rank, own in enumerate(actions)
            ]
            rows = rows[:1] * m
        words = f"{n} ranks, {schedule} of {m} micro-batches, {way}"
        drawn = {"world_size": n, "actions": told, "rows": rows, "width": int(rng.integers(6, 12)), "words": words}
        seeds = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
        cases.append(drawn | seeds | {"is": {"two ranks": n == 2, "one micro-batch": m == 1, "one order": way != OWN}})
    return cases


def unknown(case: Case, name: str, *shape: int, largest: float = 1.5) -> Any:
    """A tensor that no rank can make of what it is told."""
    return inputs.noise({**case, "weights_seed": case["seed"]}, name, shape, largest)


def weight(case: Case, rank: int) -> Any:
    width = case["width"]
    return unknown(case, f"weight {rank}", width, width, largest=(3 / width) ** 0.5)


def batch(case: Case, name: str, i: int) -> Any:
    return unknown(case, f"{name} {i}", case["rows"][i], case["width"])


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start = {"actions": case["actions"][rank], "rows": case["rows"], "weight": weight(case, rank)}
    batches = [batch(case, "x", i) for i in range(len(case["rows"]))] if rank == 0 else None
    return [("start", start | {"inputs": batches, "is_last": rank == case["world_size"] - 1})]


def named(case: Case, rank: int) -> dict[str, Any]:
    """By what the stage multiplies its output, and what comes back to it; on the last rank what a loss adds up with."""
    found = {way: 1 + unknown(case, f"{way} {rank}", case["width"], largest=0.5) for way in ("forward", "back")}
    if rank == case["world_size"] - 1:
        found |= {f"loss {i}": batch(case, "loss", i) for i in range(len(case["rows"]))}
    return found


@oracle.remembered
def passes(case: Case) -> list[tuple[float, list[Any], dict[str, list[float]]]]:
    """Of each micro-batch its loss, and of each rank the gradient of the weights; then the norms of what goes forward
    in each stage and of what comes back to it."""
    ranks, found = range(case["world_size"]), []
    keys = [named(case, rank) for rank in ranks]
    for i in range(len(case["rows"])):
        x, kept = batch(case, "x", i).astype(float), []
        for rank in ranks:
            y = np.tanh(x @ weight(case, rank).T)
            kept.append((x, y))
            x = y * keys[rank]["forward"]
        gradient = keys[-1][f"loss {i}"]
        loss = float((x * gradient).sum())
        own: list[Any] = []
        norms = {"forward": [float(np.linalg.norm(y)) for _, y in kept], "back": [0.0] * len(kept)}
        for rank in reversed(ranks):
            x, y = kept[rank]
            norms["back"][rank] = float(np.linalg.norm(gradient))
            of_product = gradient * keys[rank]["back"] * keys[rank]["forward"] * (1 - y**2)
            own.insert(0, of_product.T @ x)
            gradient = of_product @ weight(case, rank)
        found.append((loss, own, norms))
    return found


def back(case: Case, rank: int) -> list[int]:
    """The micro-batches of a rank in the order in which they go back."""
    return [i for kind, i in case["actions"][rank] if kind == "B"]


def gradients(
    chosen: Callable[[Case, int], list[int]] = back, times: Callable[[Case], float] = lambda case: 1
) -> Theory:
    """Of each rank the sum over such micro-batches, so many times."""

    def theory(case: Case) -> list[Any]:
        ranks = range(case["world_size"])
        return [times(case) * sum(passes(case)[i][1][rank] for i in chosen(case, rank)) for rank in ranks]

    return theory


def loss(formula: Callable[[list[float], list[int]], float]) -> Theory:
    """Of the last rank what a formula makes of the losses, and of the order in which they are computed."""

    def theory(case: Case) -> list[Any]:
        last = case["world_size"] - 1
        forward = [i for kind, i in case["actions"][last] if kind == "F"]
        return [None] * last + [formula([each[0] for each in passes(case)], forward)]

    return theory


def least_sent(case: Case) -> float:
    return 2.0 * (case["world_size"] - 1) * oracle.FLOAT_BYTES * sum(case["rows"]) * case["width"]


def find_order(observed: Observed) -> Finding | None:
    """That a stage went forward and back in another order than the schedule says."""
    for rank, own in enumerate(observed.case["actions"]):
        wanted = "".join(kind for kind, _ in own)
        if (seen := went(observed, rank)) != wanted:
            return Finding(f"{seen or 'nothing'} on rank {rank}", wanted, observed.words)
        for kind, way in (("F", "forward"), ("B", "back")):
            chosen = [i for each, i in own if each == kind]
            shown = [ask.shown for ask in observed.seen.asked(rank, way)]
            factors = np.divide(shown, [passes(observed.case)[i][2][way][rank] for i in chosen])
            if not np.all(np.abs(factors - factors[0]) <= RTOL_SHOWN * np.abs(factors[0])):  # NaN neither
                told = f"rank {rank} went {way} in advance, or with other micro-batches or values"
                return Finding(told, f"{', '.join(map(str, chosen))} in turn", observed.words)
    return None


def went(observed: Observed, rank: int) -> str:
    """The order in which a stage went forward and back."""
    labels = {"forward": "F", "back": "B"}
    return "".join(labels[each.label] for each in observed.seen.asks if each.rank == rank and each.label in labels)


def another_order(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether each stage went forward and back as often as it should, and somewhere in another order."""
    seen = [went(each, rank) for each in failing for rank in range(len(each.said))]
    wanted = ["".join(kind for kind, _ in own) for each in failing for own in each.case["actions"][: len(each.said)]]
    return seen != wanted and list(map(sorted, seen)) == list(map(sorted, wanted))


def find_messages(observed: Observed) -> Finding | None:
    """That a rank sent its neighbours something else than the schedule says, or in another order."""
    case, sent = observed.case, observed.seen.data("send")
    for rank, own in enumerate(case["actions"]):
        for of, peer in (("F", rank + 1), ("B", rank - 1)):
            seen = [each.num_bytes for each in sent if (each.rank, each.peer) == (rank, peer)]
            there = 0 <= peer < case["world_size"]
            wanted = [oracle.FLOAT_BYTES * case["rows"][i] * case["width"] for kind, i in own if kind == of and there]
            if seen != wanted:
                told = [", ".join(map(show_bytes, each)) or "nothing" for each in (seen, wanted)]
                return Finding(f"{told[0]} sent by rank {rank} to {peer}", told[1], observed.words)
    return None


def more_messages(each: Observed) -> bool:
    """Whether there were more of them than there should be."""
    micro_batches, n = len(each.case["rows"]), each.case["world_size"]
    return len(each.seen.data("send")) > 2 * (n - 1) * micro_batches


def misfit(each: Observed) -> bool:
    """Whether a gradient did not fit: where lengths are alike, the numbers alone are wrong."""
    return each.trouble is not None and "grad_output" in each.trouble.text


ALIKE = only_if(lambda case: len(set(case["rows"])) == 1)
GRADIENTS: Wrong = {
    "right for micro-batches of one size": ALIKE,
    "messages taken for each other": only_if("one order"),
    "the last one alone": gradients(lambda case, rank: back(case, rank)[-1:]),
    "divided by the micro-batches": gradients(times=lambda case: 1 / len(case["rows"])),
    "another micro-batch": Sign(lambda failing, passing: any(map(misfit, failing))),
}
LOSS: Wrong = {
    "right for micro-batches of one size": ALIKE,
    "messages taken for each other": only_if("one order"),
    "the last one alone": loss(lambda losses, forward: losses[forward[-1]]),
    "mean for a sum": loss(lambda losses, forward: sum(losses) / len(losses)),
}

EXERCISE = Exercise(
    id="pp.6", function="run_schedule", title="One loop for every schedule", harness="pp.executor", draw=draw,
    handed_out=handed_out, named=named,
    checks=(
        own_work("run_schedule", built_in=True),
        messages_alone(1, "run_schedule"),
        values(3, "gradients", "the gradients of each rank's stage", gradients(), of="gradient", wrong=GRADIENTS,
               rtol=RTOL, atol=ATOL, kind="gradient", least_sent=least_sent),
        values(1, "loss", "the sum of the losses, on the last rank", loss(lambda each, _: sum(each)), of="loss",
               wrong=LOSS, rtol=RTOL, atol=ATOL, least_sent=least_sent),
        order(3, "order", "each stage goes forward and back in the order of its actions", find_order,
              wrong={"the schedule not looked at": Sign(another_order)}),
        order(2, "traffic", "one activation forward and one gradient back, for each micro-batch and cut", find_messages,
              wrong={"more than it takes": every(more_messages)}, kind="traffic"),
    ),
)  # fmt: skip
