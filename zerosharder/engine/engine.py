"""The engine of one sharded model: the forward side of a pass, and what both directions share."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zerosharder.engine.backward import BackwardWalk
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.saved import SavedWeights
from zerosharder.engine.schedule import Schedule
from zerosharder.engine.state import Phase, Residency
from zerosharder.engine.tape import Alive, Call, Pass, Tape
from zerosharder.engine.tensors import cast_floats, find_tensors
from zerosharder.engine.unit import Unit
from zerosharder.errors import StateError

# Forwards with gradients whose backward never came (an evaluation without no_grad) are dropped at this many.
MAX_PASSES = 64


@dataclass
class Frame:
    """One wrapped forward that is running: the units it uses, those it turned out to need on the way included."""

    units: list[Unit]
    calls: list[Call | None] = field(default_factory=list)  # one for each unit; None: nothing is recorded
    is_recomputed: bool = False  # in a reentrant checkpoint: without gradients, inside a pass with gradients


class Engine:
    """Gathers, prefetches and frees units around the forwards of one model, and drives their backward."""

    def __init__(self, model: nn.Module, units: list[Unit], runtime: Runtime) -> None:
        self.units = units
        self.runtime = runtime
        self.model_name = type(model).__name__
        self.phase = Phase.IDLE
        self.sync = True  # False inside no_sync: gradients stay local
        self.tape = Tape()
        self.schedule = Schedule()
        self.saved = SavedWeights(self)
        self.backward = BackwardWalk(self)
        self._frames: list[Frame] = []
        self._pass: Pass | None = None
        self._alive: Alive | None = None
        self._numbers = itertools.count(1)
        self._ahead: dict[Unit, int] = {}  # gathered or on its way before its turn, with its bytes
        self._calls: dict[Unit, Call | None] = {}  # the innermost running call of each active unit
        self._in_checkpoint = False  # the last call ran in a reentrant checkpoint, and no other kind since
        self._began = 0.0
        wanted = runtime.config.prefetch
        typical = sorted(unit.nbytes for unit in units if unit.nbytes)
        self.prefetch_limit = wanted if wanted is not None else typical[len(typical) // 2] if typical else 0
        self._by_param = {id(p.sharded): unit for unit in units for p in unit.params}
        self._leaves = {id(p.leaf) for unit in units for p in unit.params}

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        raise StateError(
            f"deepcopy of a sharded {self.model_name} would share its flat shards; copy the model before shard(), "
            "or build a second one and load the state dict"
        )

    @property
    def is_in_pass(self) -> bool:
        """Whether a wrapped forward is running."""
        return bool(self._frames)

    @property
    def keeps_gathered(self) -> bool:
        """Whether units stay gathered from one micro batch to the next."""
        return self.runtime.config.reshard == "never" and not self.sync

    def call_of(self, unit: Unit) -> Call | None:
        """The recorded call in which ``unit`` is computing now, if any."""
        return self._calls.get(unit)

    # ---- a wrapped forward

    def enter(self, units: list[Unit], args: Any, kwargs: Any) -> tuple[Frame, Any, Any]:
        """Before the forward of an entry of ``units``: gathers them, gathers ahead, casts floating inputs."""
        frame = Frame([])
        if not self._frames:
            self._begin_pass(units)
        self._frames.append(frame)
        try:
            for unit in units:
                self._begin_call(frame, unit)
        except BaseException:
            self.abandon(frame)
            raise
        if self._pass is not None and not torch.is_grad_enabled():
            # Behind the first unit of a checkpoint no input requires a gradient any more.
            inside = self._in_checkpoint or any(t.requires_grad for t in find_tensors((args, kwargs)))
            frame.is_recomputed = self._in_checkpoint = inside
        else:
            self._in_checkpoint = False
        dtype = next((d for d in map(_cast_to, units) if d is not None), None)
        if dtype is not None:
            args, kwargs = cast_floats((args, kwargs), dtype)
        return frame, args, kwargs

    def leave(self, frame: Frame, output: Any) -> Any:
        """After the forward: hooks its outputs, frees what is not needed until the backward; returns the output."""
        found = list(find_tensors(output))
        if any(isinstance(t, nn.Parameter) for t in found):
            output = self._without_leaves(output)
            found = list(find_tensors(output))
        tensors = [t for t in found if t.requires_grad] if torch.is_grad_enabled() else []
        last = self._end_calls(frame, bool(tensors))
        if last is not None:
            alive = self._alive

            def on_grad(_: torch.Tensor, call: Call = last, alive: Alive | None = alive) -> None:
                self.backward.reached(call)

            for tensor in tensors:
                tensor.register_hook(on_grad)
        self._frames.pop()
        if not self._frames:
            self._end_pass()
        return output

    def _without_leaves(self, output: Any) -> Any:
        """A returned weight would read NaN once its unit is freed: a view in its place keeps the slot as it is."""
        return tree_map_only(nn.Parameter, lambda p: p.view_as(p) if id(p) in self._leaves else p, output)

    def abandon(self, frame: Frame) -> None:
        """An exception leaves the forward: no collective is issued or waited for, it must come out at once."""
        while self._frames and self._frames[-1] is not frame:
            self._exit_units(self._frames.pop())
        self._exit_units(frame)
        if self._frames:
            self._frames.pop()
        if not self._frames:
            self.saved.pop()
            self._pass = None
            if not self._in_backward():
                self.phase = Phase.IDLE

    def demand(self, param: nn.Parameter) -> nn.Parameter | None:
        """A module reads the sharded ``param`` outside of its unit's forward: gathers it until the frame ends."""
        unit = self._by_param.get(id(param))
        if unit is None or unit.active:
            return None
        if self._frames:
            self._begin_call(self._frames[-1], unit)
        elif self._in_backward():
            # A recomputation that did not come through a wrapped forward: transformers checkpoints the class's own.
            self.backward.recomputes(unit)
            self.gather_now(unit)
        else:
            return None
        return next(p.leaf for p in unit.params if p.sharded is param)

    def _begin_pass(self, units: list[Unit]) -> None:
        if self._in_backward():
            self.saved.push()  # a checkpoint recomputes; nothing is recorded
            return
        if self.phase is Phase.BACKWARD:
            raise StateError(
                f"the last backward through {self.model_name} did not finish (an exception left it); "
                "call zerosharder.reset(model) before the next forward"
            )
        self.runtime.shards_changed()
        self._free_leftovers()
        if len(self.tape.passes) >= MAX_PASSES:
            self.backward.prune()
        self._began = time.perf_counter()
        self.phase = Phase.FORWARD
        if self.runtime.watchdog is not None:
            self.runtime.watchdog.describe = self.describe
        self.schedule.start((torch.is_grad_enabled(), units[0].index))
        self._pass = None
        if torch.is_grad_enabled():
            self._alive = Alive()
            self._pass = Pass(next(self._numbers))
            self.saved.push()

    def _end_pass(self) -> None:
        self.saved.pop()
        if self._in_backward():
            return
        self.schedule.finish()
        for unit in list(self._ahead):
            self.free(unit)  # issued ahead for a pass that stopped short
        if self._pass is not None:
            assert self._alive is not None
            self._pass.alive = weakref.ref(self._alive)
            if self._pass.differentiable:
                self.tape.add(self._pass)
        self._alive = None
        self._pass = None
        self.phase = Phase.IDLE
        self.runtime.counters.passes += 1
        self.runtime.log.add("pass", "", self._began)

    def _begin_call(self, frame: Frame, unit: Unit) -> None:
        recording = not self._in_backward()
        if recording and not self.schedule.note(unit):
            self.runtime.counters.deviations += 1
        elif not recording:
            self.backward.recomputes(unit)
        call = self._pass.begin(unit) if recording and self._pass is not None else None
        frame.units.append(unit)
        frame.calls.append(call)
        self.gather_now(unit)
        if recording:
            self.gather_ahead(self.schedule.upcoming())
        self._calls[unit] = call
        unit.enter()

    def _end_calls(self, frame: Frame, differentiable: bool) -> Call | None:
        """Ends every call of ``frame``; returns the one whose end comes last in the backward."""
        first: Call | None = None
        for unit, call in zip(reversed(frame.units), reversed(frame.calls), strict=True):
            unit.exit()
            if not unit.active:
                self._calls.pop(unit, None)
            if call is not None:
                call.owner.end(call, differentiable, frame.is_recomputed)
                first = first or call
            if not self._in_backward() and not self._stays_gathered(unit, call):
                self.free(unit)
        return first

    def _exit_units(self, frame: Frame) -> None:
        for unit in frame.units:
            unit.exit()
            if not unit.active:
                self._calls.pop(unit, None)

    def _stays_gathered(self, unit: Unit, call: Call | None) -> bool:
        """Whether ``unit`` is kept after a forward, because the backward or the next call needs it soon."""
        if unit.active:
            return True
        following = next(self.schedule.upcoming(), None)
        if following is unit:
            return True
        if call is None or not call.differentiable:
            return False
        policy = self.runtime.config.reshard
        # auto: what the backward starts with stays (the root, the last unit of the recorded order), the rest is freed.
        starts_backward = len(self._frames) == 1 or (following is None and self.schedule.follows)
        return policy == "never" or (policy == "auto" and starts_backward)

    # ---- gathering, shared by both directions

    def gather_now(self, unit: Unit) -> None:
        """Makes ``unit`` gathered and up to date."""
        with _normal_tensors():
            self._gather_now(unit)

    def _gather_now(self, unit: Unit) -> None:
        if unit.residency is Residency.GATHERED:
            if unit.pinned or unit.active or not unit.is_stale:
                self._ahead.pop(unit, None)
                return
            self.free(unit)
        if unit.residency is Residency.SHARDED:
            unit.issue_gather()
        self._ahead.pop(unit, None)
        unit.wait_gather()
        self.saved.gathered(unit)

    def gather_ahead(self, upcoming: Iterable[Unit]) -> None:
        """Issues the gathers of the next units, as many bytes ahead as the setting allows."""
        with _normal_tensors():
            self._gather_ahead(upcoming)

    def _gather_ahead(self, upcoming: Iterable[Unit]) -> None:
        ahead = sum(self._ahead.values())
        for unit in upcoming:
            if unit.residency is not Residency.SHARDED or not unit.nbytes:
                continue
            too_much = ahead + unit.nbytes > self.prefetch_limit
            if too_much and (ahead or self.runtime.config.prefetch is not None):
                return  # by default one unit is always gathered ahead, however large it is
            unit.issue_gather()
            ahead += unit.nbytes
            self._ahead[unit] = unit.nbytes
            self.runtime.counters.prefetched += 1

    def free(self, unit: Unit) -> None:
        """Gives a unit's slot back, if it holds one and nothing computes with it."""
        if unit.residency is Residency.SHARDED or unit.active or unit.pinned:
            return
        self._ahead.pop(unit, None)
        if unit.residency is Residency.GATHERED:
            self.saved.freed(unit)
        unit.free()

    def _free_leftovers(self) -> None:
        """Completes and frees what a pass left behind that an exception ended."""
        for unit in list(self._ahead):
            self.free(unit)
        if not self.tape.passes:
            for unit in self.units:
                if self.runtime.config.reshard != "never" or unit.is_stale:
                    self.free(unit)

    # ---- the user's commands

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave gradients local; the first one outside reduces their sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def full_params(self, write: bool) -> Iterator[None]:
        """Every unit gathered and visible; forwards inside need no collective."""
        if self.phase is not Phase.IDLE or self.is_in_pass:
            raise StateError(f"full_params() inside a {self.phase.value} pass; call it between passes")
        self.runtime.shards_changed()
        for unit in self.units:
            self.gather_now(unit)
            unit.pinned = True
            unit.enter()
        try:
            yield
            if write:
                for unit in self.units:
                    unit.write_back()
        finally:
            for unit in self.units:
                unit.exit()
                unit.pinned = False
                self.free(unit)
            self.runtime.pool.trim()

    def reset(self) -> None:
        """Back to the state between two steps: nothing gathered, no gradient, no pass to go back through."""
        while self._frames:
            self._exit_units(self._frames.pop())
        self.saved.pop()
        self._pass = self._alive = None
        self._calls.clear()
        for unit in self.units:
            unit.drop_grads()
            self.free(unit)
        self._ahead.clear()
        self.tape.keep([])
        self.backward.reset()
        self.sync = True
        self.phase = Phase.IDLE

    def describe(self) -> dict[str, str]:
        """Where this rank is, for the watchdog."""
        last = [f"{event.kind} {event.unit or '(root)'}" for event in self.runtime.log.tail(4)]
        return {
            "waiting": self.runtime.waiting,
            "phase": f"{self.model_name}: {self.phase.value}, pass {self.runtime.counters.passes}",
            "order": self.schedule.describe(),
            "last": ", ".join(last) or "nothing",
        }

    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1


def _normal_tensors() -> contextlib.AbstractContextManager[None]:
    """Slots and their views outlive an inference_mode block, so they must not be made as inference tensors."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _cast_to(unit: Unit) -> torch.dtype | None:
    """The dtype a unit's floating inputs are cast to: its compute dtype, if it differs from its parameters'."""
    for bucket in unit.buckets:
        if bucket.compute_dtype != bucket.layout.dtype:
            return bucket.compute_dtype
    return None
