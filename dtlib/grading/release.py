"""`dtlib release`: makes the notebooks that learners get from those that hold the solutions.

The markers and the cell metadata are nbgrader's, so that its users can take the solutions as their source notebooks:

- ``### BEGIN SOLUTION`` … ``### END SOLUTION`` in a code cell becomes one line that raises ``NotImplementedError``, as
  far indented as the marker; in a Markdown cell it becomes a line that invites an answer.
- ``### BEGIN HIDDEN TESTS`` … ``### END HIDDEN TESTS`` disappears, and a cell in which nothing else is left with it.

Outputs, execution counts and the versions of a kernel are dropped. Cell ids stay, so that an exercise can be found in
a notebook that a learner has changed. The same solutions always give the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BLANK_CODE = 'raise NotImplementedError("your turn")'
BLANK_TEXT = "*Your answer here.*"
_MARKER = re.compile(r"^(?P<indent>[ \t]*)### (?P<edge>BEGIN|END) (?P<kind>SOLUTION|HIDDEN TESTS)[ \t]*$")
_ALMOST = re.compile(r"#+\s*(BEGIN|END)\s+(SOLUTION|HIDDEN\s+TESTS?)\b", re.IGNORECASE)


class ReleaseError(ValueError):
    """A solutions notebook cannot be released; the message names the notebook and the cell."""


class Drift(ReleaseError):
    """The exercises are not what the solutions give."""


def release(solutions_dir: Path | str, exercises_dir: Path | str, check: bool = False) -> list[Path]:
    """Make ``exercises_dir/<stem>.ipynb`` from every ``solutions_dir/<stem>.ipynb``; return the paths written.

    Notebooks that are as they should be are left alone. With `check` nothing is written: `Drift` names what differs,
    what is missing, and what stands in `exercises_dir` without a solution. Raises `ReleaseError` for a notebook that
    cannot be read or whose markers do not pair, and where `solutions_dir` has no notebook; then nothing is written.
    """
    solutions, exercises = Path(solutions_dir), Path(exercises_dir)
    sources = sorted(solutions.glob("*.ipynb"))
    if not sources:
        raise ReleaseError(f"{solutions} holds no notebook")
    wanted = {exercises / source.name: exercise_text(source) for source in sources}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        orphans = sorted(set(exercises.glob("*.ipynb")) - set(wanted))
        if changed or orphans:
            raise Drift(_drift(changed, orphans))
        return []
    exercises.mkdir(parents=True, exist_ok=True)
    for path in changed:
        path.write_text(wanted[path], encoding="utf-8", newline="\n")
    return changed


def exercise_text(source: Path) -> str:
    """The exercise notebook, as JSON text, that the solutions notebook at `source` gives."""
    try:
        notebook = json.loads(source.read_text(encoding="utf-8"))
        cells = [_release_cell(cell, source.name, number) for number, cell in enumerate(notebook["cells"], 1)]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{source} is no notebook: {type(error).__name__}: {error}") from error
    _refuse_duplicates(source, cells)
    notebook["cells"] = [cell for cell in cells if cell is not None]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def strip(text: str, where: str, blank: str = BLANK_CODE) -> str:
    """`text` of a cell without its solutions and hidden tests. `ReleaseError`, which names `where`, for bad markers."""
    kept: list[str] = []
    opened: tuple[str, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        marker = _MARKER.match(line)
        if marker is None:
            if _ALMOST.search(line):
                raise ReleaseError(
                    f"{where}, line {number}: {line.strip()!r} is almost a marker; write '### BEGIN SOLUTION' (or END, "
                    "or HIDDEN TESTS) on a line of its own"
                )
            if opened is None:
                kept.append(line)
            continue
        kind = marker["kind"]
        if marker["edge"] == "BEGIN":
            if opened is not None:
                raise ReleaseError(f"{where}, line {number}: BEGIN {kind} inside the {opened[0]} of line {opened[1]}")
            opened = kind, number
            if kind == "SOLUTION":
                if blank == BLANK_CODE and not marker["indent"]:
                    raise ReleaseError(
                        f"{where}, line {number}: a solution outside of a function would make the blank notebook fail "
                        "when it runs; put it into a function"
                    )
                kept.append(marker["indent"] + blank)
        else:
            if opened is None or opened[0] != kind:
                raise ReleaseError(f"{where}, line {number}: END {kind} without its BEGIN")
            opened = None
    if opened is not None:
        raise ReleaseError(f"{where}, line {opened[1]}: BEGIN {opened[0]} without its END")
    return "\n".join(kept).strip("\n")


def grade_cells(path: Path) -> dict[str, dict[str, Any]]:
    """The nbgrader metadata of each cell of the notebook at `path` that carries any, by its ``grade_id``."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    told = [cell["metadata"]["nbgrader"] for cell in cells if "nbgrader" in cell["metadata"]]
    return {each["grade_id"]: each for each in told}


def _release_cell(cell: dict[str, Any], notebook: str, number: int) -> dict[str, Any] | None:
    """The cell as a learner gets it, or None where nothing of it is left."""
    name = cell.get("id", f"number {number}")
    where = f"{notebook}, cell {name!r}"
    text = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    is_code = cell["cell_type"] == "code"
    stripped = strip(text, where, BLANK_CODE if is_code else BLANK_TEXT)
    if text.strip() and not stripped.strip():
        return None
    metadata = {key: value for key, value in cell["metadata"].items() if key in ("nbgrader", "tags")}
    released = {
        "cell_type": cell["cell_type"],
        "id": name,
        "metadata": metadata,
        "source": stripped.splitlines(keepends=True),
    }
    return {**released, "execution_count": None, "outputs": []} if is_code else released


def _refuse_duplicates(source: Path, cells: Iterable[dict[str, Any] | None]) -> None:
    seen: set[str] = set()
    for cell in cells:
        names = [] if cell is None else [cell["id"], cell["metadata"].get("nbgrader", {}).get("grade_id")]
        for name in {name for name in names if name}:
            if name in seen:
                raise ReleaseError(f"{source.name}: two cells are called {name!r}")
            seen.add(name)


def _drift(changed: list[Path], orphans: list[Path]) -> str:
    parts = []
    if changed:
        parts.append(f"not what the solutions give: {', '.join(map(str, changed))}")
    if orphans:
        parts.append(f"no solutions for: {', '.join(map(str, orphans))}")
    return f"{'; '.join(parts)}. Run `dtlib release`"
