"""When it breaks, as algebra: how often a job of many parts fails, how often to save, what share of the time is left.

Letters: N parts of a job (`units`, `nodes`), m mean seconds between failures of one (`unit_mtbf`), M = m/N of the job
(`mtbf`); τ seconds of work between two saves (`interval`, the save not counted), δ seconds of a save (`save`), d until
a failure is noticed (`detect`), R until the run goes on (`restart`); s seconds that a save in the background stops the
run (`stall`), w until it is whole (`write`); k `spares`, ρ seconds of a `repair`; c of a `check`.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .failures import failures, mtbf, node_mtbf, survival
from .goodput import Split, goodput, waste
from .interval import best_interval, daly_interval, young_interval
from .levels import background_goodput, background_interval, two_level_goodput, two_level_intervals
from .saves import best_writers, rank_save_bytes, save_bytes, save_seconds
from .silent import check_interval, checked_goodput
from .simulate import Run, Span, simulate
from .spares import spare_pays_from, spares_needed, spares_suffice, standing_share

__all__ = [
    "Run", "Span", "Split", "background_goodput", "background_interval", "best_interval", "best_writers",
    "check_interval", "checked_goodput", "daly_interval", "failures", "goodput", "mtbf", "node_mtbf",
    "rank_save_bytes", "save_bytes", "save_seconds", "simulate", "spare_pays_from", "spares_needed", "spares_suffice",
    "standing_share", "survival", "two_level_goodput", "two_level_intervals", "waste", "young_interval",
]  # fmt: skip
