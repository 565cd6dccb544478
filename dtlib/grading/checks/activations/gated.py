"""activations.4: a gated activation that keeps its two inputs and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.compare import any_of, close, compare, every_run
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case
from dtlib.theory import units

from .kept import HIDDEN, LEFT, SLACK_BYTES, TORCH_FUNC, inspect_left, kept, own_code, raised

_FLOAT = 4
_RTOL, _ATOL = 1e-4, 1e-5  # a few roundings of fp32 on numbers around 1; bf16 rounds by 4e-3


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for fused, shape in ((False, (300, 256)), (False, (3, 90, 320)), (True, (280, 288))):
        shape = (*shape[:-1], shape[-1] + 2 * int(rng.integers(0, 20)))
        gate, up, upstream = (rng.standard_normal(shape).astype(np.float32) * 2 for _ in range(3))
        flat = gate.reshape(-1)
        flat[rng.choice(flat.size, 40, replace=False)] = (
            0  # where nothing gets through, and what is behind still matters
        )
        flat[rng.choice(flat.size, 40, replace=False)] = rng.choice([-60, 60], 40)
        words = f"two tensors of {'×'.join(map(str, shape))}" + (", halves of one" if fused else "")
        cases.append({"gate": gate, "up": up, "upstream": upstream, "fused": fused, "words": words})
    return cases


def _wide(case: Case) -> tuple[Any, Any, Any]:
    return tuple(case[name].astype(np.float64) for name in ("gate", "up", "upstream"))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _output(case: Case) -> Any:
    gate, up, _ = _wide(case)
    return gate * _sigmoid(gate) * up


def _gate_gradient(case: Case) -> Any:
    gate, up, upstream = _wide(case)
    s = _sigmoid(gate)
    return upstream * up * s * (1 + gate * (1 - s))


def _up_gradient(case: Case) -> Any:
    gate, _, upstream = _wide(case)
    return upstream * gate * _sigmoid(gate)


def _one_bytes(case: Case) -> int:
    return int(_FLOAT * case["gate"].size)


def _inspect_value(run: Run) -> Finding | None:
    return compare(run.ranks[0]["output"], _output(run.case), describe_case(run.case), _RTOL, _ATOL)


def _inspect_gradients(run: Run) -> Finding | None:
    for name, seen, expected in zip(
        ("gate", "up"), run.ranks[0]["gradients"], (_gate_gradient(run.case), _up_gradient(run.case)), strict=True
    ):
        if seen is None:
            return Finding("None", "a gradient", f"of `{name}`; {describe_case(run.case)}")
        found = compare(seen, expected, f"the gradient of `{name}`; {describe_case(run.case)}", _RTOL, _ATOL)
        if found:
            return found
    return None


def _inspect_kept(run: Run) -> Finding | None:
    one = _one_bytes(run.case)
    if kept(run.ranks[0]) > 2 * one + SLACK_BYTES:
        return Finding(
            f"{kept(run.ranks[0]) / one:.2f} tensors of that size kept between forward and backward",
            "2.00",
            f"{describe_case(run.case)}, {units.format_bytes(one)} each",
        )
    return None


def _gradients_like(gate: Callable[[Case], Any], up: Callable[[Case], Any]) -> Any:
    def fits(run: Run) -> bool:
        seen = run.ranks[0]["gradients"]
        return close(seen[0], gate(run.case), 1e-3, 1e-4) and close(seen[1], up(run.case), 1e-3, 1e-4)

    return every_run(fits)


def _kept_tensors(count: float) -> Any:
    return every_run(lambda run: abs(kept(run.ranks[0]) / _one_bytes(run.case) - count) < 0.1)


def _is_rounded(run: Run) -> bool:
    """Off by no more than bf16 or fp16 rounds, and by more than fp32 does."""
    seen = run.ranks[0]["gradients"]
    return all(
        close(one, two, 0.03, 0.1)
        for one, two in zip(seen, (_gate_gradient(run.case), _up_gradient(run.case)), strict=True)
    )


def _not_finite(run: Run) -> bool:
    return any(each is not None and not np.isfinite(each).all() for each in run.ranks[0]["gradients"])


def _lacks_one(run: Run) -> bool:
    """Whether an input has no gradient, or as a half of a larger tensor one of zeros."""
    return any(each is None or not each.any() for each in run.ranks[0]["gradients"])


def _sigmoid_of(case: Case) -> Any:
    return _sigmoid(_wide(case)[0])


_VALUE_MISTAKES = (
    mistake(
        "sigmoid for silu",
        every_run(lambda run: close(run.ranks[0]["output"], _sigmoid_of(run.case) * _wide(run.case)[1], 1e-3, 1e-4)),
        "The gate is only the sigmoid here. What is it multiplied by, before it meets `up`?",
    ),
    mistake(
        "gate and up exchanged",
        every_run(
            lambda run: close(
                run.ranks[0]["output"],
                _wide(run.case)[0] * _wide(run.case)[1] * _sigmoid(_wide(run.case)[1]),
                1e-3,
                1e-4,
            )
        ),
        "The non-linearity is on the other of the two tensors. Which one opens and closes?",
    ),
)

_GRADIENT_MISTAKES = (
    TORCH_FUNC,
    mistake(
        "divided to get it back",
        every_run(_not_finite),
        "Not a number, where the gate is closed. What was divided by what, and what is left of `up` in a product with "
        "zero?",
    ),
    mistake(
        "derivative of the sigmoid alone",
        _gradients_like(
            lambda case: _wide(case)[2] * _wide(case)[1] * _sigmoid_of(case) * (1 - _sigmoid_of(case)), _up_gradient
        ),
        "That is the slope of the sigmoid. The gate is g·σ(g): how many factors depend on g?",
    ),
    mistake(
        "the sigmoid for its slope",
        _gradients_like(lambda case: _wide(case)[2] * _wide(case)[1] * _sigmoid_of(case), _up_gradient),
        "One term of the product rule is there. Which factor was held fixed, and what if it moves too?",
    ),
    mistake(
        "gradients exchanged",
        _gradients_like(_up_gradient, _gate_gradient),
        "Both gradients are right, and each went to the other tensor. In which order does torch expect them?",
    ),
    mistake(
        "what arrives is ignored",
        _gradients_like(
            lambda case: _gate_gradient({**case, "upstream": np.ones_like(case["upstream"])}),
            lambda case: _up_gradient({**case, "upstream": np.ones_like(case["upstream"])}),
        ),
        "These are the slopes themselves. What comes from above, and what does the chain rule do with it?",
    ),
    mistake(
        "rounded to save bytes",
        every_run(_is_rounded),
        "Close, and not equal: something was kept with fewer digits than it had. Fewer bytes by fewer digits is "
        "another bargain than the one asked for. What could be computed again, exactly?",
    ),
    mistake(
        "no gradient",
        any_of(
            raised("does not require grad"),
            every_run(_lacks_one),
        ),
        "A gradient does not arrive at all. Which of the two inputs is still joined to the result?",
    ),
)

GATED = Exercise(
    id="activations.4",
    function="swiglu",
    title="A gate that keeps less",
    harness="activations.gated",
    draw=_draw,
    checks=(
        own_code("swiglu"),
        Check("value", "value", 1, "`gate·σ(gate)·up`", _inspect_value, _VALUE_MISTAKES),
        Check(
            "gradient",
            "gradient",
            2,
            "both gradients in full precision, where the gate is 0 or far from it as well",
            _inspect_gradients,
            _GRADIENT_MISTAKES,
        ),
        Check(
            "kept",
            "memory",
            2,
            "two tensors kept between forward and backward",
            _inspect_kept,
            mistakes=(
                HIDDEN,
                mistake(
                    "as autograd keeps it",
                    _kept_tensors(3),
                    "Three tensors: a product keeps both of its factors, and one of them can be computed from what is "
                    "there anyway. Which?",
                ),
                mistake(
                    "every intermediate result",
                    any_of(_kept_tensors(4), _kept_tensors(5), _kept_tensors(6)),
                    "Each operation of a formula that is written out keeps what its own derivative needs, and knows "
                    "nothing of its neighbours. How would one operation with one derivative do?",
                ),
            ),
            gate=True,
        ),
        Check("let go", "memory", 1, "nothing but the gradients outlives the step", inspect_left, mistakes=(LEFT,)),
    ),
    timeout_s=30.0,
)
