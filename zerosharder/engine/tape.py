"""What a forward did, so that the backward can do it in reverse.

[Note: the tape]
A *pass* is one outermost call into the model (or into one of its units). Every use of a unit in it is a *call*,
and leaves two events: where it began and where it ended. The backward walks a pass from its last event to its
first: passing the end of a call gathers its unit, passing the beginning of the unit's first call reduces and frees
it. So the order of collectives is a function of module execution alone. Which parameters received gradients, and
which outputs went into the loss, does not change it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerosharder.engine.unit import Unit


class Call:
    """One use of one unit in a pass."""

    __slots__ = ("begin", "differentiable", "end", "owner", "recomputed", "unit")

    def __init__(self, unit: Unit, owner: Pass) -> None:
        self.unit = unit
        self.owner = owner
        self.begin = -1  # position of its two events in owner.events
        self.end = -1
        self.differentiable = False  # some output requires a gradient, or will when it is recomputed
        self.recomputed = False  # ran without gradients on inputs that require one: a reentrant checkpoint


class Alive:
    """Held by the hooks on a pass's outputs, so that it dies with the last graph that contains them."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class Pass:
    """The events of one outermost call with gradients enabled."""

    number: int  # counts up, the same on every rank
    events: list[tuple[bool, Call]] = field(default_factory=list)  # (is it the beginning, call)
    first: dict[Unit, Call] = field(default_factory=dict)  # the first call of each unit
    differentiable: set[Unit] = field(default_factory=set)  # units with at least one differentiable call
    alive: weakref.ref[Alive] | None = None

    def begin(self, unit: Unit) -> Call:
        """Records that ``unit`` is used from here on."""
        call = Call(unit, self)
        call.begin = len(self.events)
        self.events.append((True, call))
        self.first.setdefault(unit, call)
        return call

    def end(self, call: Call, differentiable: bool, recomputed: bool = False) -> None:
        """Records that ``call`` is over."""
        call.end = len(self.events)
        call.differentiable = differentiable or recomputed
        call.recomputed = recomputed
        if call.differentiable:
            self.differentiable.add(call.unit)
        self.events.append((False, call))

    @property
    def is_alive(self) -> bool:
        """Whether a backward may still come."""
        return self.alive is not None and self.alive() is not None

    def describe(self, last: int = 8) -> str:
        """The last calls, for error messages."""
        names = [call.unit.name or "(root)" for begins, call in self.events if begins]
        return " > ".join((["..."] if len(names) > last else []) + names[-last:])


class Tape:
    """The passes a backward may still go through, oldest first. Their number is the same on every rank."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def add(self, new: Pass) -> None:
        """Appends a pass, or puts one back that an earlier backward finished (retain_graph=True)."""
        self.passes.append(new)
        self.passes.sort(key=lambda p: p.number)

    def keep(self, kept: list[Pass]) -> None:
        """Drops every pass that is not in ``kept``."""
        self.passes = [p for p in self.passes if p in kept]
