"""The event log: every gather, wait, reduction and free with begin, end and bytes.

Tests assert on this log instead of on wall clock; ``zs.trace`` writes it for chrome://tracing and Perfetto.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Old events fall out: a log must not be what a long run dies of (about 100 bytes an event).
CAPACITY = 100_000


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Times are seconds of ``time.perf_counter``."""

    kind: str  # gather, wait, free, reduce, reduce_wait, pass, backward
    unit: str
    begin: float
    end: float
    nbytes: int


class EventLog:
    """A bounded list of events of one engine on this rank, in order of their ends."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, kind: str, unit: str, begin: float, nbytes: int = 0) -> float:
        """Appends an event that ends now; returns its duration in seconds."""
        end = time.perf_counter()
        self._events.append(Event(kind, unit, begin, end, nbytes))
        return end - begin

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

    def write(self, path: str | Path, rank: int) -> None:
        """Writes the log in the Trace Event Format (JSON), one row for each kind of event."""
        rows = {kind: row for row, kind in enumerate(dict.fromkeys(e.kind for e in self._events))}
        events = [
            {
                "name": f"{e.kind} {e.unit or '(root)'}",
                "cat": e.kind,
                "ph": "X",
                "ts": e.begin * 1e6,
                "dur": (e.end - e.begin) * 1e6,
                "pid": rank,
                "tid": rows[e.kind],
                "args": {"bytes": e.nbytes},
            }
            for e in self._events
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": kind}}
            for kind, row in rows.items()
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + events}))
