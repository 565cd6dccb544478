"""activations.2: what autograd keeps of a chain of operations; the theory is held to torch by the tests."""

from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, own_work, values

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


def draw(rng: Rng) -> Cases:
    """Each operation by itself; and in a chain where a neighbour keeps its input or its result anyway: then it matters
    which of the two, often as large as each other, the operation keeps."""
    tokens, width, wide = (int(each) for each in (rng.integers(20, 90), rng.integers(30, 60), rng.integers(100, 200)))
    to_wide, back = ["linear", wide], ["linear", width]
    alone: list[list[Any]] = [[name] for name in KEEPS if name != "linear"] + [[to_wide]]
    chains: list[list[Any]] = [
        ["norm", to_wide, "gelu", back, "dropout", "add"],
        [to_wide, "relu", back, "softmax", back, "tanh", to_wide],
        ["tanh", "double", to_wide, "softmax", "dropout", to_wide],
        ["tanh", "times", "times", back, "gelu", "add", "norm"],
        ["double", "dropout", "relu", "double", to_wide, "tanh", "gelu", "tanh", "norm"],
        ["norm", "dropout", to_wide, "dropout", "norm", "dropout", back],
        *([name if name != "linear" else back for name in map(str, rng.choice(list(KEEPS), 7))] for _ in range(2)),
    ]
    cases = []
    for place, chain in enumerate((*alone, *chains)):
        element = (2, 4)[place % 2]
        told = " → ".join(step if isinstance(step, str) else f"{step[0]} to {step[1]}" for step in chain)
        rows, columns = tokens + place, width + (len(chain) == 1)  # no one number will do for all
        words = f"{told}; [{rows}, {columns}], {element} B an element"
        cases.append(call(words, [chain, rows, columns, element], alone=len(chain) == 1))
    return cases


def right(case: Case) -> int:
    """Bytes that are kept of a chain on a tensor of shape [tokens, width]: of each tensor once."""
    chain, tokens, width, element = case["arguments"]
    found: dict[tuple[int, str], int] = {}
    before = width
    for place, step in enumerate(chain):
        name, after = (step, before) if isinstance(step, str) else step
        entries = {
            INPUT: ((place, ""), before),
            OUTPUT: ((place + 1, ""), after),
            START: ((0, ""), width),
            STATISTICS: ((place, STATISTICS), 2),
            MASK: ((place, MASK), after),
        }
        found |= dict(entries[what] for what in KEEPS[name])
        before = after
    return element * tokens * sum(found.values())


EXERCISE = on_paper(
    "activations.2", "kept_by_chain", "What each derivative needs", draw,
    values(3, "one operation", "each operation by itself", right, where="alone", kind="memory"),
    values(3, "chains", "chains, in which every tensor counts once", right, where="not alone", kind="memory"),
    own=own_work("kept_by_chain", "a prediction without running anything", built_in=True),
    harness="paper.predict",
)  # fmt: skip
