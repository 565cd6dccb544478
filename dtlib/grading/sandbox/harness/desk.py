"""The desk at which a rank asks for what comes next: inputs first, then the pieces without which it cannot go on.

Whoever stands behind the desk notes, at each question, what was sent by then and what the rank holds, and may keep the
answer back until another rank is as far. So the order of things is known outside, where nobody can change it.
"""

from __future__ import annotations

import socket
from typing import Any

from dtlib.grading.exercises.plain import unpack
from dtlib.processes.channel import recv_frame, send_frame


class Desk:
    """The desk of one rank; at the other end of `sock` its warden hands out the pieces in their order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def next(self, shows: Any = None) -> Any:
        """The next piece. Waits until it is handed out."""
        return self.ask("", shows)

    def ask(self, label: str, shows: Any = None) -> Any:
        """The piece of that name, as often as it is asked for; waits until it is handed out.

        What it `shows` is a number that nobody knows who has not come so far: who asks earlier shows another.
        """
        send_frame(self._sock, f"A{label}|{'' if shows is None else f'{float(shows):.9e}'}".encode())
        return unpack(recv_frame(self._sock)[0])
