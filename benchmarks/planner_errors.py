"""How far the planner's times are off, regime by regime, on runs that their constants had not seen.

Nothing is timed here: the fits ask for a million step times. What comes out is what the planner's intervals rest on.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks._report import print_table
from benchmarks.planner import tables
from dtlib.theory import calibration, planner

FOUND = Path(planner.errors.__file__).with_name("errors.json")


def main() -> None:
    """Fit each framework without each of its folds, show the errors, and save them where the planner finds them."""
    in_fp8 = tables(calibration.fp8.TABLES, calibration.fp8.runs)
    every = [*tables(calibration.published.EVERY).values(), *in_fp8.values()]
    found = calibration.folds.measured(run for runs in every for run in runs)
    rows = [
        [name, *(f"{of[each]:{form}}" for each, form in
                 (("runs", "d"), ("median", ".1%"), ("mean", ".1%"), ("low", ".2f"), ("high", ".2f")))]
        for name, of in found.items()
    ]  # fmt: skip
    columns = ["regime", "runs", "median error", "mean error", "tenth below", "tenth above"]
    print_table("step times of runs left out of the fit; measured over planned seconds", columns, rows)
    FOUND.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
