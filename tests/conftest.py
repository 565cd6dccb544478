"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and every process that a test starts inherits
# that. Tests of interruption would then wait for one that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asserts a wall-clock time, and a deadline for each example would be one.
settings.register_profile("course", deadline=None)
settings.load_profile("course")


@pytest.fixture(scope="session")
def lacking() -> Callable[[str], None]:
    """To be called with what this machine lacks for a test: the test is skipped.

    Where the project is vouched for (`.ci/run`) it fails: a wall that we broke would otherwise skip its own tests.
    """

    def lacks(what: str) -> None:
        if os.environ.get("DTLIB_NOTHING_LACKING"):
            pytest.fail(f"this machine was said to lack nothing: {what}")
        pytest.skip(what)

    return lacks
