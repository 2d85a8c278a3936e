"""The states of a unit and of the engine, and which changes between them are legal."""

from __future__ import annotations

import enum

from zerosharder.errors import StateError


class Residency(enum.Enum):
    """What a unit's memory holds besides its flat shards."""

    SHARDED = "sharded"
    """Nothing. The leaves that autograd knows read NaN, no slot is held."""
    GATHERING = "gathering"
    """A slot is held and its rows are on their way; nobody may read it yet. ``pending`` is the gather."""
    GATHERED = "gathered"
    """The slot holds every row; the leaves that autograd knows are views of it."""


class GradState(enum.Enum):
    """Where the gradient of a unit is on its way from autograd to ``param.grad``."""

    EMPTY = "empty"
    """Nothing unreduced. ``param.grad`` may hold what earlier backwards left."""
    LOCAL = "local"
    """At least one leaf holds a whole, unreduced gradient of this rank."""
    REDUCING = "reducing"
    """The reduction is issued; the leaves hold nothing, its pending field owns the gradients until sent."""


RESIDENCY_TRANSITIONS: frozenset[tuple[Residency, Residency]] = frozenset(
    {
        (Residency.SHARDED, Residency.GATHERING),
        (Residency.GATHERING, Residency.GATHERED),
        (Residency.GATHERED, Residency.SHARDED),
    }
)

GRAD_TRANSITIONS: frozenset[tuple[GradState, GradState]] = frozenset(
    {
        (GradState.EMPTY, GradState.LOCAL),
        (GradState.LOCAL, GradState.LOCAL),
        (GradState.EMPTY, GradState.REDUCING),  # a unit whose parameters got no gradient reduces zeros
        (GradState.LOCAL, GradState.REDUCING),
        (GradState.REDUCING, GradState.EMPTY),
    }
)


class Phase(enum.Enum):
    """What the engine is doing."""

    IDLE = "idle"
    """Between passes: the user's script, the optimizer."""
    FORWARD = "forward"
    """From the outermost wrapped call to its return."""
    BACKWARD = "backward"
    """From the first gradient that reaches a unit to the end of that autograd call."""


def check_residency(unit: str, now: Residency, then: Residency) -> Residency:
    """Returns ``then`` if the change is legal, else raises StateError naming unit and states."""
    if (now, then) not in RESIDENCY_TRANSITIONS:
        raise StateError(f"unit {unit!r} cannot go from {now.value} to {then.value}")
    return then


def check_grad(unit: str, now: GradState, then: GradState) -> GradState:
    """Returns ``then`` if the change is legal, else raises StateError naming unit and states."""
    if (now, then) not in GRAD_TRANSITIONS:
        raise StateError(f"unit {unit!r}: its gradient cannot go from {now.value} to {then.value}")
    return then
