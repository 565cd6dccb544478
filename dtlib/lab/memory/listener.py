"""What the tracker of storages tells those who listen."""

from __future__ import annotations

from typing import Protocol

from .storages import KindBytes


class Listener(Protocol):
    """Who wants to know how much there is."""

    def grown(self, total: int) -> None:
        """There are now `total` bytes, more than before."""

    def is_waiting(self) -> bool:
        """Whether the peak that was reached still wants its kinds."""

    def peak_is(self, held: KindBytes) -> None:
        """What there is, while the peak lasts."""

    def event(self, module: str, phase: str) -> None:
        """Something worth a line in the timeline."""

    def was_there(self, kind: str, num_bytes: int) -> None:
        """So many bytes were there from the start, and are known only now."""
