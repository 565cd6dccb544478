"""When it breaks, as algebra: how often a job of many parts fails, how often to save, what share of the time is left.

Letters: N parts of a job (`units`, `nodes`), m mean seconds between failures of one (`unit_mtbf`), M = m/N of the job
(`mtbf`); τ seconds of work between two saves (`interval`, the save not counted), δ seconds of a save (`save`), d until
a failure is noticed (`detect`), R until the run goes on (`restart`). Times are in seconds.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .failures import failures, mtbf, node_mtbf, survival
from .goodput import Split, goodput, split, waste
from .interval import best_interval, daly_interval, young_interval
from .simulate import Run, Span, simulate

__all__ = [
    "Run",
    "Span",
    "Split",
    "best_interval",
    "daly_interval",
    "failures",
    "goodput",
    "mtbf",
    "node_mtbf",
    "simulate",
    "split",
    "survival",
    "waste",
    "young_interval",
]
