"""How far the planner's constants carry: its error over each published table, and with that table left out of the fit.

Nothing is timed here: a fit asks for a million step times, which is too long for a page of the book.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from benchmarks._report import console, print_table, save
from dtlib.theory.planner import FITTED, fitting, published

DATA = Path(__file__).parents[1] / "chapters" / "data"


def tables(names: Iterable[str] = tuple(published.TABLES)) -> dict[str, list[published.Run]]:
    """The runs of the tables called `names`."""
    found = {}
    for table in names:
        with (DATA / f"{table}.csv").open(encoding="utf-8") as file:
            found[table] = published.runs(table, csv.DictReader(file))
    return found


def main() -> None:
    """Fit on all tables and on all but each one, show the errors, and save them."""
    runs = tables()
    here = {table: published.mean_error(each) for table, each in runs.items()}
    left_out = fitting.left_out_errors(runs)
    rows = [[table, str(len(runs[table])), f"{here[table]:.1%}", f"{left_out[table]:.1%}"] for table in runs]
    print_table("mean absolute error of the step time", ["table", "runs", "with it", "left out"], rows)
    again = fitting.fitted(runs)
    names = fitting.TIME_CONSTANTS
    console.print("found again:", ", ".join(f"{name} {getattr(again, name):.3g}" for name in names), highlight=False)
    console.print("in use:     ", ", ".join(f"{name} {getattr(FITTED, name):.3g}" for name in names), highlight=False)
    save("planner", {"with": here, "left_out": left_out})
