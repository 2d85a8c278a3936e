"""`zerosharder._C.EventRing`, and the log that drains it."""

from __future__ import annotations

import threading
import time

import pytest

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.observe.events import EventLog  # noqa: E402


def test_events_come_out_as_they_went_in():
    ring = _C.EventRing(4)
    begin = time.perf_counter_ns()
    assert ring.push("read", 5, 100, begin, begin + 7)
    assert ring.push("step", -1, 2**40, begin + 7, begin + 9)
    me = threading.get_native_id()
    assert ring.drain() == [
        ("read", 5, 100, begin, begin + 7, me),
        ("step", -1, 2**40, begin + 7, begin + 9, me),
    ]
    assert ring.drain() == [] and ring.dropped == 0
    with pytest.raises(ValueError, match="no such kind of event: nonsense"):
        ring.push("nonsense", 0, 0, 0, 0)


@pytest.mark.parametrize("asked, capacity", [(1, 2), (2, 2), (3, 4), (1000, 1024)])
def test_capacity(asked, capacity):
    assert _C.EventRing(asked).capacity == capacity


@pytest.mark.parametrize("asked", [0, 2**24 + 1])
def test_capacities_that_are_none(asked):
    with pytest.raises(ValueError, match="capacity"):
        _C.EventRing(asked)


def test_a_full_ring_counts_what_it_loses():
    """The old events stay, nobody waits, and there is room again after draining."""
    ring = _C.EventRing(4)
    assert [ring.push("read", i, 0, 0, 0) for i in range(6)] == [True] * 4 + [False] * 2
    assert ring.dropped == 2
    assert [event[1] for event in ring.drain()] == [0, 1, 2, 3]
    assert ring.push("read", 9, 0, 0, 0) and [event[1] for event in ring.drain()] == [9]


def test_the_log_takes_them_over():
    """With names for the units, and times of the log's own clock."""
    ring, log = _C.EventRing(4), EventLog()
    begin = time.perf_counter()
    ring.push("write", 3, 50, int(begin * 1e9), int(begin * 1e9) + 1000)
    ring.push("read", 4, 60, int(begin * 1e9), int(begin * 1e9) + 1000)
    log.add("gather", "layers.3", begin)
    assert log.drain(ring, {3: "layers.3"}) == 0
    write, read = log.tail(2)
    assert (write.kind, write.unit, write.nbytes) == ("write", "layers.3", 50)
    assert (read.kind, read.unit) == ("read", "4")
    assert abs(write.begin - begin) < 1e-6 and write.end == pytest.approx(begin + 1e-6, abs=1e-7)
    for i in range(9):
        ring.push("read", i, 0, 0, 0)
    assert log.drain(ring, {}) == 5 and len(log) == 3 + 4
