"""Splitting the depth: schedules as data, generated, checked, priced and drawn; nothing here needs a rank.

Letters: p ranks, m micro-batches, v chunks a rank, S = p·v stages, T_F, T_B, T_W seconds of a rank's layers for one
micro-batch: forward, the gradient of the input, that of the weights.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from collections.abc import Callable

from .automatic import zb_auto
from .generators import gpipe, interleaved, one_f_one_b, pipedream, sequential
from .grid import bars, text_grid
from .laws import (
    boundary_elements,
    bubble_fraction,
    bubble_overhead,
    hiding_width,
    idle_seconds,
    micro_batches_for,
    most_in_flight,
    weight_versions,
)
from .partition import best_partition
from .schedule import Action, Kind, Schedule, from_text
from .simulate import Timetable, most_held, simulate
from .validate import validate, with_messages
from .zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "sequential": sequential,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved": interleaved,
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
    "ZB-V": zb_v,
    "DualPipeV": dualpipe_v,
}
"""The synchronous schedules by name; each generator takes p and m, and refuses what it cannot do."""

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "Timetable",
    "bars",
    "best_partition",
    "boundary_elements",
    "bubble_fraction",
    "bubble_overhead",
    "dualpipe_v",
    "from_text",
    "gpipe",
    "hiding_width",
    "idle_seconds",
    "interleaved",
    "micro_batches_for",
    "most_held",
    "most_in_flight",
    "one_f_one_b",
    "pipedream",
    "sequential",
    "simulate",
    "text_grid",
    "validate",
    "weight_versions",
    "with_messages",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
