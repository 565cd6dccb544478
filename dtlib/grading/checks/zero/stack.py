"""zero.6: layers whose weights are gathered for use, in forward and again in backward, stage 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_memory import EXPORTED, held_like, inspect_at_most, risen
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import FLOAT_BYTES, TWO_RANKS
from dtlib.grading.compare import close, compare, right_only_if, some_rank
from dtlib.grading.drawn import shard
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .network import atol, layer_sizes, layers_bytes, same, stack
from .order import ORDER
from .own import inspect_needed, needed_like, own_work

_LAYERS_IN_USE = 7  # a weight, what is sent and received of it, its gradient, and what is sent and received of that
_DEPTH = 18


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, width in ((2, 2 * int(rng.integers(46, 54))), (3, 3 * int(rng.integers(31, 35))), (4, 93)):
        width += 2 * int(rng.integers(0, 4)) if n == 4 else 0  # stays odd, so that N divides no layer
        cases.append(
            {
                "world_size": n,
                "steps": 2,
                "samples": int(rng.integers(2, 5)),
                "widths": [*[width] * _DEPTH, width - 3 * int(rng.integers(1, 4)), 1],
                "learning_rate": 0.1,
                "sharded": True,
                "seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks, {_DEPTH - 1} layers of {width}×{width} and two smaller ones",
            }
        )
    return cases


def _ends_together(case: Case) -> bool:
    """Whether padding stands at the very end of each weight only, where cutting it off does no harm."""
    n = case["world_size"]
    return all(size % n in (0, n - 1) for size in layer_sizes(case))


def _share(case: Case, rank: int, full: Sequence[Any]) -> list[Any]:
    return [shard(each, case["world_size"], rank) for each in full]


def _inspect_losses(run: Run) -> Finding | None:
    expected = stack(run.case)
    for rank, data in enumerate(run.ranks):
        found = compare(
            data["losses"][0],
            expected[0][0][rank],
            f"in the first step on rank {rank}; {describe_case(run.case)}",
            1e-4,
        )
        if found:
            return found
    return None


def _inspect_gradients(run: Run) -> Finding | None:
    expected = stack(run.case)
    for rank, data in enumerate(run.ranks):
        for step, seen in enumerate(data["gradients"]):
            for layer, (one, two) in enumerate(zip(seen, _share(run.case, rank, expected[step][1]), strict=True)):
                where = f"layer {layer}, step {step + 1}, rank {rank}; {describe_case(run.case)}"
                one = np.asarray([one]) if isinstance(one, float | int) else one
                found = Finding("no gradient", "this rank's share", where) if one is None else None
                found = found or compare(one, two, where, atol=atol(two))
                if found:
                    return found
    return None


def _gradients_are(wrong: Callable[[Case, int], Sequence[Any]]) -> Any:
    """Recognise: in the first step of every failing run, rank r holds ``wrong(case, r)``."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            same(_arrays(data["gradients"][0]), wrong(run.case, rank))
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def _others_share(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether in the first step of every failing run each rank holds what the next one should."""
    back = [run for run in failing if run.trouble is None]
    return bool(back) and all(_is_of_next(run, rank) for run in back for rank in range(len(run.ranks)))


def _is_of_next(run: Run, rank: int) -> bool:
    expected = _share(run.case, (rank + 1) % len(run.ranks), stack(run.case)[0][1])
    seen = _arrays(run.ranks[rank]["gradients"][0])
    # Of lengths that differ by one element, the last may be anything.
    return all(
        one is not None and close(one[: len(two) - 1], two[: len(one)][: len(two) - 1], atol=atol(two))
        for one, two in zip(seen[:-1], expected[:-1], strict=True)
    )


def _arrays(seen: Any) -> Any:
    return [np.asarray([each]) if isinstance(each, float | int) else each for each in seen]


def _right_first(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    return bool(_gradients_are(lambda case, rank: _share(case, rank, stack(case)[0][1]))(failing, passing))


def _last_layer_only(data: Mapping[str, Any], case: Case) -> bool:
    first = data["gradients"][0]
    return first[-1] is not None and any(each is None or not np.any(each) for each in first[:-1])


_forward, _backward = risen("forward"), risen("backward")


def _layer_bytes(case: Case) -> int:
    return FLOAT_BYTES * max(layer_sizes(case))


def _own_bytes(case: Case, rank: int) -> int:
    return FLOAT_BYTES * sum(-(-size // case["world_size"]) for size in layer_sizes(case))


def _inspect_peak(run: Run) -> Finding | None:
    forward = inspect_at_most(
        _forward,
        lambda case, rank: _LAYERS_IN_USE * _layer_bytes(case),
        "more at the peak of forward than at its start",
    )(run)
    return forward or inspect_at_most(
        _backward,
        lambda case, rank: _own_bytes(case, rank) + _LAYERS_IN_USE * _layer_bytes(case),
        "more at the peak of backward than at its start",
    )(run)


def _theory(case: Case) -> float:
    return 3 * case["steps"] * (case["world_size"] - 1) * layers_bytes(case)


def _without_first(case: Case) -> float:
    """The same where backward does not gather the first layer, whose inputs want no gradient."""
    return _theory(case) - case["steps"] * (case["world_size"] - 1) * FLOAT_BYTES * layer_sizes(case)[0]


STACK = Exercise(
    id="zero.6",
    function="sharded_linear",
    title="A layer that is whole only while it is used",
    harness="zero.stack",
    draw=_draw,
    timeout_s=20.0,
    checks=(
        own_work("sharded_linear"),
        Check(
            "outputs",
            "value",
            1,
            "the loss of the first step is that of whole weights",
            _inspect_losses,
            mistakes=(
                TWO_RANKS,
                mistake(
                    "right for divisible lengths only",
                    right_only_if(_ends_together),
                    "It goes wrong where N does not divide the elements of a weight. Shards then have different "
                    "lengths: where does each of them begin in the whole?",
                ),
            ),
        ),
        Check(
            "gradient",
            "gradient",
            3,
            "each shard's `.grad` is this rank's share of the mean gradient, step after step",
            _inspect_gradients,
            mistakes=(
                mistake(
                    "sum for mean",
                    _gradients_are(
                        lambda case, rank: _share(case, rank, stack(case, case["world_size"])[0][1]),
                    ),
                    "N times too large. Each rank's loss is a mean over its own samples. What is the gradient of all "
                    "of them?",
                ),
                mistake(
                    "divided twice",
                    _gradients_are(lambda case, rank: _share(case, rank, stack(case, 1 / case["world_size"])[0][1])),
                    "N times too small. Where is it divided, and where once more?",
                ),
                mistake(
                    "no sync",
                    _gradients_are(lambda case, rank: _share(case, rank, stack(case, case["world_size"], rank)[0][1])),
                    "These are shares of the gradient of this rank's own samples. What do the other ranks know about "
                    "them?",
                ),
                mistake(
                    "a share of another rank",
                    _others_share,
                    "The mean is right, and the share is that of another rank. From which number do ranks count?",
                ),
                mistake(
                    "nothing flows through",
                    some_rank(_last_layer_only),
                    "The last layer has a gradient, and an earlier one has none. What does a layer's backward owe to "
                    "the layer before it?",
                ),
                mistake(
                    "right in the first step only",
                    _right_first,
                    "The first step is right, the second is not. The shards have changed in between: which weights "
                    "did the layers use?",
                ),
                TWO_RANKS,
                mistake(
                    "right for divisible lengths only",
                    right_only_if(_ends_together),
                    "It goes wrong where N does not divide the elements of a weight. Shards then have different "
                    "lengths: where does each of them begin in the whole?",
                ),
            ),
        ),
        Check(
            "memory",
            "memory",
            5,
            "at no moment does a rank hold more than its shards and the weights of a few layers",
            _inspect_peak,
            mistakes=(
                EXPORTED,
                mistake(
                    "full parameters kept after forward",
                    held_like(_forward, lambda case, rank: 0.9 * layers_bytes(case)),
                    "When forward ends, all weights are there in full. Autograd keeps what an operation will need for "
                    "its gradient, and a context, a cache or a view keeps what it knows. Who knows the weights of a "
                    "layer that has been used?",
                ),
                mistake(
                    "full gradients kept",
                    held_like(_backward, lambda case, rank: 0.9 * layers_bytes(case)),
                    "In backward the whole gradients of all layers are there at the same time. Who still knows the "
                    "one of a layer whose share has been made?",
                ),
                mistake(
                    "many layers at a time",
                    some_rank(lambda data, case: True),
                    "More is whole at one time than a few layers. Which layers does this moment need?",
                ),
            ),
        ),
        ORDER,
        Check(
            "traffic",
            "traffic",
            1,
            "a step sends 3 (N−1)/N of the weights",
            inspect_needed(_theory, _without_first),
            mistakes=(
                mistake(
                    "two shares",
                    needed_like(lambda case: _theory(case) * 2 / 3),
                    "Two shares instead of three. Which of the three is missing: to use the weights, to use them "
                    "again, or to make the mean?",
                ),
                mistake(
                    "four shares",
                    needed_like(lambda case: _theory(case) * 4 / 3),
                    "Four shares instead of three. Is there something that arrives in full and is used in part?",
                ),
                mistake(
                    "every gather doubled",
                    needed_like(lambda case: _theory(case) * 5 / 3),
                    "Both gathers cost twice what they should. If every rank adds its shard to zeros elsewhere, what "
                    "do the zeros cost?",
                ),
                mistake(
                    "nothing sent",
                    needed_like(lambda case: 0.0),
                    "Nothing was sent. Whose weights are these, and whose samples?",
                ),
            ),
        ),
    ),
)
