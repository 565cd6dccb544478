"""What the exercises on real passes share: whose work it is, and what is alive between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import every_run, some_rank
from dtlib.grading.exercise import Check, Finding, Mistake, Run
from dtlib.theory import units

# Python's own objects and a generator's state; the tensors of a case are far larger.
SLACK_BYTES = 24 * units.KiB
HEAP_SLACK_BYTES = 256 * units.KiB

_NOT_WORK = (
    *NOT_YOUR_OWN,
    mistake(
        "torch's checkpoint called",
        some_rank(lambda data, case: bool(data["torch"])),
        "PyTorch has a checkpoint, and it does what this exercise asks you to do. What does it keep, what does it do "
        "when backward arrives, and with which dice? Write that.",
    ),
    mistake(
        "out of the thread",
        some_rank(lambda data, case: bool(data.get("elsewhere"))),
        "The layer ran in a thread of its own, where neither memory nor operations are counted.",
    ),
)


def own_code(
    function: str, inspect_more: Callable[[Run], Finding | None] | None = None, more: tuple[Mistake, ...] = ()
) -> Check:
    """The gate: nothing of the library, of torch's checkpoint or out of sight was called, and what `inspect_more` asks.

    `more` are the mistakes that go with it.
    """

    def inspect(run: Run) -> Finding | None:
        data = run.ranks[0]
        found = called_library(data, "your own code")
        if found is None and data["torch"]:
            found = Finding(f"a call of {data['torch'][0]}", "your own code")
        if found is None and data.get("elsewhere"):
            found = Finding("a call of the layer from another thread", "calls that can be seen")
        return found or (inspect_more(run) if inspect_more else None)

    said = f"`{function}` does the work itself"
    return Check("own work", "memory", 0, said, inspect, mistakes=(*_NOT_WORK, *more), gate=True)


def kept(data: Mapping[str, Any]) -> int:
    """Bytes that are alive after the forward pass, beside its result: tensors, and what hides in Python's memory."""
    heap = int(data["heap_bytes"])
    return int(data["kept_bytes"]) + (heap if heap > HEAP_SLACK_BYTES else 0)


def inspect_left(run: Run) -> Finding | None:
    """That nothing but gradients outlives the step."""
    left = run.ranks[0]["left_bytes"]
    if left > SLACK_BYTES:
        return Finding(f"{units.format_bytes(left)} still held after backward", "nothing but the gradients")
    return None


HIDDEN = mistake(
    "kept out of autograd's sight",
    some_rank(lambda data, case: data["heap_bytes"] > HEAP_SLACK_BYTES),
    "The activations are still there, in numpy's or Python's memory. A byte is a byte, whoever holds it.",
)
LEFT = mistake(
    "never let go",
    every_run(lambda run: run.ranks[0]["left_bytes"] > SLACK_BYTES),
    "The step is over, its result is gone, and its tensors are still alive: the next step will add its own. Who holds "
    "them, and who could let go?",
)


def raised(*texts: str) -> Any:
    """Recognise an error by its text: every failing run raised it."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        return bool(failing) and all(
            run.trouble is not None and any(text in run.trouble.text for text in texts) for run in failing
        )

    return fits


TORCH_FUNC = mistake(
    "torch.func under the instruments",
    raised("torch.func"),
    "What counts the bytes here hooks into autograd, and torch.func refuses to work there. Its answer need not be "
    "wrong: how would you ask torch.autograd the same?",
)
