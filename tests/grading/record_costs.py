"""Records what each reference computes: ``python -m grading.record_costs`` in ``tests``, on an idle machine.

With names, as ``ep mtp.2``, those alone: exercises or whole stems; the others stay as they are recorded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.runner import Sandbox, costs

from .answers import SEED, answer, programs


def main(*names: str) -> None:
    """Grade every reference behind all walls, or those of `names`, and write the dearest case of each in units of a
    little work."""
    chosen = {
        name: each for name, each in all_exercises().items() if not names or {name, name.partition(".")[0]} & {*names}
    }
    if unknown := {*names} - {*chosen} - {name.partition(".")[0] for name in chosen}:
        raise SystemExit(f"no exercise or stem is called {', '.join(sorted(unknown))}")
    found = dict(costs.recorded()) if names else {}
    with Sandbox() as sandbox:
        for name, exercise in chosen.items():
            outcome = sandbox.run(exercise, answer(name, programs(name)[0].source), exercise.cases(SEED))
            dearest = max(each.seen.cpu_seconds for each in outcome.observed)
            found[name] = round(dearest / costs.unit_seconds(), 1)
            print(f"{name:15} {dearest:6.2f} s  {found[name]:8.1f} units")
    Path(costs.__file__).with_name("costs.json").write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
