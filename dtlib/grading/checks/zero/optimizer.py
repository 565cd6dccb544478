"""zero.4: each rank keeps the optimizer's states of its share, stage 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_memory import EXPORTED, grown, held_like, inspect_at_most
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import FLOAT_BYTES, TWO_RANKS
from dtlib.grading.compare import close, compare, right_only_if, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .network import Parameters, num_elements, start, trained
from .own import inspect_needed, needed_like, own_work

_SLACK_BYTES = 8192
_ATOL = 2e-5  # a step moves a weight by about 1e-2
_STATES = {"adamw": 2, "sgd": 1}  # numbers that torch's optimizer keeps for each element


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, kind in ((3, "adamw"), (2, "sgd"), (4, "adamw"), (4, "sgd")):
        wide, narrow = int(rng.integers(220, 260)), int(rng.integers(200, 240))
        weight_decay = float(rng.choice([0.05, 0.1]))
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay}
        if kind == "adamw":
            settings = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-4, "weight_decay": weight_decay}
        cases.append(
            {
                "world_size": n,
                "steps": 3,
                "samples": int(rng.integers(3, 6)),
                "widths": [48, wide, narrow, 1],
                "optimizer": kind,
                "settings": settings,
                "seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks, {kind}, 3 steps, layers of 48, {wide}, {narrow} and 1",
            }
        )
    return cases


def _names(case: Case) -> list[str]:
    return [f"{2 * layer}.{part}" for layer in range(len(case["widths"]) - 1) for part in ("weight", "bias")]


def _inspect_weights(run: Run) -> Finding | None:
    expected = trained(run.case)
    for rank, data in enumerate(run.ranks):
        for name, one, two in zip(_names(run.case), data["weights"], expected, strict=True):
            found = compare(one, two, f"`{name}` on rank {rank}; {describe_case(run.case)}", atol=_ATOL)
            if found:
                return found
    return None


def _one_step(case: Case) -> dict[str, Any]:
    """The case up to its first step: from then on gradients are taken at other weights."""
    return {**case, "steps": 1}


def _weights_are(wrong: Callable[[Case], Parameters]) -> Any:
    """Recognise: after the first step of every failing run, all ranks hold ``wrong(case)``."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            close(data["first"], wrong(_one_step(run.case)), atol=_ATOL) for run in back for data in run.ranks
        )

    return fits


