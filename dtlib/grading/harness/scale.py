"""What a rank holds: the bytes of all live tensors, by kind, whoever keeps them and wherever they are hidden.

`lab.memory` sees each storage that an operation makes until it is freed, in a closure, a view or autograd's keeping as
well. Beside it stands a sweep through all objects of Python, which finds what no operation has touched or another
thread has made. What leaves for numpy or a list is noted, since nobody can count it there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dtlib import lab
from dtlib.lab.storages import MEMORY_KINDS, KindBytes

from . import watch

MAX_READINGS = 400
_EXPORTS = ("numpy", "__array__", "__dlpack__", "tolist")
_MOST_TRIES, _PAUSE_SECONDS, _UNCHANGED = 25, 0.003, 3


class Scale:
    """Takes readings while `weighing`. A reading is a dictionary of bytes: each of `lab`'s kinds, and ``"total"``.

    - ``held``: the readings of `held`, as ``{"label": ..., kind: bytes, ..., "total": bytes}`` in their order;
    - ``peaks``: those of `peak`: the kinds at the highest total of a block, and ``"before"``, the total at its start;
    - ``exported_bytes``: the largest tensor that became a numpy array or a list meanwhile.
    """

    def __init__(self) -> None:
        self.held_at: list[dict[str, Any]] = []
        self.peaks: list[dict[str, Any]] = []
        self.exported_bytes = 0
        self.memory: lab.Memory | None = None

    def know(self, *owners: Any) -> None:
        """Learn of modules, optimizers and tensors, so that what they have counts under its kind."""
        with lab.memory(*owners, detail="marks"):
            pass

    def held(self, label: str) -> dict[str, int]:
        """What is held now, and a line called `label` in the record."""
        reading = _told(_settled())
        if len(self.held_at) < MAX_READINGS:
            self.held_at.append({"label": label, **reading})
        return reading

    @contextmanager
    def peak(self, label: str) -> Iterator[None]:
        """Record, as `label`, the most that is held at one time in the block, and what was held when it began."""
        before = _settled()
        with lab.memory(detail="marks") as memory:
            yield
        if len(self.peaks) < MAX_READINGS:
            self.peaks.append({"label": label, "before": before.total, **_told(memory.at_peak)})

    @property
    def counts(self) -> dict[str, Any]:
        """All readings, as plain data for an observation."""
        return {"held": self.held_at, "peaks": self.peaks, "exported_bytes": self.exported_bytes}

    def _note(self, original: Any) -> Any:
        def exported(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.exported_bytes = max(self.exported_bytes, tensor.numel() * tensor.element_size())
            return original(tensor, *args, **kwargs)

        return exported


@contextmanager
def weighing() -> Iterator[Scale]:
    """Weigh what this process holds in the block; everything that is there at its start counts too."""
    scale = Scale()
    with ExitStack() as exits:
        for name in _EXPORTS:
            exits.callback(_wrap(name, scale._note))
        scale.memory = exits.enter_context(lab.memory(detail="marks"))
        scale.know(*live_tensors())
        gc.freeze()  # they are known, so the sweeps need not pass by them again
        exits.callback(gc.unfreeze)
        yield scale


def unweighed(tensor: torch.Tensor) -> Any:
    """A copy as an array of numpy, which no scale sees: for what a harness keeps for itself meanwhile."""
    return torch._C.TensorBase.numpy(tensor.detach()).copy()


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that some object of Python is, outside of what `gc.freeze` put aside."""
    gc.collect()
    with watch.overlooked():
        objects = gc.get_objects()
    return [each for each in objects if torch.Tensor in type(each).__mro__]


def _settled() -> KindBytes:
    """What is held once it shrinks no more: a collective's own threads let go a moment after it is over."""
    last, unchanged = _reading(), 0
    for _ in range(_MOST_TRIES):
        time.sleep(_PAUSE_SECONDS)
        now = _reading()
        unchanged = unchanged + 1 if now.total >= last.total else 0
        if unchanged == _UNCHANGED:
            break
        last = now if now.total < last.total else last
    return last


def _reading() -> KindBytes:
    with lab.memory(live_tensors(), detail="marks") as memory:
        return memory.now


def _told(held: KindBytes) -> dict[str, int]:
    return {**{kind: getattr(held, kind) for kind in MEMORY_KINDS}, "total": held.total}


def _wrap(name: str, make: Any) -> Any:
    own = vars(torch.Tensor).get(name)
    setattr(torch.Tensor, name, make(getattr(torch.Tensor, name)))
    return lambda: delattr(torch.Tensor, name) if own is None else setattr(torch.Tensor, name, own)
