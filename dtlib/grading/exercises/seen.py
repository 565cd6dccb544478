"""What was observed of a case: what a submission's processes said, and what was seen from outside of them.

A verdict rests on what was `Seen`, and on values that are held against theory. Nothing that was said is the measure of
anything else that was said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Trouble:
    """Why a case brought no result.

    `kind` is ``raised``, ``blank`` (a ``NotImplementedError`` of the learner's own), ``hung``, ``died``, ``skipped``
    (earlier cases hung), ``not known`` (ended from outside before anybody could tell), or one of those after which
    nothing of the exercise counts: ``missing``, ``syntax``, ``limit``, ``tampered``. `text` says it in words, `line`
    shows the learner's line if one is known.
    """

    kind: str
    text: str
    line: str = ""

    def __str__(self) -> str:
        if not self.line:
            return self.text
        return f"{self.text} ({self.line})" if self.kind == "hung" else f"{self.text}, in {self.line}"


class Header(NamedTuple):
    """A header of gloo's on the wire: ``data`` from a rank to another, or the notice that it began to ``send`` to it or
    to ``receive`` from it. `op` is ``send`` or a collective's name, `which` its tag or what tells collectives apart."""

    kind: str
    rank: int
    peer: int
    op: str
    which: int
    num_bytes: int


class Ask(NamedTuple):
    """A rank asked for its piece `number` (-1 for one by name), called `label`: how many headers had crossed the wire
    when it was handed out, ``quiet`` if it was held back until nothing moved any more, what the rank held, and the most
    that it had held since it asked the last time. It `shown` a number with it (NaN: none) that only who has come so far
    can know."""

    rank: int
    number: int
    position: int
    why: str
    held_bytes: int
    peak_bytes: int
    label: str = ""
    shown: float = math.nan


@dataclass(frozen=True)
class Seen:
    """What was seen of a case from outside. `is_proved` is False where there was no private network to look at: then
    the headers are those that the ranks' own processes told, without notices."""

    log: Sequence[Header] = ()
    asks: Sequence[Ask] = ()
    peak_at_end: Sequence[int] = ()
    is_proved: bool = True
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    starved_seconds: float = 0.0

    def data(self, op: str = "") -> list[Header]:
        """The messages that crossed, in the order in which they began; of one operation if `op` says which."""
        return [each for each in self.log if each.kind == "data" and op in ("", each.op)]

    def sent_bytes(self, rank: int) -> int:
        """The payload that `rank` sent, without gloo's headers."""
        return sum(each.num_bytes for each in self.data() if each.rank == rank)

    @property
    def total_bytes(self) -> int:
        """The payload that all ranks sent together."""
        return sum(each.num_bytes for each in self.data())

    def collectives(self, rank: int | None = None) -> list[tuple[str, int]]:
        """(name, bytes of all ranks together) of each call of a collective, in the order in which `rank` began them."""
        sizes: Counter[tuple[str, int]] = Counter()
        begun: dict[tuple[str, int], None] = {}
        for each in self.log:
            if each.op not in ("send", "barrier"):
                if rank in (None, each.rank):
                    begun.setdefault((each.op, each.which))
                if each.kind == "data":
                    sizes[each.op, each.which] += each.num_bytes
        return [(op, sizes[op, which]) for op, which in begun]

    def asked(self, rank: int, label: str) -> list[Ask]:
        """When `rank` was handed pieces called `label`."""
        return [each for each in self.asks if each.rank == rank and each.label == label]

    def held(self, rank: int, label: str) -> int:
        """The most that `rank` held when it asked for a piece called `label`; 0 where it gave back some of what it had
        at first."""
        return max(0, max(each.held_bytes for each in self.asked(rank, label)))

    def peak(self, rank: int) -> int:
        """The most that `rank` held at any time."""
        return max([0, *(each.peak_bytes for each in self.asks if each.rank == rank), self.peak_at_end[rank]])

    def sent_by(self, ask: Ask) -> int:
        """The payload that the rank that asked had sent by then."""
        mine = (each for each in self.log[: ask.position] if each.kind == "data" and each.rank == ask.rank)
        return sum(each.num_bytes for each in mine)

    def begun_by(self, rank: int, position: int) -> list[Header]:
        """The notices of `rank` among the first `position` headers."""
        return [each for each in self.log[:position] if each.rank == rank and each.kind != "data"]

    def peers(self, rank: int) -> set[int]:
        """To whom `rank` sent messages of its own."""
        return {each.peer for each in self.data("send") if each.rank == rank}


@dataclass(frozen=True)
class Observed:
    """One case and what became of it: what each rank `said` (plain data), what was `seen`, or the `trouble`."""

    case: Case
    said: tuple[Any, ...] = ()
    seen: Seen = field(default_factory=Seen)
    trouble: Trouble | None = None

    @property
    def has_come(self) -> bool:
        """Whether there is anything to judge."""
        return self.trouble is None

    @property
    def words(self) -> str:
        """The case in words: its own ``"words"``, or its numbers."""
        if "words" in self.case:
            return str(self.case["words"])
        plain = {key: value for key, value in self.case.items() if isinstance(value, int | float | str)}
        return ", ".join(f"{key} = {value}" for key, value in plain.items())


def rounds(seen: Seen) -> int:
    """The rounds that the messages take if a rank sends one at a time, and none before it has heard what it passes on.

    Counted from packets: a message that is sent in round k has arrived at its end, a rank's messages go in the order in
    which it began them, and whoever hears something passes it on from the next round on.
    """
    kind = "send" if seen.is_proved else "data"
    heard: dict[int, int] = {}
    spoken: Counter[int] = Counter()
    for each in seen.log:
        if each.kind == kind and each.op == "send":
            end = spoken[each.rank] = max(heard.get(each.rank, 0), spoken[each.rank]) + 1
            heard.setdefault(each.peer, end)
    return max(spoken.values(), default=0)
