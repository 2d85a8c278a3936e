"""A unit: what is gathered, computed with, reduced and freed together. One state machine; it owns no schedule."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerosharder.engine.bucket import Bucket, Reduction, UnitParam
from zerosharder.engine.collectives import Pending
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.slots import Slot
from zerosharder.engine.state import GradState, Residency, check_grad, check_residency
from zerosharder.engine.streams import compute_waits, mark_compute

if TYPE_CHECKING:
    from zerosharder.engine.bucket import _SlotViews
    from zerosharder.engine.hooks import OnDemandParameters


class Unit:
    """Buckets of parameters and the modules whose forward needs them.

    The engine calls, always in the order of the recorded pass: ``issue_gather`` (early, if it prefetches),
    ``wait_gather``, ``enter``/``exit`` around each forward, ``free``; and in the backward ``start_reduce``,
    ``wait_reduce`` and ``finish_reduce``. Illegal orders raise StateError.
    """

    def __init__(
        self, index: int, name: str, entries: list[nn.Module], buckets: list[Bucket], runtime: Runtime
    ):
        self.index = index
        self.name = name
        self.entries = entries
        self.buckets = buckets
        self.runtime = runtime
        self.residency = Residency.SHARDED
        self.grad_state = GradState.EMPTY
        self.active = 0  # forwards that are computing with it right now
        self.tables: list[OnDemandParameters] = []  # of the modules that own its parameters
        self.pinned = False  # full_params holds it gathered
        self.version = -1  # of the flat shards when it was gathered
        self.nbytes = sum(bucket.gathered_nbytes for bucket in buckets)
        # The backward of an embedding never reads its weight, so a unit of embeddings need not be gathered for it.
        self.is_lookup_only = bool(entries) and all(
            type(m) is nn.Embedding and m.max_norm is None for m in entries
        )
        self._pending: Pending | None = None
        self._slot: Slot | None = None
        self._reductions: list[tuple[Bucket, Reduction, Pending]] = []
        self._unpublished: list[tuple[Bucket, Reduction]] = []

    @property
    def params(self) -> list[UnitParam]:
        """Every parameter, bucket after bucket."""
        return [p for bucket in self.buckets for p in bucket.params]

    @property
    def wants_grad(self) -> bool:
        """Whether any parameter is trained now."""
        return any(bucket.wants_grad for bucket in self.buckets)

    @property
    def is_stale(self) -> bool:
        """Whether the shards changed since they were gathered (an optimizer step, a load)."""
        return self.version != self._shard_version()

    # ---- gather

    def issue_gather(self) -> None:
        """Starts the gather: takes a slot, writes this rank's rows into it, and tells the transport."""
        begin = time.perf_counter()
        runtime = self.runtime
        self.residency = check_residency(self.name, self.residency, Residency.GATHERING)
        self._slot = runtime.pool.acquire(self.nbytes)
        self.version = self._shard_version()
        parts = []
        with runtime.gather_lane.run(self._slot.last_use, runtime.shards_ready):
            for bucket, views in zip(self.buckets, self._views(), strict=True):
                bucket.fill_own(views)
                parts.extend(views.parts)
            self._pending = runtime.guarded(
                "gather", self.name, lambda: runtime.collectives.gather(parts, runtime.tag(self.index))
            )
        runtime.counters.gathers += 1
        chunks = sum(bucket.layout.chunk_numel * bucket.compute_dtype.itemsize for bucket in self.buckets)
        runtime.counters.gather_bytes += chunks * (runtime.world - 1)
        runtime.log.add("gather", self.name, begin, self.nbytes)

    def wait_gather(self) -> None:
        """Completes the gather: afterwards the leaves hold every row."""
        begin = time.perf_counter()
        runtime = self.runtime
        self.residency = check_residency(self.name, self.residency, Residency.GATHERED)
        assert self._pending is not None
        with runtime.gather_lane.run():
            runtime.guarded("gather", self.name, self._pending.wait)
            for views in self._views():
                if views.packed:
                    torch._foreach_copy_(views.unpacked, views.packed)
            done = runtime.gather_lane.mark()
        compute_waits(done)
        for bucket, views in zip(self.buckets, self._views(), strict=True):
            for param, leaf in zip(bucket.params, views.leaves, strict=True):
                param.leaf.data = leaf
        runtime.counters.exposed_gather += runtime.log.add("wait", self.name, begin, self.nbytes)

    def free(self) -> None:
        """Gives the slot back. What autograd saved is rebuilt on the slot of the moment (engine/saved.py)."""
        begin = time.perf_counter()
        if self.residency is Residency.GATHERING:
            self.wait_gather()  # issued ahead and not needed after all: the peers' messages must still be taken
        self.residency = check_residency(self.name, self.residency, Residency.SHARDED)
        assert self._pending is not None and self._slot is not None
        self.runtime.guarded("gather", self.name, self._pending.release)
        for param in self.params:
            param.leaf.data = param.placeholder
        self._slot.last_use = mark_compute(self.runtime.device)
        self.runtime.pool.release(self._slot)
        self._pending = self._slot = None
        self.runtime.counters.frees += 1
        self.runtime.log.add("free", self.name, begin, self.nbytes)

    def rebuild(self, bucket: int, offset: int, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """The view that autograd saved, on the slot of the moment. ``offset``: elements into the bucket's buffer."""
        full = self._views()[bucket].full
        return full.as_strided(size, stride, full.storage_offset() + offset)

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(bucket, offset in elements) if ``tensor`` is a view of this unit's gathered buffers."""
        if self._slot is None:
            return None
        at = tensor.data_ptr() - self._slot.tensor.data_ptr()
        start = 0
        for index, bucket in enumerate(self.buckets):
            if start <= at < start + bucket.gathered_nbytes:
                if tensor.dtype != bucket.compute_dtype:
                    return None  # a reinterpreting view: keep it as it is, the slot rests meanwhile
                return index, (at - start) // bucket.compute_dtype.itemsize
            start += bucket.gathered_nbytes
        return None

    def storage_key(self) -> int:
        """Address of the gathered slot, for finding the unit a saved tensor belongs to."""
        assert self._slot is not None
        return self._slot.tensor.data_ptr()

    def write_back(self) -> None:
        """Takes this rank's rows from the gathered form into the flat shards."""
        with torch.no_grad():
            for bucket, views in zip(self.buckets, self._views(), strict=True):
                bucket.write_back(views)

    def _views(self) -> list[_SlotViews]:
        assert self._slot is not None
        return self._slot.views(self, self._make_views)

    def _make_views(self, raw: torch.Tensor) -> list[_SlotViews]:
        found, start = [], 0
        for bucket in self.buckets:
            found.append(bucket.make_views(raw[start : start + bucket.gathered_nbytes]))
            start += bucket.gathered_nbytes
        return found

    def _shard_version(self) -> int:
        # An in-place operation on a DTensor counts on the DTensor, one on the flat shard counts there.
        return sum(b.flat._version + sum(p.sharded._version for p in b.params) for b in self.buckets)

    # ---- forward

    def enter(self) -> None:
        """The modules read the leaves from here on."""
        self.active += 1
        if self.active == 1:
            for table in self.tables:
                table.inactive -= 1
            for param in self.params:
                if param.leaf.requires_grad != param.sharded.requires_grad:
                    param.leaf.requires_grad_(param.sharded.requires_grad)
                param.install(param.leaf)

    def exit(self) -> None:
        """The modules show the sharded parameters again once the last forward is through."""
        self.active -= 1
        if self.active == 0:
            for table in self.tables:
                table.inactive += 1
            for param in self.params:
                param.install(param.sharded)

    # ---- reduce

    def note_grad(self) -> None:
        """A leaf received a gradient."""
        if self.grad_state is not GradState.REDUCING:
            self.grad_state = check_grad(self.name, self.grad_state, GradState.LOCAL)

    def forget_frozen(self) -> None:
        """Drops gradients of parameters that were frozen after the forward: nothing will reduce them."""
        for bucket in self.buckets:
            for param in bucket.params if not bucket.wants_grad else ():
                param.leaf.grad = param.local_sum = None

    def keep_local(self) -> None:
        """Leaves this backward's gradients unreduced (no_sync)."""
        for bucket in self.buckets:
            bucket.keep_local()

    def start_reduce(self) -> None:
        """Issues the mean over ranks of every gradient of this unit; zeros stand for missing ones."""
        begin = time.perf_counter()
        runtime = self.runtime
        self.grad_state = check_grad(self.name, self.grad_state, GradState.REDUCING)
        nbytes = 0
        with runtime.reduce_lane.run(mark_compute(runtime.device)):
            for number, bucket in enumerate(self.buckets):
                if not bucket.wants_grad:
                    continue
                reduction = bucket.start_reduction()
                send = functools.partial(
                    runtime.collectives.reduce,
                    reduction.parts,
                    reduction.wire_dtype,
                    runtime.tag(self.index, number * 512),
                )
                pending = runtime.guarded("reduce", self.name, send)
                self._reductions.append((bucket, reduction, pending))
                nbytes += bucket.layout.chunk_numel * reduction.wire_dtype.itemsize
        runtime.counters.reduces += 1
        runtime.counters.reduce_bytes += nbytes * (runtime.world - 1)
        runtime.log.add("reduce", self.name, begin, nbytes)

    def wait_reduce(self) -> None:
        """Completes the messages, so that the whole gradients can go; the means are not published yet."""
        begin = time.perf_counter()
        runtime = self.runtime
        for _, reduction, pending in self._reductions:
            with runtime.reduce_lane.run():
                runtime.guarded("reduce", self.name, pending.wait)
                if runtime.replicate_group is not None:
                    average = functools.partial(self._mean_over_replicas, reduction.target)
                    runtime.guarded("mean over replicas", self.name, average)
            compute_waits(runtime.reduce_lane.mark())
            runtime.guarded("reduce", self.name, pending.release)
            runtime.pool.release(reduction.packed)
            reduction.parts.clear()  # whole gradients: kept until they are published, they would add up
        self._unpublished += [(bucket, reduction) for bucket, reduction, _ in self._reductions]
        self._reductions = []
        runtime.counters.exposed_reduce += runtime.log.add("reduce_wait", self.name, begin)

    @property
    def holds_staging(self) -> bool:
        """Whether unpublished means occupy memory besides the flat gradient."""
        return any(reduction.staging is not None for _, reduction in self._unpublished)

    def finish_reduce(self) -> list[UnitParam]:
        """Sets or adds to ``sharded.grad``; returns the parameters that got a gradient on any rank."""
        if self._reductions:
            self.wait_reduce()
        self.grad_state = check_grad(self.name, self.grad_state, GradState.EMPTY)
        unpublished, self._unpublished = self._unpublished, []
        return [param for bucket, reduction in unpublished for param in bucket.finish_reduction(reduction)]

    def _mean_over_replicas(self, target: torch.Tensor) -> None:
        group = self.runtime.replicate_group
        torch.distributed.all_reduce(target, group=group)
        target.div_(torch.distributed.get_world_size(group))

    def drop_grads(self) -> None:
        """Forgets every gradient, reduced or not (zs.reset); a reduction under way is completed first."""
        if self.grad_state is GradState.REDUCING:
            self.finish_reduce()
        self.grad_state = GradState.EMPTY
        for param in self.params:
            param.leaf.grad = param.local_sum = param.sharded.grad = None
