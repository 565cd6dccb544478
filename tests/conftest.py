"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and every process that a test starts inherits
# that. Tests of interruption would then wait for one that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asserts a wall-clock time, and a deadline for each example would be one.
settings.register_profile("course", deadline=None)
settings.load_profile("course")
