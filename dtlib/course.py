"""The table of the course: each chapter once, in the order of the book. It imports nothing of the library.

What a chapter needs elsewhere is found by its stem; ``tests/test_course.py`` names each room that one still lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOMS = ("theory", "ranks", "exercises")


@dataclass(frozen=True)
class Chapter:
    """One chapter: its name in every folder, its subject in words, the part that it opens, a line of what it shows."""

    stem: str
    title: str
    line: str
    part: str = ""
    rooms: tuple[str, ...] = ROOMS
    is_lesson: bool = True  # else it has a shape of its own, and tests of its own hold it

    @property
    def heading(self) -> str:
        """The title as a heading."""
        return self.title[0].upper() + self.title[1:]


CHAPTERS = (
    Chapter(
        "memory", "memory", "parameters, bytes by recipe, FLOPs, utilisation, roofline, bf16 to the byte",
        part="Foundations",
    ),
    Chapter(
        "collectives", "collectives",
        "ring, tree, doubling, halving–doubling, two levels; the lower bound; α and β of your machine",
    ),
    Chapter(
        "dp", "data parallelism",
        "the equality theorem and what breaks it; buckets, overlap, when to stop adding ranks",
        part="Data parallelism",
    ),
    Chapter(
        "batch", "batch size",
        "noise by samples, the linear speed-up and its end; the noise scale from what ranks hold anyway",
    ),
    Chapter(
        "asynchrony", "asynchrony",
        "stragglers, stale gradients and the rate they allow; local steps, outer optimizers, gossip",
    ),
    Chapter(
        "compression", "compression",
        "fewer bytes for a gradient a little off: what rides on an all-reduce, what feedback repairs, when it pays",
    ),
    Chapter(
        "zero", "ZeRO",
        "stages 1 to 3 to the byte, at rest, at the peak and on the wire; hybrid shards, int8 gathers",
        part="ZeRO",
    ),
    Chapter("activations", "activations", "what a layer keeps, tensor by tensor; recomputing it, and what that costs"),
    Chapter(
        "tp", "tensor parallelism",
        "columns, then rows; a loss whose logits nobody holds; up to how many ranks it pays",
        part="Tensor parallelism",
    ),
    Chapter(
        "sp", "sequence parallelism",
        "tokens split between the matrices: the same bytes, a fraction of the memory",
    ),
    Chapter(
        "cp", "context parallelism",
        "attention whose tokens lie on many ranks, and from how many tokens on it is free",
    ),
    Chapter(
        "pp", "pipeline parallelism",
        "schedules as data: what they idle, hold and send, and one executor for all of them",
        part="Pipeline parallelism",
    ),
    Chapter(
        "threed", "three dimensions",
        "all axes on one mesh: which gradient is summed where, bytes by axis, which axis on which link",
        part="Together",
    ),
    Chapter(
        "planner", "the planner",
        "which degrees, how fast, and why not otherwise; held to runs that others published",
        rooms=("theory", "exercises"),
    ),
    Chapter(
        "ep", "expert parallelism",
        "tokens routed to experts on other ranks: copies sent, the busiest rank, a balance without a loss term",
    ),
    Chapter(
        "mtp", "multi-token prediction",
        "heads one after another hold one set of logits; a heavier last stage; a draft that is checked",
    ),
    Chapter(
        "reliability", "reliability",
        "failures by the hour, how often to save, restarts to the bit, the slow rank, a hang with a name",
    ),
    Chapter(
        "casebook", "casebook",
        "mistakes of well-known frameworks on real ranks: the number that gives each away, and the cheapest check",
        rooms=("exercises",), is_lesson=False,
    ),
)  # fmt: skip
TO_COME = ()  # fmt: skip
"""The stems of the chapters that are planned."""


def stems(room: str | None = None) -> tuple[str, ...]:
    """The stems of all chapters, or of those that have a certain room, in the order of the book.

    Raises ``ValueError`` for a room that no chapter has.
    """
    if room not in (None, *ROOMS):
        raise ValueError(f"room must be one of {', '.join(ROOMS)}, not {room!r}")
    return tuple(each.stem for each in CHAPTERS if room is None or room in each.rooms)


def title(stem: str) -> str:
    """The subject of a chapter in words. An unknown stem raises ``ValueError``."""
    for each in CHAPTERS:
        if each.stem == stem:
            return each.title
    raise ValueError(f"stem must be one of {', '.join(stems())}, not {stem!r}")
