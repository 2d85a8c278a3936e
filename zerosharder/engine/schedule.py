"""The order in which a pass uses its units: recorded in one pass, used to gather ahead in the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerosharder.engine.unit import Unit


class Schedule:
    """One order for each kind of pass (where it entered, with or without gradients).

    A pass that leaves the recorded order gathers on demand from there on, and its own order is recorded in place
    of the old one. All ranks see the same orders, so all decide alike.
    """

    def __init__(self) -> None:
        self._recorded: dict[object, list[Unit]] = {}
        self._kind: object = None
        self._now: list[Unit] = []
        self.follows = False  # the pass under way has kept to the recorded order so far

    def start(self, kind: object) -> None:
        """A pass of ``kind`` begins."""
        self._kind = kind
        self._now = []
        self.follows = kind in self._recorded

    def note(self, unit: Unit) -> bool:
        """``unit`` is used next; returns False if that is where the pass leaves the recorded order."""
        position = len(self._now)
        self._now.append(unit)
        if not self.follows:
            return True
        order = self._recorded[self._kind]
        self.follows = position < len(order) and order[position] is unit
        return self.follows

    def upcoming(self) -> Iterator[Unit]:
        """The units that come next, if the pass goes on as recorded."""
        if self.follows:
            yield from self._recorded[self._kind][len(self._now) :]

    def finish(self) -> bool:
        """The pass is over; returns False if it stopped short of the recorded order."""
        complete = not self.follows or len(self._now) == len(self._recorded[self._kind])
        self._recorded[self._kind] = self._now
        return complete

    def describe(self, last: int = 8) -> str:
        """The last units of the pass under way, for error messages."""
        names = [unit.name or "(root)" for unit in self._now]
        return " > ".join((["..."] if len(names) > last else []) + names[-last:])
