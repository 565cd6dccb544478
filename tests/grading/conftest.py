"""Classes to grade, and where the key of this machine lies meanwhile."""

from __future__ import annotations

import pytest

from dtlib.grading.classroom.grader import grade
from dtlib.grading.sandbox.walls import WALLS

from .classroom import HALF, NONE, PAPER, SEED, FakeSandbox, five, hand_in, reference, troubled


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where the key of this machine lies meanwhile."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "dtlib"


@pytest.fixture
def group(tmp_path):
    """A folder of five: all right, half of one, a limit, blank, and a notebook that cannot be read."""
    return five(tmp_path / "submissions")


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """The results of a small class."""
    base = tmp_path_factory.mktemp("class")
    handed_in = base / "submissions"
    hand_in(handed_in, "anna", reference(*PAPER))
    hand_in(handed_in, "bob", {**reference("collectives.1"), "collectives-2": "# print: Hello\n" + HALF})
    hand_in(handed_in, "=cleo()", {**reference("collectives.1"), "collectives-2": HALF})
    hand_in(handed_in, "dan")
    hand_in(handed_in, "eve", {"collectives-2": NONE, **troubled("collectives.1", "limit", "1 GB printed")})
    hand_in(handed_in, "fay", troubled("collectives.1", "fault", "we fell over"))
    hand_in(handed_in, "gus", troubled("collectives.1", "hung", "nothing moved"))
    hand_in(
        handed_in,
        "Gus",
        {**troubled("collectives.1", "died", "it was killed"), **troubled("collectives.2", "not known", "too slow")},
    )
    walls = {**dict.fromkeys(WALLS, ""), "network": "the kernel <refuses>"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(base / "data"))
        grade(handed_in, base / "out", exercises=PAPER, seed=SEED, sandbox=FakeSandbox(walls), jobs=1)
    return base / "out"
