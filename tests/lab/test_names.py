"""`lab.memory`, `lab.race`, `lab.timeline` and `lab.wire` are functions; `lab` has modules of the same names."""

import subprocess
import sys

import pytest

CALLABLE = """
functions = lab.memory, lab.messages, lab.race, lab.timeline, lab.wire
assert all(callable(each) for each in functions), "a package took the name"
from dtlib.lab import memory, race
assert memory is lab.memory
assert race is lab.race
"""
PACKAGES = """
import dtlib.lab.race
import dtlib.lab.memory.tracker
import dtlib.lab.timeline.intervals
import dtlib.lab.wire.pace
"""
TAKEN = "import sys\nlab.memory = sys.modules['dtlib.lab.memory']\n"


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code",
    [
        "from dtlib import lab\n" + PACKAGES + "from dtlib.lab.memory import held\n",
        PACKAGES + "from dtlib import lab\n",
    ],
    ids=["packages after", "packages before"],
)
def test_a_name_is_its_function_whatever_was_imported(code):
    done = python(code + CALLABLE)
    assert done.returncode == 0, done.stderr


def test_a_package_that_took_the_name_would_be_noticed():
    assert "a package took the name" in python("from dtlib import lab\n" + TAKEN + CALLABLE).stderr
