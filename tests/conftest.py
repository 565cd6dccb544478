"""What all tests share."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background has them ignore Ctrl-C, and every process that a test starts inherits
# that. Tests of interruption would then wait for one that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