def _some_never_move(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether after the first step of every failing run a few elements are as at the start, and most are right."""
    back = [run for run in failing if run.trouble is None]
    return bool(back) and all(_few_rest(run) for run in back)


def _few_rest(run: Run) -> bool:
    first, last = (_line(each) for each in (start(run.case), trained(_one_step(run.case))))
    for data in run.ranks:
        seen = _line(data["first"])
        off = np.abs(seen - last) > _ATOL
        rest = np.abs(seen - first) <= 1e-7
        if not (0 < off.sum() < off.size // 2 and np.all(rest[off])):
            return False
    return True


def _own_share_only(run: Run) -> bool:
    """Whether the ranks hold different weights, each right in a share of them."""
    lines = [_line(data["first"]) for data in run.ranks]
    last = _line(trained(_one_step(run.case)))
    right = [np.abs(line - last) <= _ATOL for line in lines]
    return all(0 < each.sum() < each.size for each in right) and bool(np.all(np.any(right, axis=0)))


def _line(parameters: Any) -> Any:
    return np.concatenate([np.asarray(each, np.float64).reshape(-1) for each in parameters])


_beyond = grown("start", "trained", "gradients")


def _full_bytes(case: Case) -> int:
    return FLOAT_BYTES * num_elements(case)


def _own_bytes(case: Case, rank: int) -> float:
    n, total = case["world_size"], num_elements(case)
    return FLOAT_BYTES * (total // n + (rank < total % n))


def _most(case: Case, rank: int) -> float:
    """The states of the share, a copy of it, and its gradient."""
    return (_STATES[case["optimizer"]] + 2) * _own_bytes(case, rank) + _SLACK_BYTES


def _theory(case: Case) -> float:
    return 2 * case["steps"] * (case["world_size"] - 1) * _full_bytes(case)


OPTIMIZER = Exercise(
    id="zero.4",
    function="sharded_optimizer",
    title="States for a share of the weights",
    harness="zero.optimizer",
    draw=_draw,
    timeout_s=20.0,
    checks=(
        own_work("sharded_optimizer"),
        Check(
            "weights",
            "value",
            3,
            "after some steps every rank has the weights of a single process",
            _inspect_weights,
            mistakes=(
                mistake(
                    "sum for mean",
                    _weights_are(lambda case: trained(case, case["world_size"])),
                    "These are the weights that the sum of the gradients gives. With twice as many ranks, should the "
                    "step be longer?",
                ),
                mistake(
                    "divided twice",
                    _weights_are(lambda case: trained(case, 1 / case["world_size"])),
                    "The gradient is N times too small. Where is it divided, and where once more?",
                ),
                mistake(
                    "nothing happened",
                    _weights_are(start),
                    "The weights are as at the start. Do the elements that the optimizer steps share their memory "
                    "with the parameters, and if they do not, who copies them back?",
                ),
                mistake(
                    "only the own share is new",
                    lambda failing, passing: (
                        any(run.trouble is None for run in failing)
                        and all(_own_share_only(run) for run in failing if run.trouble is None)
                    ),
                    "Each rank holds the new weights of its own share and the old ones elsewhere. What is missing "
                    "after the update?",
                ),
                mistake(
                    "some weights never move",
                    _some_never_move,
                    "Most weights are right, and some are as at the start. Who updates them: where does one share end "
                    "and the next begin?",
                ),
                TWO_RANKS,
                mistake(
                    "right for one optimizer only",
                    right_only_if(lambda case: bool(case["optimizer"] == "adamw")),
                    "It is right with AdamW, and only with it. `make_optimizer` knows which one is wanted. Who calls "
                    "it?",
                ),
                mistake(
                    "right for another optimizer only",
                    right_only_if(lambda case: bool(case["optimizer"] == "sgd")),
                    "It is right with SGD, and only with it. What do other optimizers remember from step to step?",
                ),
                mistake(
                    "right for divisible lengths only",
                    right_only_if(lambda case: num_elements(case) % case["world_size"] == 0),
                    "It goes wrong where N does not divide the number of elements. Which ranks have one more?",
                ),
            ),
        ),
        Check(
            "memory",
            "memory",
            4,
            "between steps a rank keeps no more than the states, a copy and the gradient of its own share",
            inspect_at_most(_beyond, _most, "kept beside weights and gradients"),
            mistakes=(
                EXPORTED,
                mistake(
                    "replicated states",
                    held_like(
                        _beyond,
                        lambda case, rank: _STATES[case["optimizer"]] * _full_bytes(case) - _SLACK_BYTES,
                        lambda case, rank: (_STATES[case["optimizer"]] + 0.9) * _full_bytes(case),
                    ),
                    "The weights may be right, and each rank keeps the states of all of them, zeros or not: this is "
                    "plain data parallelism. For which elements does this rank need moments?",
                ),
                mistake(
                    "states and more of full length",
                    held_like(_beyond, lambda case, rank: (_STATES[case["optimizer"]] + 0.9) * _full_bytes(case)),
                    "Each rank keeps the states of all weights, and a buffer as long beside them. What of it belongs "
                    "to this rank's share?",
                ),
                mistake(
                    "a buffer of full length",
                    some_rank(lambda data, case: _beyond(data) >= 0.99 * _full_bytes(case)),
                    "Beside the states of its share, a rank keeps a buffer as long as all weights from step to step. "
                    "A view of a shard keeps the whole tensor behind it alive. Who still knows one?",
                ),
            ),
            applies=lambda case: bool(case["world_size"] > 2),
        ),
        Check(
            "traffic",
            "traffic",
            3,
            "a step sends one reduce-scatter of gradients and one all-gather of weights",
            inspect_needed(_theory),
            mistakes=(
                mistake(
                    "all-reduce, then all-gather",
                    needed_like(lambda case: 1.5 * _theory(case)),
                    "Half as much again as it takes. The gradients arrive everywhere in full: which of them does this "
                    "rank's update use?",
                ),
                mistake(
                    "two all-reduces",
                    needed_like(lambda case: 2 * _theory(case)),
                    "Twice what it takes. What are the zeros for that are added to the weights?",
                ),
                mistake(
                    "the gradients do not travel",
                    needed_like(lambda case: _theory(case) / 2),
                    "Half of what it takes. Which of the two never travels, the gradients or the new weights?",
                ),
                mistake(
                    "everything gathered",
                    needed_like(lambda case: _theory(case) / 2 * (case["world_size"] + 1)),
                    "Every rank receives every rank's whole gradient, and adds for itself. Which collective adds on "
                    "the way?",
                ),
                mistake(
                    "nothing sent",
                    needed_like(lambda case: 0.0),
                    "Nothing was sent, so every rank trains alone.",
                ),
            ),
        ),
    ),
)
