"""The backward: a walk down the tape, [Note: the tape] in engine/tape.py.

It is driven by three things that autograd does: a gradient reaches an output of a wrapped module, an operation asks
for a weight it saved, a leaf receives its gradient. Each says how far down the tape the backward is; the walk then
makes up for every event passed since, in order. Autograd runs nodes in the reverse order of their creation, so when
a gradient reaches an output made at some event, everything made after it is through.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerosharder.engine.bucket import UnitParam
from zerosharder.engine.state import GradState, Phase, Residency
from zerosharder.engine.tape import Call, Pass
from zerosharder.engine.unit import Unit
from zerosharder.errors import DesyncError

if TYPE_CHECKING:
    from zerosharder.engine.engine import Engine

# Reductions under way at the same time. Each holds the whole gradients of its unit until they are sent.
MAX_REDUCTIONS = 1
# Passes whose liveness ranks tell each other; older tapes are rare, and their further passes count as alive.
MAX_TOLD = 128


class BackwardWalk:
    """State of the backward under way; one for each engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active = False
        self._began = 0.0
        self._current: Pass | None = None
        self._cursor = 0  # every event at or above it is done
        self._finished: list[Pass] = []
        self._recomputed: set[Call] = set()  # calls in reentrant checkpoints whose recomputation has begun
        self._owed: dict[Unit, None] = {}  # to be reduced when an older pass or the backward is through
        self._reducing: dict[Unit, None] = {}  # messages under way, oldest first
        self._reduced: dict[
            Unit, None
        ] = {}  # means are there; published at the end, which on CUDA costs a sync

    # ---- what autograd tells

    def reached(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        self.begin()
        owner = call.owner
        if owner is not self._current:
            if owner in self._finished or (self._current is not None and owner.number > self._current.number):
                self._engine.gather_now(call.unit)  # an older pass came first; serve it on demand
                return
            self._go_to(owner)
        self._walk(call.end)

    def needs(self, unit: Unit, call: Call | None) -> None:
        """An operation of ``unit`` asks for a weight that it saved in ``call``."""
        if call is not None and call.end >= 0:
            self.reached(call)
        else:
            self.begin()
        self._engine.gather_now(unit)

    def got_grad(self, unit: Unit) -> None:
        """A leaf of ``unit`` received a gradient."""
        self.begin()
        unit.note_grad()

    def recomputes(self, unit: Unit) -> None:
        """``unit`` runs its forward again inside this backward (activation checkpointing).

        A reentrant checkpoint puts no hook on its outputs; that its last unit is recomputed says how far we are.
        """
        self.begin()
        if self._current is None:
            return
        is_last = True
        for position in range(self._cursor - 1, -1, -1):
            begins, call = self._current.events[position]
            if begins or not call.recomputed or call in self._recomputed:
                continue
            if call.unit is unit:
                self._recomputed.add(call)
                if is_last:
                    self._walk(position)
                return
            is_last = False  # another one's turn comes later in the same checkpoint

    # ---- the walk

    def begin(self) -> None:
        """Enters the backward and asks autograd to call ``_finish`` at its end."""
        if self._active:
            return
        self._active = True
        self._began = time.perf_counter()
        self._engine.phase = Phase.BACKWARD
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _go_to(self, owner: Pass) -> None:
        """Completes the pass under way and goes on with ``owner``, or with what other ranks go through before it."""
        tape = self._engine.tape
        if owner not in tape.passes:
            tape.add(owner)  # its graph was kept by retain_graph=True
        self._complete_current()
        for between in self._agreed(owner.number):
            self._enter(between)
            self._complete_current()
        self._enter(owner)

    def _enter(self, owner: Pass) -> None:
        self._current = owner
        self._cursor = len(owner.events)

    def _complete_current(self) -> None:
        if self._current is not None:
            self._walk(0)
            self._finished.append(self._current)
            self._current = None

    def _agreed(self, mine: int) -> Iterator[Pass]:
        """Passes that another rank's backward goes through before pass number ``mine`` (0: before it ends).

        With one pass on the tape there is nothing to agree on, and nothing is sent. The number of passes on the
        tape is the same everywhere, because it counts calls, not gradients.
        """
        tape = self._engine.tape
        while len(tape.passes) > 1:
            highest, alive = self._exchange(mine)
            by_number = {p.number: p for p in tape.passes}
            tape.keep([p for p, a in zip(tape.passes, alive, strict=True) if a or p in self._finished])
            if highest == mine:
                return
            yield by_number[highest]

    def prune(self) -> None:
        """Drops the passes whose graphs are gone on every rank. All ranks call it at the same length of the tape."""
        tape = self._engine.tape
        _, alive = self._exchange(0)
        tape.keep([p for p, a in zip(tape.passes, alive, strict=True) if a])

    def _exchange(self, mine: int) -> tuple[int, list[bool]]:
        """The highest pass number any rank goes to next, and which passes on the tape are alive on any rank.

        The message has a fixed length: gloo aborts the process when ranks send different ones.
        """
        runtime, passes = self._engine.runtime, self._engine.tape.passes
        alive = [p.is_alive for p in passes]
        if runtime.control_group is None:
            return mine, alive
        told = [int(a) for a in alive[:MAX_TOLD]]
        state = torch.tensor([mine, len(passes), -len(passes), *told, *[0] * (MAX_TOLD - len(told))])
        reduce = functools.partial(dist.all_reduce, state, op=dist.ReduceOp.MAX, group=runtime.control_group)
        runtime.guarded("agreement on the passes of a backward", "", reduce)
        highest, most, least, *somewhere = (int(value) for value in state.tolist())
        if most != -least:
            raise DesyncError(
                f"ranks ran between {-least} and {most} forwards with gradients since the last backward (this one "
                f"{len(passes)}): every rank must run the same number, or run the others under no_grad"
            )
        return highest, [bool(a) for a in somewhere[: len(passes)]] + [True] * (len(passes) - MAX_TOLD)

    def _walk(self, position: int) -> None:
        """Does every event from the cursor down to ``position``, which is included."""
        assert self._current is not None
        events = self._current.events
        while self._cursor > position:
            self._cursor -= 1
            begins, call = events[self._cursor]
            if begins:
                self._leave(call)
            elif call.differentiable:
                self._arrive(call)

    def _arrive(self, call: Call) -> None:
        """The backward of ``call`` begins."""
        unit = call.unit
        if unit.is_lookup_only and unit.residency is Residency.SHARDED:
            return  # its backward reads no weight; should it do so all the same, ``needs`` gathers
        self._engine.gather_now(unit)
        self._engine.gather_ahead(self._upcoming())

    def _upcoming(self) -> Iterator[Unit]:
        assert self._current is not None
        for position in range(self._cursor - 1, -1, -1):
            begins, call = self._current.events[position]
            if not begins and call.differentiable and not call.unit.is_lookup_only:
                yield call.unit

    def _leave(self, call: Call) -> None:
        """The backward of ``call`` is through."""
        assert self._current is not None
        unit, engine = call.unit, self._engine
        if self._current.first[unit] is not call:
            if engine.runtime.config.reshard != "never" and next(self._upcoming(), None) is not unit:
                engine.free(unit)
            return
        if unit in self._current.differentiable and unit.wants_grad and engine.sync:
            # A leaf that an older pass used too gets its gradient when that pass is through, from both at once.
            if any(unit in p.differentiable for p in engine.tape.passes if p.number < self._current.number):
                self._owed[unit] = None
            else:
                self._reduce(unit)
        if not engine.keeps_gathered:
            engine.free(unit)

    def _reduce(self, unit: Unit) -> None:
        self._owed.pop(unit, None)
        if unit.grad_state is GradState.REDUCING:  # recomputed by a second checkpoint of the same backward
            self._publish(unit)
        unit.start_reduce()
        self._reducing[unit] = None
        while len(self._reducing) > MAX_REDUCTIONS:
            oldest = next(iter(self._reducing))
            oldest.wait_reduce()
            if oldest.holds_staging:
                self._publish(oldest)
            else:
                self._reduced[oldest] = self._reducing.pop(oldest)

    def _publish(self, unit: Unit) -> None:
        self._reducing.pop(unit, None)
        self._reduced.pop(unit, None)
        for param in unit.finish_reduce():
            _run_user_hooks(param)

    def _finish(self) -> None:
        """Called by autograd when this backward is through: nothing may stay gathered or unreduced."""
        engine = self._engine
        self._complete_current()
        for missing in self._agreed(0):
            self._enter(missing)
            self._complete_current()
        for unit in engine.units:
            unit.forget_frozen()
            if engine.sync:
                # A gradient that came after its unit was left: a weight used outside of its unit's calls.
                if unit in self._owed or any(p.has_local_grad for p in unit.params):
                    self._reduce(unit)
            else:
                unit.keep_local()
        for unit in (*self._reduced, *self._reducing):
            self._publish(unit)
        for unit in engine.units:
            if not engine.keeps_gathered:
                engine.free(unit)
        engine.tape.keep([p for p in engine.tape.passes if p not in self._finished])
        engine.runtime.counters.backwards += 1
        engine.runtime.log.add("backward", "", self._began)
        self.reset()
        engine.phase = Phase.IDLE if not engine.is_in_pass else Phase.FORWARD

    def reset(self) -> None:
        """Forgets the backward under way."""
        self._active = False
        self._current = None
        self._cursor = 0
        self._finished = []
        self._recomputed = set()
        self._owed = {}
        self._reducing = {}
        self._reduced = {}


def _run_user_hooks(param: UnitParam) -> None:
    """Runs what ``register_post_accumulate_grad_hook`` put on the sharded parameter: its gradient is complete now."""
    hooks = getattr(param.sharded, "_post_accumulate_grad_hooks", None)
    for hook in list(hooks.values()) if hooks else ():
        hook(param.sharded)
