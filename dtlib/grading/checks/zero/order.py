"""zero.6: what travels when, in units of all weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.compare import some_rank
from dtlib.grading.exercise import Case, Check, Finding, Run, describe_case

from .network import layer_sizes, layers_bytes


def _phases(data: Mapping[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    """For each step: the events of forward, and those of backward."""
    marks = ("forward", "backward", "done")
    parts: dict[str, list[list[Any]]] = {mark: [] for mark in marks}
    now = None
    for event in data["events"]:
        if event["op"] in marks:
            now = event["op"]
            parts[now].append([])
        elif now:
            parts[now][-1].append(event)
    return list(zip(parts["forward"], parts["backward"], strict=False))


def _moved(events: Sequence[Mapping[str, Any]], n: int) -> float:
    """What a rank sends in these calls if each meets its lower bound."""
    share = (n - 1) / n
    factors = {"send": 1.0, "all_reduce": 2 * share, "all_gather": n - 1.0}
    return sum(event["bytes"] * factors.get(event["op"], share) for event in events if event.get("bytes"))


def _in_shares(events: Sequence[Mapping[str, Any]], case: Case) -> float:
    """`_moved` in units of what an all-gather of all weights sends."""
    n = case["world_size"]
    return _moved(events, n) / ((n - 1) / n * layers_bytes(case))


def _inspect_order(run: Run) -> Finding | None:
    first = layer_sizes(run.case)[0] / sum(
        layer_sizes(run.case)
    )  # whose inputs want no gradient, so backward may do without it
    for rank, data in enumerate(run.ranks):
        where = f"on rank {rank}; {describe_case(run.case)}"
        for forward, backward in _phases(data):
            for name, events, least, most in (("forward", forward, 1, 1), ("backward", backward, 2 - first, 2)):
                seen = _in_shares(events, run.case)
                if not least - 0.03 <= seen <= most + 0.03:
                    return Finding(f"{seen:.2f} times the weights moved in {name}", f"{most} times", where)
            before = _before_first_layer(forward)
            if _in_shares(before, run.case) > 0.5:
                return Finding("most weights gathered before the first layer is done", "one layer at a time", where)
    return None


def _before_first_layer(forward: Sequence[Any]) -> list[Any]:
    ops = [event["op"] for event in forward]
    return list(forward[: ops.index("layer")]) if "layer" in ops else list(forward)


def _phase_moves(number: int, predicate: Callable[[float], bool]) -> Any:
    """Recognise: in every failing run some rank's forward (0) or backward (1) moved as `predicate` says, in shares."""
    return some_rank(lambda data, case: any(predicate(_in_shares(phases[number], case)) for phases in _phases(data)))


ORDER = Check(
    "order",
    "schedule",
    2,
    "forward gathers each layer once; backward gathers it again and reduces its gradient",
    _inspect_order,
    mistakes=(
        mistake(
            "gathered more than once",
            _phase_moves(0, lambda shares: shares > 1.5),
            "Forward moves the weights more than once. Does each rank send what the others do not have, and no more?",
        ),
        mistake(
            "not gathered again",
            _phase_moves(1, lambda shares: shares < 1.5),
            "Backward moves less than a gather and a reduce-scatter of each layer. Where do the weights come "
            "from that it uses, or who knows the others' gradients?",
        ),
        mistake(
            "all-reduce for reduce-scatter",
            _phase_moves(1, lambda shares: 2.5 < shares < 3.5),
            "Backward moves one share of the weights too many. Which part of the mean gradient does a rank keep?",
        ),
        mistake(
            "all layers at once",
            some_rank(
                lambda data, case: any(
                    _in_shares(_before_first_layer(forward), case) > 0.5 for forward, _ in _phases(data)
                )
            ),
            "The layers are gathered before the first one is used. Which of them are in use at that moment?",
        ),
        mistake(
            "nothing gathered",
            _phase_moves(0, lambda shares: shares < 0.5),
            "Forward gathers nothing, or not all. Where do the weights come from?",
        ),
    ),
)
