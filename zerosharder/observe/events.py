"""The event log: every gather, wait, reduction and free with begin, end and bytes.

Tests assert on this log instead of on wall clock; ``zs.trace`` writes it for chrome://tracing and Perfetto.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerosharder import _C

# Old events fall out: a log must not be what a long run dies of (about 100 bytes an event).
CAPACITY = 100_000


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Times are seconds of ``time.perf_counter``."""

    kind: (
        str  # gather, wait, free, reduce, reduce_wait, pass, backward; read, write, step from native threads
    )
    unit: str
    begin: float
    end: float
    nbytes: int


class EventLog:
    """A bounded list of events of one engine on this rank, in order of their ends (drained ones: when drained)."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, kind: str, unit: str, begin: float, nbytes: int = 0) -> float:
        """Appends an event that ends now; returns its duration in seconds."""
        end = time.perf_counter()
        self._events.append(Event(kind, unit, begin, end, nbytes))
        return end - begin

    def drain(self, ring: _C.EventRing, units: Mapping[int, str]) -> int:
        """Takes over what native threads recorded; returns how many events the ring has lost so far.

        Args:
            ring: its times are of the same clock. Call often enough that it does not overflow.
            units: names of the ring's unit numbers; a number without a name becomes text.
        """
        for kind, unit, nbytes, begin, end, _ in ring.drain():
            self._events.append(Event(kind, units.get(unit, str(unit)), begin / 1e9, end / 1e9, nbytes))
        return ring.dropped

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def tail(self, count: int) -> list[Event]:
        """The last ``count`` events, oldest first."""
        return list(self._events)[-count:]

    def clear(self) -> None:
        """Forgets everything."""
        self._events.clear()


def write_trace(path: str | Path, rank: int, logs: Mapping[str, EventLog]) -> None:
    """Writes logs (by model name) in the Trace Event Format (JSON): one row for each model and kind of event."""
    rows: dict[str, int] = {}
    events = []
    for model, log in logs.items():
        for event in log:
            row = rows.setdefault(f"{model} {event.kind}", len(rows))
            events.append(
                {
                    "name": f"{event.kind} {event.unit or '(root)'}",
                    "cat": event.kind,
                    "ph": "X",
                    "ts": event.begin * 1e6,
                    "dur": (event.end - event.begin) * 1e6,
                    "pid": rank,
                    "tid": row,
                    "args": {"bytes": event.nbytes},
                }
            )
    names = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    Path(path).write_text(json.dumps({"traceEvents": names + events}))
