"""activations.2: what autograd keeps of a chain of operations: predicted by the learner, and by tests held to torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import answer, compare, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

# What the derivative of each operation asks for. `norm` has two numbers a token beside its input, `dropout` a mask.
INPUT, OUTPUT, STATISTICS, MASK, START = "input", "output", "statistics", "mask", "start"
KEEPS: dict[str, tuple[str, ...]] = {
    "linear": (INPUT,),
    "norm": (INPUT, STATISTICS),
    "relu": (OUTPUT,),
    "gelu": (INPUT,),
    "tanh": (OUTPUT,),
    "softmax": (OUTPUT,),
    "dropout": (MASK,),
    "double": (),
    "add": (),
    "times": (INPUT, START),
}
Chain = Sequence[Any]


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    tokens, width, wide = (int(each) for each in (rng.integers(20, 90), rng.integers(30, 60), rng.integers(100, 200)))
    alone: list[Chain] = [[name] for name in KEEPS if name != "linear"] + [[["linear", wide]]]
    chains: list[Chain] = [
        ["norm", ["linear", wide], "gelu", ["linear", width], "dropout", "add"],
        [["linear", wide], "relu", ["linear", width]],
        ["tanh", "double", ["linear", wide], "softmax", "dropout", ["linear", wide]],
        ["tanh", "times", ["linear", width], "gelu", "add", "norm"],
        ["double", "dropout", "relu", "double", ["linear", wide], "tanh", "tanh"],
        _random_chain(rng, width),
        _random_chain(rng, width),
    ]
    cases = []
    for chain in (*alone, *chains):
        element = int(rng.choice([2, 4]))
        words = f"{' → '.join(_told(each) for each in chain)}; [{tokens}, {width}], {element} B an element"
        cases.append({"arguments": [chain, tokens, width, element], "words": words})
    return cases


def _random_chain(rng: np.random.Generator, width: int) -> Chain:
    chain: list[Any] = []
    while len(chain) < 7:
        name = str(rng.choice(list(KEEPS)))
        chain.append([name, width] if name == "linear" else name)
    return chain


def _told(step: Any) -> str:
    return step if isinstance(step, str) else f"{step[0]} to {step[1]}"


def chain_bytes(
    chain: Chain,
    tokens: int,
    width: int,
    element: int,
    *,
    keeps: Mapping[str, tuple[str, ...]] = KEEPS,
    once: bool = True,
    start_counts: bool = True,
    output_counts: bool = False,
    mask_bytes: int | None = None,
    widths_change: bool = True,
) -> int:
    """Bytes that autograd keeps of `chain` on a tensor of shape [tokens, width]; the keywords are ways to be wrong."""
    found: dict[tuple[int, str], int] = {}
    extra = 0
    widths = [width]
    for place, step in enumerate(chain):
        name = step if isinstance(step, str) else step[0]
        after = step[1] if not isinstance(step, str) and widths_change else widths[-1]
        widths.append(after)
        sizes = {
            INPUT: ((place, ""), tokens * widths[-2] * element),
            OUTPUT: ((place + 1, ""), tokens * after * element),
            START: ((0, ""), tokens * width * element),
            STATISTICS: ((place, STATISTICS), 2 * tokens * element),
            MASK: ((place, MASK), tokens * after * (mask_bytes or element)),
        }
        for what in keeps[name]:
            key, size = sizes[what]
            if key in found and not once:
                extra += size
            found[key] = size
    if output_counts:
        found[len(chain), ""] = tokens * widths[-1] * element
    if not start_counts:
        found.pop((0, ""), None)
    return sum(found.values()) + extra


def _expected(case: Case) -> int:
    return chain_bytes(*case["arguments"])


def _is_alone(case: Case) -> bool:
    return len(case["arguments"][0]) == 1


def _inspect(run: Run) -> Finding | None:
    return compare(answer(run), _expected(run.case), describe_case(run.case))


def _is(**wrong: Any) -> Any:
    """Recognise an answer by what it gives in all cases of the check, the right ones too."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        return bool(back) and all(answer(run) == chain_bytes(*run.case["arguments"], **wrong) for run in back)

    return fits


