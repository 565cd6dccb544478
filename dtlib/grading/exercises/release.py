"""`dtlib release`: makes from the solutions the notebooks that learners get, and what ships of the banks.

The markers and the cell metadata are nbgrader's, so that its users can take the solutions as their source notebooks.
A solution becomes a line that raises ``NotImplementedError`` or, in a Markdown cell, invites an answer; hidden tests
disappear, and a cell in which nothing else is left with them. Cell ids stay, so that an exercise can be found in a
notebook that a learner has changed. The same solutions always give the same bytes.

From the course's own solutions and the banks comes also what `grading.check` says of mistakes (see `bank`),
so that a learner needs neither: both hold right answers; and the digests by which a blank is known (see `blanks`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from . import bank, blanks, catalogue, launch

BLANK_CODE = 'raise NotImplementedError("your turn")'
BLANK_TEXT = "*Your answer here.*"
COURSE = bank.HERE.parents[2] / "solutions"
_MARKER = re.compile(r"^(?P<indent>[ \t]*)### (?P<edge>BEGIN|END) (?P<kind>SOLUTION|HIDDEN TESTS)[ \t]*$")
_ALMOST = re.compile(r"#+\s*(BEGIN|END)\s+(SOLUTION|HIDDEN\s+TESTS?)\b", re.IGNORECASE)


class ReleaseError(ValueError):
    """A solutions notebook cannot be released; the message names the notebook and the cell."""


def release(
    solutions_dir: Path | str, exercises_dir: Path | str, check: bool = False, *, repository: str = "", ref: str = ""
) -> list[Path]:
    """Make ``exercises_dir/<stem>.ipynb`` from every ``solutions_dir/<stem>.ipynb``; return the paths written.

    Where a `repository` holds the course, each begins with links that open it at `ref` (see `launch`). From the
    course's own solutions, what ships of the banks and the digests of blanks are made too. Files that are as they
    should be are left alone. With `check` nothing is written: `ReleaseError` names what differs, what is missing, and
    what stands in `exercises_dir` without a solution. The same for a notebook that cannot be read or whose markers do
    not pair, and where `solutions_dir` has no notebook; then nothing is written.
    """
    solutions, exercises = Path(solutions_dir), Path(exercises_dir)
    sources = sorted(solutions.glob("*.ipynb"))
    if not sources:
        raise ReleaseError(f"{solutions} holds no notebook")
    wanted = {exercises / source.name: exercise_text(source, repository, ref) for source in sources}
    orphans = sorted(set(exercises.glob("*.ipynb")) - set(wanted))
    if solutions.resolve() == COURSE:
        wanted |= {bank.SHIPPED: banks(solutions), blanks.HANDED_OUT: blanks.told([*wanted.values()])}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and (changed or orphans):
        parts = {"not what the solutions give": changed, "no solutions for": orphans}
        told = "; ".join(f"{words}: {', '.join(map(str, paths))}" for words, paths in parts.items() if paths)
        raise ReleaseError(f"{told}. Run `dtlib release`")
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8", newline="\n")
    return changed


def exercise_text(source: Path, repository: str = "", ref: str = "") -> str:
    """The exercise notebook, as JSON text, that the solutions notebook at `source` gives; with links if it is told."""
    try:
        notebook = json.loads(source.read_text(encoding="utf-8"))
        cells = [_release_cell(cell, source.name, number) for number, cell in enumerate(notebook["cells"], 1)]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{source} is no notebook: {type(error).__name__}: {error}") from error
    head = launch.cells(repository, source.stem, ref or launch.BRANCH) if repository else []
    notebook["cells"] = left = [*head, *(cell for cell in cells if cell is not None)]
    names = Counter(
        name for cell in left for name in {cell["id"], cell["metadata"].get("nbgrader", {}).get("grade_id")}
    )
    if twice := [name for name, count in names.items() if name and count > 1]:
        raise ReleaseError(f"{source.name}: two cells are called {twice[0]!r}")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def banks(solutions: Path) -> str:
    """The text of `bank.SHIPPED` that the solutions and the banks give; each must fit its exercise."""
    paths = [path for stem in catalogue.STEMS if (path := solutions / f"{stem}.ipynb").exists()]
    cells = [cell for path in paths for cell in json.loads(path.read_text("utf-8"))["cells"]]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    try:
        told = {"shared": bank.read(bank.HERE / "shared.md")}
        for name, (path, exercise) in catalogue.bare().items():
            if (cell := sources.get(name.replace(".", "-"))) is not None:
                whole = bank.read(path.with_suffix(".md"))
                told[name] = bank.shortened(exercise, whole, bank.reference(cell))
                bank.equipped(exercise, told[name], told["shared"])
        return bank.ship(told)
    except bank.BankError as error:
        raise ReleaseError(f"what ships of the banks cannot be made: {error}") from error


def strip(text: str, where: str, blank: str = BLANK_CODE) -> str:
    """`text` of a cell without its solutions and hidden tests. `ReleaseError`, which names `where`, for bad markers."""
    kept: list[str] = []
    opened, since = "", 0

    def refuse(number: int, why: str) -> None:
        raise ReleaseError(f"{where}, line {number}: {why}")

    for number, line in enumerate(text.splitlines(), 1):
        marker = _MARKER.match(line)
        if marker is None:
            if _ALMOST.search(line):
                on_its_own = "write '### BEGIN SOLUTION' (or END, or HIDDEN TESTS) on a line of its own"
                refuse(number, f"{line.strip()!r} is almost a marker; {on_its_own}")
            kept += [line] * (not opened)
        elif marker["edge"] == "END":
            if opened != marker["kind"]:
                refuse(number, f"END {marker['kind']} without its BEGIN")
            opened = ""
        else:
            if opened:
                refuse(number, f"BEGIN {marker['kind']} inside the {opened} of line {since}")
            opened, since = marker["kind"], number
            if opened == "SOLUTION":
                if blank == BLANK_CODE and not marker["indent"]:
                    refuse(number, "a solution outside of a function would fail as a blank: put it into a function")
                kept.append(marker["indent"] + blank)
    if opened:
        refuse(since, f"BEGIN {opened} without its END")
    return "\n".join(kept).strip("\n")


def _release_cell(cell: dict[str, Any], notebook: str, number: int) -> dict[str, Any] | None:
    """The cell as a learner gets it, or None where nothing of it is left."""
    name = cell.get("id", f"number {number}")
    text = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    is_code = cell["cell_type"] == "code"
    stripped = strip(text, f"{notebook}, cell {name!r}", BLANK_CODE if is_code else BLANK_TEXT)
    if text.strip() and not stripped.strip():
        return None
    return {
        "cell_type": cell["cell_type"],
        "id": name,
        "metadata": {key: value for key, value in cell["metadata"].items() if key in ("nbgrader", "tags")},
        "source": stripped.splitlines(keepends=True),
        **({"execution_count": None, "outputs": []} if is_code else {}),
    }
