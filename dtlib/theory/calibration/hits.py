"""How often the verdicts on memory came true."""

from __future__ import annotations

from collections.abc import Iterable

from dtlib.theory.planner import fit, plan_memory

from .published import Row, ultrascale


def verdicts(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Of rows of `ultrascale_half`, how many that ran and how many that crashed got each verdict of `fit`.

    Most that crashed ran out of memory, but why is not printed. Rows with more stages than layers are left out.
    """
    counts: dict[str, list[int]] = {}
    for row in rows:
        if int(row["pp"]) <= int(row["layers"]):
            run = ultrascale(row)
            (plan,) = run.plans
            told = fit(plan_memory(run.model, plan), run.machine, plan=plan, model=run.model).verdict
            counts.setdefault(told, [0, 0])[row["status"] != "ok"] += 1
    return {told: (ran, crashed) for told, (ran, crashed) in counts.items()}
