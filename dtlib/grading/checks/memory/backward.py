"""memory.6: each weight updated, and its gradient freed, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import compare, every_run, right_only_if, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .training import (
    AdamW,
    Tensors,
    aside_bytes,
    drawn_case,
    gradients,
    inspect_aside,
    inspect_bytes,
    is_trained,
    largest_bytes,
    num_params,
    rest_bytes,
    start,
)

_SLACK = 0.02
_RTOL = 1e-5  # fp32 against double precision; a step of Adam moves a weight by about the learning rate


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    def small(words: str, **more: Any) -> dict[str, Any]:
        width = int(rng.integers(5, 12))
        widths = [int(rng.integers(4, 9)), width, width, 1]
        rate, decay = round(float(rng.uniform(0.005, 0.05)), 3), round(float(rng.uniform(0.01, 0.1)), 2)
        words = f"{words}, 4 steps, learning rate {rate:g}"
        return drawn_case(rng, widths, 4, learning_rate=rate, weight_decay=decay, words=words, **more)

    return [
        small("3 layers"),
        small("a layer used twice", order=[0, 1, 1, 2]),
        small("the middle layer frozen", frozen=[1]),
        drawn_case(
            rng,
            [192] * 21 + [1],
            2,
            learning_rate=1e-3,
            weight_decay=0.01,
            words="2 steps, 20 layers of width 192",
            large=True,
        ),
    ]


def _is_large(case: Case) -> bool:
    return bool(case["large"])


def _trained(case: Case) -> list[int]:
    return [index for index in range(len(start(case))) if is_trained(case, index)]


def expected(case: Case, *, late: bool = False, forgetful: bool = False, summed: bool = False) -> Tensors:
    """The weights after AdamW's steps.

    With `late` each is made with the gradients of the step before, with `forgetful` each is Adam's first, with `summed`
    each has the gradients of all steps so far.
    """
    weights, optimizer = start(case), AdamW(case)
    before: Tensors | None = None
    for step in range(len(case["inputs"])):
        found = gradients(case, weights, step)
        if summed and before is not None:
            found = [one + two for one, two in zip(before, found, strict=True)]
        if forgetful:
            optimizer = AdamW(case)
        used = before if late else found
        weights = weights if used is None else optimizer.step(weights, used, _trained(case))
        before = found
    return weights


def _plain_sgd(case: Case) -> Tensors:
    weights = start(case)
    for step in range(len(case["inputs"])):
        found = gradients(case, weights, step)
        weights = [
            each - case["learning_rate"] * one if is_trained(case, index) else each
            for index, (each, one) in enumerate(zip(weights, found, strict=True))
        ]
    return weights


def _names(case: Case) -> list[str]:
    return [f"layer {index // 2}'s {'bias' if index % 2 else 'weight'}" for index in range(len(start(case)))]


def _compare(seen: Any, wanted: Any, case: Case, where: str = "") -> Finding | None:
    # Adam divides by the size of a gradient: what rounding adds to it comes back as a small part of an update.
    return compare(seen, wanted, where, _RTOL, 0.01 * case["learning_rate"])


def _inspect_weights(run: Run) -> Finding | None:
    for name, seen, wanted in zip(_names(run.case), run.ranks[0]["weights"], expected(run.case), strict=True):
        finding = _compare(seen, wanted, run.case, f"{name}, {describe_case(run.case)}")
        if finding:
            return finding
    return None


def _ends_at(weights: Callable[[Case], Tensors]) -> Any:
    """Recognise a mistake by the weights that it leaves, in every failing run that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            all(
                _compare(seen, wanted, run.case) is None
                for seen, wanted in zip(run.ranks[0]["weights"], weights(run.case), strict=True)
            )
            for run in back
        )

    return fits


def rest_wanted(case: Case) -> int:
    """Bytes of the weights, and of Adam's moments for those that are trained."""
    return 4 * num_params(case) + 8 * num_params(case, trained=True)


def _inspect_rest(run: Run) -> Finding | None:
    case, wanted = run.case, rest_wanted(run.case)
    most = wanted + _SLACK * num_params(case)
    return inspect_bytes(rest_bytes(run.ranks[0]), most, wanted, case, "held between steps") or inspect_aside(run)


def peak_bound(case: Case) -> float:
    """What is held between steps, activations, and what one update needs: a few times the largest parameter."""
    return rest_wanted(case) + 0.1 * num_params(case) + 8 * largest_bytes(case)


def _inspect_peak(run: Run) -> Finding | None:
    case = run.case
    return inspect_bytes(run.ranks[0]["peak"], peak_bound(case), rest_wanted(case), case, "at the peak") or (
        inspect_aside(run)
    )


def _inspect_own(run: Run) -> Finding | None:
    return called_library(run.ranks[0], "your own code")


