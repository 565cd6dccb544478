"""activations.5: a checkpoint of one's own, judged by values, gradients, bytes, operations and dice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.compare import any_of, close, compare, every_run, right_only_if
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case
from dtlib.theory import units

from .kept import HIDDEN, LEFT, SLACK_BYTES, TORCH_FUNC, inspect_left, kept, own_code, raised

_FLOAT = 4
_PARAMETERS = 4  # of a layer: two matrices and two biases
_RTOL = 1e-4  # the same operations on the same numbers; a known mistake is off by far more


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for leaf, layers, dropout in ((True, 1, 0.0), (False, 3, 0.0), (False, 2, 0.3)):
        case = {
            "leaf": leaf,
            "layers": layers,
            "dropout": dropout,
            "tokens": int(rng.integers(200, 280)),
            "width": int(rng.integers(64, 96)),
            "hidden": int(rng.integers(900, 1300)),
            "data": int(rng.integers(0, 2**31)),
        }
        words = (
            f"{layers} layer{'s' * (layers > 1)}, [{case['tokens']}, {case['width']}] inside of [.., {case['hidden']}]"
        )
        cases.append(case | {"words": words + (f", dropout {dropout}" if dropout else "")})
    return cases


def _input_bytes(case: Case) -> int:
    return int(_FLOAT * case["tokens"] * case["width"])


def _kept_inputs(case: Case) -> int:
    """The layers' inputs, but for the first where it is the caller's own."""
    return (case["layers"] - case["leaf"]) * _input_bytes(case)


def _forward_flops(case: Case) -> int:
    return int(case["layers"] * 4 * case["tokens"] * case["width"] * case["hidden"])


# gate


def _inspect_again(run: Run) -> Finding | None:
    if run.ranks[0]["backward"]["calls"]:
        return None
    held = units.format_bytes(kept(run.ranks[0]))
    return Finding(
        f"no call of a layer during backward, and {held} alive before it",
        "that each layer runs once more",
        describe_case(run.case),
    )


_OWN = own_code(
    "checkpoint",
    _inspect_again,
    (
        mistake(
            "not computed again",
            every_run(lambda run: run.ranks[0]["backward"]["calls"] == 0),
            "No layer ran a second time. So what backward needed was there all the while, wherever it was held, or "
            "backward never came by. What may be alive when the forward pass is over?",
        ),
    ),
)

# gradients


def _name(index: int) -> str:
    if index == 0:
        return "the gradient of the input"
    layer, part = divmod(index - 1, _PARAMETERS)
    parts = ("first matrix", "first bias", "second matrix", "second bias")
    return f"the gradient of the {parts[part]} of layer {layer + 1}"


def _same(seen: Any, expected: Any) -> bool:
    return seen is not None and close(seen, expected, _RTOL, _RTOL * float(np.abs(expected).max()))


def _compare(seen: Any, expected: Any, name: str, case: Case) -> Finding | None:
    where = f"{name}; {describe_case(case)}"
    if seen is None:
        return Finding("None", "a gradient", where)
    return compare(seen, expected, where, _RTOL, _RTOL * float(np.abs(expected).max()))


def _inspect_gradients(run: Run) -> Finding | None:
    data, ordinary = run.ranks[0], run.ranks[0]["plain"]
    found = _compare(data["output"], ordinary["output"], "the result", run.case)
    for index, (seen, expected) in enumerate(zip(data["gradients"], ordinary["gradients"], strict=True)):
        found = found or _compare(seen, expected, _name(index), run.case)
    return found


def _gradients_are(fits: Callable[[list[Any], list[Any], Case], bool]) -> Any:
    """Recognise by the gradients (the input's first) beside the ordinary ones: in every failing run that came back."""
    return every_run(lambda run: fits(run.ranks[0]["gradients"], run.ranks[0]["plain"]["gradients"], run.case))


def _upstream_is_one(seen: list[Any], expected: list[Any], case: Case) -> bool:
    """A bias at the end of a layer has as its gradient what arrives there, summed over the tokens."""
    return bool(np.allclose(seen[-1], case["tokens"]))


_GRADIENT = Check(
    "gradient",
    "gradient",
    3,
    "the result and all gradients, of the input and of the weights, are those of `fn(x)`",
    _inspect_gradients,
    mistakes=(
        TORCH_FUNC,
        mistake(
            "recomputed without a graph",
            raised("does not require grad"),
            "The layer ran again, and nothing can be differentiated in what came out. In which mode does torch run a "
            "Function's backward, and who changes it?",
        ),
        mistake(
            "walks on beyond the layer",
            any_of(
                lambda failing, passing: any(run.trouble and "second time" in run.trouble.text for run in failing),
                _gradients_are(
                    lambda seen, expected, case: (
                        all(_same(one, two) for one, two in zip(seen[1:], expected[1:], strict=True))
                        and seen[0] is not None
                    )
                ),
            ),
            "The weights of the layer are served, and the input is not: the inner backward did not stop at the layer's "
            "input, or delivered to it what the outer one delivers too. Where does the recomputed graph begin?",
        ),
        mistake(
            "weights without a gradient",
            _gradients_are(lambda seen, expected, case: all(each is None for each in seen[1:]) and seen[0] is not None),
            "The input gets its gradient, and the layer's weights get none: nobody told you what they are, and "
            "you need not know. Which call of torch.autograd serves every leaf that it meets?",
        ),
        mistake(
            "what arrives is ignored",
            any_of(raised("can be implicitly created only for scalar"), _gradients_are(_upstream_is_one)),
            "The layer's backward began with ones. It is not the end of the network: what did backward hand to you?",
        ),
        mistake(
            "one memory for all layers",
            right_only_if(lambda case: case["layers"] == 1),
            "With one layer it is right, with several it is not. Which of them finds what the others have left behind?",
        ),
    ),
    applies=lambda case: not case["dropout"],
)


# dice


def _inspect_dice(run: Run) -> Finding | None:
    found = _inspect_gradients(run)
    data = run.ranks[0]
    if found is None and not close(data["next_dice"], data["plain"]["next_dice"]):
        found = Finding(
            "other random numbers after the step", "those of a step without checkpoints", describe_case(run.case)
        )
    return found


def _dice_differ(output: bool, gradients: bool) -> Any:
    def fits(run: Run) -> bool:
        data, ordinary = run.ranks[0], run.ranks[0]["plain"]
        same_output = _same(data["output"], ordinary["output"])
        same = all(_same(one, two) for one, two in zip(data["gradients"], ordinary["gradients"], strict=True))
        return (same_output, same) == (output, gradients)

    return every_run(fits)


_DICE = Check(
    "dice",
    "gradient",
    2,
    "with dropout too, and the random numbers after the step are those of a step without checkpoints",
    _inspect_dice,
    mistakes=(
        mistake(
            "other dice the second time",
            _dice_differ(output=True, gradients=False),
            "The result is right and the gradients are those of another network: one with other neurons dropped. "
            "Nothing complains, and the model still learns something. What did the layer draw the first time?",
        ),
        mistake(
            "loaded dice",
            _dice_differ(output=False, gradients=False),
            "Already the result differs: the forward pass draws other numbers than without checkpoints. Who may decide "
            "the seed?",
        ),
        mistake(
            "dice not put back",
            _dice_differ(output=True, gradients=True),
            "The gradients are right, and from here on the whole run draws other numbers: after backward the generator "
            "stands where it did not stand before. Who has moved it?",
        ),
    ),
    applies=lambda case: bool(case["dropout"]),
)


# bytes


def _inspect_kept(run: Run) -> Finding | None:
    seen, wanted = kept(run.ranks[0]), _kept_inputs(run.case)
    if seen > wanted + SLACK_BYTES:
        return Finding(
            f"{units.format_bytes(seen)} kept between forward and backward",
            f"{units.format_bytes(wanted)}, the layers' inputs" if wanted else "nothing beside the caller's own input",
            describe_case(run.case),
        )
    return inspect_left(run)


def _copies(run: Run) -> bool:
    """Whether some of the inputs are there twice: where somebody else still has the first one."""
    more = (run.ranks[0]["kept_bytes"] - _kept_inputs(run.case)) / _input_bytes(run.case)
    return 0 < round(more) <= run.case["layers"] and abs(more - round(more)) < SLACK_BYTES / _input_bytes(run.case)


def _keeps_all(run: Run) -> bool:
    """Whether at least the tanh of every layer is still there."""
    wide = _FLOAT * run.case["layers"] * run.case["tokens"] * run.case["hidden"]
    return bool(run.ranks[0]["kept_bytes"] >= wide)


_KEPT = Check(
    "kept",
    "memory",
    2,
    "between forward and backward nothing is alive but the layers' inputs, and nothing outlives the step",
    _inspect_kept,
    mistakes=(
        HIDDEN,
        mistake(
            "everything kept",
            every_run(_keeps_all),
            "As many bytes as without a checkpoint, or more. Values say nothing about that. Who still holds what the "
            "layer computed on its way?",
        ),
        mistake(
            "copies of the inputs",
            every_run(_copies),
            "An input is there twice: the caller's and one of your own. What does `clone` cost that `detach` does not?",
        ),
        LEFT,
    ),
)

# operations


def _inspect_recompute(run: Run) -> Finding | None:
    data, layers, forward = run.ranks[0], run.case["layers"], _forward_flops(run.case)
    for phase, calls, flops in (("forward", layers, forward), ("backward", layers, 3 * forward)):
        seen = data[phase]
        if seen["calls"] != calls:
            wanted = f"{calls}: each of {layers} once" if layers > 1 else "1"
            return Finding(f"{seen['calls']} calls of a layer during {phase}", wanted, describe_case(run.case))
        if seen["flops"] > flops:
            return Finding(
                f"{seen['flops'] / forward:.3g} times the operations of a forward pass during {phase}",
                f"at most {flops / forward:.3g}",
                describe_case(run.case),
            )
    return None


def _calls(phase: str, fits: Callable[[int, int], bool]) -> Any:
    return every_run(lambda run: fits(run.ranks[0][phase]["calls"], run.case["layers"]))


_RECOMPUTE = Check(
    "recompute",
    "schedule",
    2,
    "each layer runs once forward and once more in backward: 4/3 of the operations in all",
    _inspect_recompute,
    mistakes=(
        mistake(
            "twice forward",
            _calls("forward", lambda calls, layers: calls > layers),
            "A layer ran more than once before backward even began. Which of its results does anybody use?",
        ),
        mistake(
            "computed again more than once",
            _calls("backward", lambda calls, layers: calls > layers),
            "Backward ran a layer more often than once. One graph has all the gradients: who asked for a second one?",
        ),
        mistake(
            "two backward passes",
            every_run(lambda run: run.ranks[0]["backward"]["flops"] > 3 * _forward_flops(run.case)),
            "The layers ran as often as they should, and there are more products of matrices than that: the recomputed "
            "graph was walked through more than once. What does one walk leave undone?",
        ),
    ),
)


CHECKPOINT = Exercise(
    id="activations.5",
    function="checkpoint",
    title="Keep the input, compute the rest again",
    harness="activations.checkpoint",
    draw=_draw,
    checks=(_OWN, _GRADIENT, _KEPT, _RECOMPUTE, _DICE),
    timeout_s=40.0,
)
