"""What a rank reports about its communication: the kernel's counts beside the recorded calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dtlib import lab
from dtlib.lab import context
from dtlib.lab.wire import kernel_counts_connections

from . import SETTLE
from .lower_bounds import least_bytes, surely_sent_bytes
from .recorder import Recorder
from .scale import Scale, weighing


@dataclass
class Meter:
    """The recorder and the scale of a block, and, once the block has ended, what was counted."""

    recorder: Recorder = field(default_factory=Recorder)
    scale: Scale = field(default_factory=Scale)
    counts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def metered(*, weighed: bool = False) -> Iterator[Meter]:
    """Count and record what this rank communicates in the block; every rank of the run enters it.

    ``meter.counts`` then holds ``sent_bytes`` of this rank, ``wire_bytes`` of all together, ``events`` (see
    `Recorder`), ``library``, ``built_in`` and ``escaped`` (see `Watch`). Where the kernel does not tell what was
    carried, ``sent_bytes`` is what the recorded calls send at the least, and ``wire_bytes`` is missing.
    ``peak_tensor_bytes`` is the most that the tensors held which were made or used in the block (see `lab.memory`).

    A block that is `weighed` also takes in what was there at its start, and ``held``, ``peaks`` and ``exported_bytes``
    tell what ``meter.scale`` read (see `Scale`).
    """
    meter = Meter()
    with _memory(meter, weighed) as memory, lab.wire() as wire, meter.recorder.recording():
        yield meter
    events = meter.recorder.events
    if kernel_counts_connections():
        meter.counts = {"sent_bytes": wire.sent_bytes, "wire_bytes": wire.total_bytes}
    else:
        meter.counts = {"sent_bytes": least_bytes(events, dist.get_world_size())}
    watch = meter.recorder.watch
    meter.counts |= {"events": events, "peak_tensor_bytes": memory.peak, **watch.told}
    if weighed:
        meter.counts |= meter.scale.counts


@contextmanager
def _memory(meter: Meter, weighed: bool) -> Iterator[lab.Memory]:
    if not weighed:
        with lab.memory(detail="marks") as memory:
            yield memory
        return
    with weighing() as meter.scale:
        assert meter.scale.memory is not None
        yield meter.scale.memory


def settle(meter: Meter) -> None:
    """Meet the other ranks and the warden, which waits until what the record says is under way has been sent.

    So the order of "backward is done" and of the bytes is known outside, where nobody can change it. In a notebook
    this is a meeting and no more.
    """
    launched = int(surely_sent_bytes(meter.recorder.events, dist.get_world_size()))
    context.current("settle()").exchange(SETTLE + launched.to_bytes(8, "big"))
