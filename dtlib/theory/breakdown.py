"""Sums that show their parts: the base of every record of bytes, parameters or operations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

from dtlib.theory.valid import amount

Self = TypeVar("Self", bound="Breakdown")


@dataclass(frozen=True)
class Part:
    """One line of a table: what it is called, how much it is, and its share of the total (0 to 1)."""

    name: str
    value: float
    share: float


@dataclass(frozen=True)
class Breakdown:
    """A frozen record whose fields are the named parts of one total.

    A subclass adds numeric fields, all in one unit, which its docstring names. Parts that are whole numbers stay
    whole numbers, so a total of counts is exact. ``ValueError`` for a part that is negative or not a finite number.
    """

    def __post_init__(self) -> None:
        for name, value in self.parts.items():
            amount(name, value)

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in their order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())

    def table(self, *, zeros: bool = False) -> list[Part]:
        """One row a part, in their order, names with spaces; parts that are 0 only with `zeros`."""
        total = self.total
        rows = ((name.replace("_", " "), value) for name, value in self.parts.items() if zeros or value)
        return [Part(name, value, value / total if total else 0.0) for name, value in rows]

    def scaled(self: Self, factor: float) -> Self:
        """Every part `factor` times, for example the states of Ψ parameters from the bytes of one."""
        factor = amount("factor", factor)
        return type(self)(**{name: value * factor for name, value in self.parts.items()})

    def __add__(self: Self, other: Self) -> Self:
        """Both records, part by part; only records of the same class add up."""
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(**{name: value + other.parts[name] for name, value in self.parts.items()})


def over(value: float, ranks: int) -> float:
    """`value` split by `ranks`; a whole number stays one where it divides."""
    return value // ranks if isinstance(value, int) and value % ranks == 0 else value / ranks
