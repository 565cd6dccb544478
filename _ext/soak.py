"""What takes long, room by room: `make soak`. Rooms may run on several evenings or machines.

``soak.py`` runs all rooms, ``soak.py ROOM …`` those, ``soak.py show`` none. Each leaves a folder in ``_build/soak``,
anew when it runs again; ``_build/soak/soak.md`` is the table of all that lie there, from wherever they came.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SOAK = ROOT / "_build" / "soak"
ROOMS = {
    "grading": ["-n2", "-knot Busy and not every_seed", "tests/grading"],
    "busy": ["-kBusy", "tests/grading/test_soak.py"],  # makes the machine so: beside nothing else
    **{room: ["-n2", f"tests/{room}"] for room in ("lab", "ranks", "theory", "book")},
    "seeds": ["-n2", "-kevery_seed", "tests/grading/test_soak.py"],  # longer than all others together
}
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}  # what junit calls them


def run(room: str) -> int:
    """Run a room's tests, note what the machine did meanwhile, and return pytest's exit code."""
    shutil.rmtree(SOAK / room, ignore_errors=True)
    (SOAK / room).mkdir(parents=True)
    start = time.monotonic()
    report = f"--junitxml={SOAK / room / 'junit.xml'}"
    vouched = {**os.environ, "DTLIB_NOTHING_LACKING": "1"}  # what is skipped for want of a browser has not run
    command = [sys.executable, "-m", "pytest", "-q", "-msoak", report, *ROOMS[room]]
    done = subprocess.run(command, cwd=ROOT, env=vouched)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    facts = {"seconds": time.monotonic() - start, "load": os.getloadavg()[2], "commit": commit.stdout.strip()}
    (SOAK / room / "facts.json").write_text(json.dumps(facts))
    return done.returncode


def table(folder: Path) -> str:
    """Of each room that lies in `folder` its files: how many tests passed, failed and were skipped, and minutes."""
    rows = ["| room | file | passed | failed | skipped | minutes | load | commit |", f"|{'---|' * 8}"]
    for facts in sorted(folder.glob("*/facts.json")):
        room, told = facts.parent.name, json.loads(facts.read_text())
        files, seconds = defaultdict[str, Counter[str]](Counter), Counter[str]()
        for case in ElementTree.parse(facts.with_name("junit.xml")).iter("testcase"):
            name = next(each for each in case.get("classname", "").split(".") if each.startswith("test_"))
            files[name][next((ENDS[each.tag] for each in case if each.tag in ENDS), "passed")] += 1
            seconds[name] += float(case.get("time", 0))
        scale = told["seconds"] / (seconds.total() or 1.0)  # they ran side by side
        for name, counts in files.items():
            cells = [room, name, *(counts[end] for end in ("passed", "failed", "skipped"))]
            cells += [f"{scale * seconds[name] / 60:.1f}", f"{told['load']:.0f}", told["commit"]]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def main(*rooms: str) -> int:
    """Run `rooms`, or all, and print the table; an exit code."""
    if rooms != ("show",) and (unknown := {*rooms} - {*ROOMS}):
        raise SystemExit(f"no room is called {', '.join(sorted(unknown))}: there are {', '.join(ROOMS)}")
    codes = [run(room) for room in (() if rooms == ("show",) else rooms or ROOMS)]
    (SOAK / "soak.md").write_text(table(SOAK))
    print((SOAK / "soak.md").read_text())
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