def _raised(text: str) -> Any:
    return lambda failing, passing: all(run.trouble is not None and text in str(run.trouble) for run in failing)


_ASIDE = mistake(
    "kept out of torch's sight",
    every_run(lambda run: bool(aside_bytes(run.ranks[0], run.case))),
    "It lies in memory all the same. Until when does anybody need a gradient?",
)

BACKWARD = Exercise(
    id="memory.6",
    function="update_in_backward",
    title="Gradients that never meet",
    harness="memory.update_in_backward",
    draw=_draw,
    timeout_s=30.0,
    checks=(
        Check(
            "own work",
            "value",
            0,
            "`update_in_backward` does not call `dtlib.ranks`",
            _inspect_own,
            mistakes=NOT_YOUR_OWN,
            gate=True,
        ),
        Check(
            "weights",
            "value",
            4,
            "the weights after all steps are those of an ordinary AdamW",
            _inspect_weights,
            mistakes=(
                mistake(
                    "nothing happened",
                    _ends_at(start),
                    "The weights are those of the start. Nobody calls anything but `backward()`: who runs your code?",
                ),
                mistake(
                    "gradients add up",
                    _ends_at(lambda case: expected(case, summed=True)),
                    "Each step was made with the gradients of all steps so far. What does backward do with a `.grad` "
                    "that is there?",
                ),
                mistake(
                    "optimizer made anew",
                    _ends_at(lambda case: expected(case, forgetful=True)),
                    "Every step is Adam's first step. Where do its moments live, and for how long?",
                ),
                mistake(
                    "a step late",
                    _ends_at(lambda case: expected(case, late=True)),
                    "Each step was made with the gradients of the step before. When does your hook run: before "
                    "`.grad` is written, or after?",
                ),
                mistake(
                    "plain SGD",
                    _ends_at(_plain_sgd),
                    "This is gradient descent without moments. Which optimizer does `make_optimizer` make?",
                ),
                mistake(
                    "a frozen parameter",
                    right_only_if(lambda case: not case["frozen"]),
                    "It goes wrong where a layer is frozen. Does backward ever reach a parameter that takes no "
                    "gradient?",
                ),
                mistake(
                    "a layer that is used twice",
                    right_only_if(lambda case: len(set(case["order"])) == len(case["order"])),
                    "It goes wrong where a layer is used twice. How many parts has its gradient, and when are they "
                    "all there?",
                ),
            ),
        ),
        Check(
            "at rest",
            "memory",
            2,
            "what is held between steps",
            _inspect_rest,
            mistakes=(
                mistake(
                    "gradients kept",
                    some_rank(lambda data, case: data["rest"][-1]["gradients"] > num_params(case)),
                    "Gradients are held after backward, zeros perhaps. Who needs them once the weight has moved, and "
                    "does filling with zeros give memory back?",
                ),
                mistake(
                    "no moments",
                    every_run(lambda run: rest_bytes(run.ranks[0]) < rest_wanted(run.case)),
                    "There is less than weights and moments. What does Adam remember from one step to the next?",
                ),
                mistake(
                    "something else kept",
                    every_run(
                        lambda run: rest_bytes(run.ranks[0]) > rest_wanted(run.case) + 0.5 * num_params(run.case)
                    ),
                    "More is held than weights and moments, and none of it is a `.grad`. Which list, or which function "
                    "that lives on, still holds tensors?",
                ),
                _ASIDE,
            ),
            applies=_is_large,
        ),
        Check(
            "peak",
            "memory",
            3,
            "the most that is held during backward",
            _inspect_peak,
            mistakes=(
                mistake(
                    "no moments",
                    every_run(lambda run: run.ranks[0]["peak"] < rest_wanted(run.case)),
                    "There is less than weights and moments. What does Adam remember from one step to the next?",
                ),
                mistake(
                    "held from step to step",
                    every_run(
                        lambda run: rest_bytes(run.ranks[0]) > rest_wanted(run.case) + 0.5 * num_params(run.case)
                    ),
                    "What is held between the steps comes on top of everything. What was held there that nobody needs?",
                ),
                mistake(
                    "all gradients at once",
                    every_run(lambda run: run.ranks[0]["peak"] >= rest_wanted(run.case) + 3.9 * num_params(run.case)),
                    "At one moment all gradients are there. Which of them can go before the next one is made, and what "
                    "has to happen to its weight first?",
                ),
                mistake(
                    "many gradients at once",
                    every_run(lambda run: peak_bound(run.case) < run.ranks[0]["peak"]),
                    "Much more than one gradient is there at one moment. Where does the next one wait, and for what?",
                ),
                _ASIDE,
            ),
            applies=_is_large,
        ),
    ),
)
