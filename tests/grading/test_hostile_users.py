"""The hostile bank as another user than root, which is how most CI systems grade: all ranks are of one user then.

Where the tests are run by root, in a process that is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from .answers import ROOT
from .hostile_bank import hostile_submissions

# Root of a user namespace in which it is nobody special, and of another group, as every other user is.
AS_A_USER = ["setpriv", "--regid=65534", "--clear-groups", "unshare", "--user", "--map-user=1000", "--map-group=1000"]
# Where it matters who one is: signals, other processes, what a user may change or take back. `make soak` takes all.
FEW = ("Bits in signals to the whole group", "Killing the process group", "Reading and steering other processes")
CHANNELS = "test_no_way_but_the_network_is_open"


def run_as_a_user(lacking: Callable[[str], None], *arguments: str) -> str:
    if os.geteuid() != 0:
        pytest.skip("we are no superuser: the tests beside this one were run as a user")
    if not shutil.which("setpriv") or subprocess.run([*AS_A_USER, "true"], capture_output=True).returncode != 0:
        lacking("setpriv and unshare cannot take root away here")
    command = [*AS_A_USER, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_where_it_matters_who_one_is(lacking: Callable[[str], None]):
    tests = "tests/grading/test_hostile.py::TestBehindWalls::test_scores_zero_with_a_reason_and_leaves_nothing"
    cases = [f"{tests}[{title}]" for title in FEW]
    assert passed(run_as_a_user(lacking, *cases, f"tests/grading/test_channels.py::{CHANNELS}")) == len(cases) + 1


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_all_of_them(lacking: Callable[[str], None]):
    output = run_as_a_user(lacking, "tests/grading/test_hostile.py::TestBehindWalls", "tests/grading/test_channels.py")
    assert passed(output) > len(hostile_submissions())
