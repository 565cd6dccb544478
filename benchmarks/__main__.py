"""Run all benchmarks, or those that are named: ``python -m benchmarks [launch ...]``.

A benchmark is a module of this folder with a function ``main()``, which measures, prints its table and saves its
numbers. Compare the columns of one run with each other; times of different runs or machines say little.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path


def names() -> list[str]:
    """The benchmarks that there are."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main(chosen: list[str]) -> int:
    """Run the chosen benchmarks, or all, one after another; 1 if one of them failed, after running the rest."""
    from benchmarks._report import console, print_header  # not at the top: children that are spawned import this file

    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        console.print(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(names())}")
        return 2
    failed = []
    print_header()
    for name in chosen or names():
        console.rule(name)
        start = time.perf_counter()
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        except Exception:
            console.print_exception()
            failed.append(name)
        console.print(f"[dim]{name} took {time.perf_counter() - start:.0f} s[/]")
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
