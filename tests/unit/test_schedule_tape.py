"""Recorded orders and the tape, with names in place of units."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest

from zerosharder.engine.schedule import Schedule
from zerosharder.engine.tape import Alive, Pass, Tape


@dataclass(eq=False)
class _Unit:
    name: str


A, B, C, ROOT = _Unit("a"), _Unit("b"), _Unit("c"), _Unit("")


def _run(schedule: Schedule, units: list[_Unit], kind: object = "train") -> tuple[list[bool], bool]:
    schedule.start(kind)
    noted = [schedule.note(unit) for unit in units]
    return noted, schedule.finish()


# -- schedule


def test_a_first_pass_follows_nothing_and_knows_nothing_ahead():
    schedule = Schedule()
    schedule.start("train")
    assert not schedule.follows and list(schedule.upcoming()) == []
    assert schedule.note(A) and not schedule.follows
    assert schedule.finish()


def test_the_second_pass_knows_what_comes():
    schedule = Schedule()
    _run(schedule, [A, B, A, C])
    schedule.start("train")
    assert schedule.follows and list(schedule.upcoming()) == [A, B, A, C]
    for unit, ahead in ((A, [B, A, C]), (B, [A, C]), (A, [C]), (C, [])):
        assert schedule.note(unit)
        assert list(schedule.upcoming()) == ahead
    assert schedule.finish()


@pytest.mark.parametrize(
    "order, at", [([A, C], 1), ([B], 0), ([A, B, C, A], 3)], ids=["other", "first", "longer"]
)
def test_a_deviation_is_noticed_where_it_is_and_the_new_order_recorded(order, at):
    schedule = Schedule()
    _run(schedule, [A, B, C])
    noted, _ = _run(schedule, order)
    assert noted == [position != at for position in range(len(order))], "told once, where it leaves"
    schedule.start("train")
    assert list(schedule.upcoming()) == order


def test_nothing_is_ahead_after_a_deviation():
    schedule = Schedule()
    _run(schedule, [A, B, C])
    schedule.start("train")
    schedule.note(B)
    assert list(schedule.upcoming()) == []
    assert schedule.note(C), "the deviation is told once"


def test_a_pass_that_stops_short_says_so_and_is_recorded():
    schedule = Schedule()
    _run(schedule, [A, B, C])
    assert _run(schedule, [A]) == ([True], False)
    assert _run(schedule, [A]) == ([True], True)


def test_kinds_of_passes_do_not_disturb_each_other():
    schedule = Schedule()
    _run(schedule, [A, B, C], "train")
    _run(schedule, [C, B], "eval")
    assert _run(schedule, [A, B, C], "train") == ([True] * 3, True)
    assert _run(schedule, [C, B], "eval") == ([True] * 2, True)


def test_an_empty_pass():
    schedule = Schedule()
    assert _run(schedule, []) == ([], True)
    assert _run(schedule, []) == ([], True)
    assert _run(schedule, [A])[0] == [False]


def test_a_pass_that_never_finished_leaves_the_recorded_order():
    schedule = Schedule()
    _run(schedule, [A, B])
    schedule.start("train")
    schedule.note(A)  # an exception: no finish
    assert _run(schedule, [A, B]) == ([True, True], True)


def test_schedule_describes_its_last_units():
    schedule = Schedule()
    schedule.start("train")
    assert schedule.describe() == ""
    for unit in [ROOT, A, B, C]:
        schedule.note(unit)
    assert schedule.describe() == "(root) > a > b > c"
    assert schedule.describe(last=2) == "... > b > c"


# -- tape


def test_a_call_leaves_two_events_that_nest():
    tape = Pass(1)
    outer = tape.begin(A)
    inner = tape.begin(B)
    tape.end(inner, True)
    tape.end(outer, True)
    assert [(begins, call.unit.name) for begins, call in tape.events] == [
        (True, "a"),
        (True, "b"),
        (False, "b"),
        (False, "a"),
    ]
    assert (outer.begin, outer.end, inner.begin, inner.end) == (0, 3, 1, 2)
    assert inner.owner is tape and inner.end > inner.begin


def test_a_running_call_has_no_end():
    assert Pass(1).begin(A).end == -1


def test_the_first_call_of_each_unit_is_known():
    tape = Pass(1)
    calls = [tape.begin(unit) for unit in (A, B, A)]
    for call in calls:
        tape.end(call, False)
    assert tape.first == {A: calls[0], B: calls[1]}


def test_a_unit_is_differentiable_if_one_of_its_calls_is():
    tape = Pass(1)
    for unit, differentiable in ((A, False), (B, False), (A, True), (A, False)):
        tape.end(tape.begin(unit), differentiable)
    assert tape.differentiable == {A}


def test_a_pass_lives_as_long_as_a_graph_holds_it():
    tape = Pass(1)
    assert not tape.is_alive
    alive = Alive()
    tape.alive = weakref.ref(alive)
    assert tape.is_alive
    del alive
    gc.collect()
    assert not tape.is_alive


def test_passes_are_kept_in_order_and_compared_by_identity():
    tape = Tape()
    one, two, three = Pass(1), Pass(2), Pass(3)
    for each in (one, three, two):  # two comes back: its graph was retained
        tape.add(each)
    assert tape.passes == [one, two, three]
    tape.keep([three, one, Pass(2)])
    assert tape.passes == [one, three]
    tape.keep([])
    assert tape.passes == []


def test_tape_describes_its_last_calls():
    tape = Pass(1)
    for unit in (ROOT, A, B):
        tape.end(tape.begin(unit), True)
    assert tape.describe() == "(root) > a > b"
    assert tape.describe(last=1) == "... > b"