def _keeps(**changed: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {**KEEPS, **changed}


def _fixed_width(element: int) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        wrong = [chain_bytes(chain, tokens, width, element) for chain, tokens, width, _ in map(_arguments, back)]
        return bool(back) and [answer(run) for run in back] == wrong

    return fits


def _arguments(run: Run) -> tuple[Chain, int, int, int]:
    chain, tokens, width, element = run.case["arguments"]
    return chain, tokens, width, element


_MISTAKES = (
    mistake(
        "every input kept",
        _is(keeps={name: (INPUT,) if name != "times" else (INPUT, START) for name in KEEPS}),
        "Here every operation keeps its input. Write down the derivative of each: which of them can be told from the "
        "result, and which do not depend on a number at all?",
    ),
    mistake(
        "every output kept",
        _is(keeps=dict.fromkeys(KEEPS, (OUTPUT,))),
        "Here every operation keeps its result. The gradient of a matrix is what arrives times what?",
    ),
    mistake(
        "relu and tanh by their input",
        _is(keeps=_keeps(relu=(INPUT,), tanh=(INPUT,), softmax=(INPUT,))),
        "Their slopes can be told from their results as well, and the next operation often keeps the result anyway. "
        "Which of the two does torch take?",
    ),
    mistake(
        "gelu by its output",
        _is(keeps=_keeps(gelu=(OUTPUT,))),
        "A GELU has the same value at two places, on either side of its minimum. What is its slope there, and what has "
        "to be known to tell?",
    ),
    mistake(
        "statistics forgotten",
        _is(keeps=_keeps(norm=(INPUT,))),
        "A norm divides every token by a number and takes another one away before. Who computes them for backward?",
    ),
    mistake(
        "norm by its output",
        _is(keeps=_keeps(norm=(OUTPUT, STATISTICS))),
        "The norm keeps another tensor than you count. Its result has been multiplied by weights: what would backward "
        "have to divide by?",
    ),
    mistake(
        "dropout keeps its input",
        _is(keeps=_keeps(dropout=(INPUT, MASK))),
        "Dropout multiplies by a mask that nobody differentiates. What is the derivative of m·x with respect to x?",
    ),
    mistake(
        "dropout keeps nothing",
        _is(keeps=_keeps(dropout=())),
        "How does backward know what was dropped?",
    ),
    mistake(
        "mask of one byte",
        _is(mask_bytes=1),
        "One byte would do for a mask, and on a GPU one byte it is. What does the task say about this one?",
    ),
    mistake(
        "sums keep their summands",
        _is(keeps=_keeps(add=(INPUT, START), double=(INPUT,))),
        "Something is kept for a sum, or for a product with a fixed number. On which numbers do their derivatives "
        "depend?",
    ),
    mistake(
        "one factor",
        _is(keeps=_keeps(times=(INPUT,))),
        "A product of two tensors needs both of them: each is the derivative with respect to the other.",
    ),
    mistake(
        "counted twice",
        _is(once=False),
        "A tensor that two operations keep is there once. Where does a result become the next one's input?",
    ),
    mistake(
        "result counted",
        _is(output_counts=True),
        "The last result is counted whoever needs it. Who keeps it?",
    ),
    mistake(
        "the first input left out",
        _is(start_counts=False),
        "The chain's input is a tensor like the others: something before has computed it, and it would be gone by now. "
        "Who keeps it alive?",
    ),
    mistake(
        "one width throughout",
        _is(widths_change=False),
        "Every tensor has the first one's width here. What does a matrix change?",
    ),
    mistake(
        "always two bytes",
        _fixed_width(2),
        "It is right for elements of 2 bytes, and only there.",
    ),
    mistake(
        "always four bytes",
        _fixed_width(4),
        "It is right for elements of 4 bytes, and only there.",
    ),
)


def _inspect_own(run: Run) -> Finding | None:
    data = run.ranks[0]
    found = called_library(data, "your own prediction")
    if found is None and data["torch"]:
        found = Finding(f"{data['torch'][0]} called", "a prediction without running anything")
    return found


_OWN = Check(
    "own prediction",
    "memory",
    0,
    "`kept_by_chain` predicts, and runs nothing",
    _inspect_own,
    mistakes=(
        *NOT_YOUR_OWN,
        mistake(
            "measured, not predicted",
            some_rank(lambda data, case: bool(data["torch"])),
            "Nature was asked, and it is always right. It says how much, and not why. What does each derivative need? "
            "Predict first, and measure afterwards.",
        ),
    ),
    gate=True,
)

CHAIN = Exercise(
    id="activations.2",
    function="kept_by_chain",
    title="What each derivative needs",
    harness="activations.predict",
    draw=_draw,
    checks=(
        _OWN,
        Check("one operation", "memory", 3, "each operation by itself", _inspect, _MISTAKES, applies=_is_alone),
        Check(
            "chains",
            "memory",
            3,
            "chains, in which every tensor counts once",
            _inspect,
            _MISTAKES,
            applies=lambda case: not _is_alone(case),
        ),
    ),
)
