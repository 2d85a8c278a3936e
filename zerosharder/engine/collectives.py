"""Moving shards between ranks: gather, reduce, and the small interface under which a transport can be exchanged.

The engine knows two operations on the buffers of a unit (partition/layout.py, [Note: unit buffers]):

* ``gather``: every rank has written its own chunks into the gathered buffers; afterwards all chunks are there.
* ``reduce``: every rank has whole gradients; afterwards ``out`` holds the mean over ranks of its own chunks.

Two transports serve it. ``PairwiseExchange`` sends every chunk once, straight from where it lies to where it is
read, by point-to-point messages; on gloo that is 2 to 4 times faster than its own all-gather and reduce-scatter
(docs/collectives.md has the figures). ``GroupCollectives`` uses the collectives of the process group, which NCCL
runs on its own stream.

Sums run in rank order in fp32 (or the wider input type), so that the same bits come out on every run at any world
size; 16-bit gradients are sent as they are and widened by the receiver, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from zerosharder.engine.slots import Slot, SlotPool


@dataclass
class GatherPart:
    """One region of a gathered buffer: ``full`` is 1-D [world * chunk]; rank r's part is its r-th chunk."""

    full: torch.Tensor
    chunk: int
    valid: tuple[int, ...]  # real elements of each rank's chunk


@dataclass
class ReducePart:
    """One gradient on its way: ``grad`` is 1-D, rank r's chunk starts at ``r * chunk`` (None stands for zeros)."""

    grad: torch.Tensor | None
    chunk: int
    valid: tuple[int, ...]
    out: torch.Tensor  # 1-D, at least valid[rank] elements, in the reduce dtype; receives the mean


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Blocks until its result may be read (on CUDA: makes the current stream wait)."""

    def release(self) -> None:
        """Blocks until every buffer it was given may be reused."""


class Collectives(Protocol):
    """What the engine needs from a transport. ``tag`` is the same on every rank for the same unit."""

    rank: int
    world: int

    def gather(self, parts: Sequence[GatherPart], tag: int) -> Pending:
        """Starts filling every part from all ranks."""

    def reduce(self, parts: Sequence[ReducePart], dtype: torch.dtype, tag: int) -> Pending:
        """Starts averaging every part over the ranks; ``dtype`` is that of the gradients."""


# Parts of one operation get tags of their own, so that a message can never be taken for another unit's.
TAGS_PER_UNIT = 4096


class PairwiseExchange:
    """Point-to-point messages between every pair of ranks: each byte is sent once and copied nowhere else."""

    def __init__(
        self, gather_group: dist.ProcessGroup | None, reduce_group: dist.ProcessGroup | None, pool: SlotPool
    ) -> None:
        self._gather_group = gather_group
        self._reduce_group = reduce_group
        self._pool = pool
        self.rank = gather_group.rank() if gather_group is not None else 0
        self.world = gather_group.size() if gather_group is not None else 1
        # Each rank starts with another partner, so that no rank is everybody's first.
        self._peers = [(self.rank + i) % self.world for i in range(1, self.world)]

    def gather(self, parts: Sequence[GatherPart], tag: int) -> Pending:
        """See Collectives."""
        receives: list[dist.Work] = []
        sends: list[dist.Work] = []
        group, me = self._gather_group, self.rank
        for peer in self._peers:
            assert group is not None
            for i, part in enumerate(parts):
                start, n = peer * part.chunk, part.valid[peer]
                if n:
                    receives.append(group.recv([part.full[start : start + n]], peer, tag + i))
            for i, part in enumerate(parts):
                start, n = me * part.chunk, part.valid[me]
                if n:
                    sends.append(group.send([part.full[start : start + n]], peer, tag + i))
        return _Exchange(receives, sends)

    def reduce(self, parts: Sequence[ReducePart], dtype: torch.dtype, tag: int) -> Pending:
        """See Collectives. Sums in rank order; what the first partner sends arrives in ``out`` if dtypes agree."""
        group, me = self._reduce_group, self.rank
        mine = [part.valid[me] for part in parts]
        arriving, slot = self._landing(parts, mine, dtype)
        exchange = _Exchange([], [], lambda: self._sum(parts, mine, arriving), slot, self._pool)
        for peer in self._peers:
            assert group is not None
            for i, buffer in enumerate(arriving[peer]):
                if mine[i]:
                    exchange.receives.append(group.recv([buffer], peer, tag + i))
            for i, part in enumerate(parts):
                n = part.valid[peer]
                if not n:
                    continue
                if part.grad is None:
                    chunk = torch.zeros(n, dtype=dtype, device=self._pool.device)
                else:
                    chunk = part.grad[peer * part.chunk : peer * part.chunk + n]
                exchange.alive.append(chunk)
                exchange.sends.append(group.send([chunk], peer, tag + i))
        return exchange

    def _landing(
        self, parts: Sequence[ReducePart], mine: list[int], dtype: torch.dtype
    ) -> tuple[dict[int, list[torch.Tensor]], Slot | None]:
        """Where each peer's summands for this rank's rows arrive: one buffer for each peer and part."""
        arriving: dict[int, list[torch.Tensor]] = {}
        staged = sorted(self._peers)
        if staged and all(part.out.dtype == dtype for part in parts):
            # The sum starts with the lowest peer (or with this rank, and a + b = b + a): no staging for that one.
            arriving[staged.pop(0)] = [part.out[:n] for part, n in zip(parts, mine, strict=True)]
        total = sum(mine)
        if not staged or not total:
            return arriving | {peer: [part.out[:0] for part in parts] for peer in staged}, None
        slot = self._pool.acquire(len(staged) * total * dtype.itemsize)
        rows = slot.tensor.view(dtype)[: len(staged) * total].split(total)
        return arriving | {peer: list(row.split(mine)) for peer, row in zip(staged, rows, strict=True)}, slot

    def _sum(
        self, parts: Sequence[ReducePart], mine: list[int], arriving: dict[int, list[torch.Tensor]]
    ) -> None:
        """The mean of every part, summed in rank order."""
        for i, part in enumerate(parts):
            n, start = mine[i], self.rank * part.chunk
            if not n:
                continue
            out = part.out[:n]
            own = None if part.grad is None else part.grad[start : start + n]
            summands = [own if rank == self.rank else arriving[rank][i] for rank in range(self.world)]
            landed = next(
                (k for k, t in enumerate(summands) if t is not None and t.data_ptr() == out.data_ptr()), None
            )
            if landed is None:
                first = summands.pop(0)
                out.zero_() if first is None else out.copy_(first)
            else:
                del summands[landed]  # it is in out already; at most this rank's own comes before it
            for summand in summands:
                if summand is not None:
                    out.add_(summand)
            if self.world > 1:
                out.div_(self.world)


@dataclass
class _Exchange:
    """Messages under way, and what must stay alive until they are gone.

    The hazard: gloo reads a send buffer until the peer has taken it. ``alive`` and ``slot`` hold those buffers; a
    gradient freed earlier would be overwritten by the next allocation while it is being sent.
    """

    receives: list[dist.Work]
    sends: list[dist.Work]
    finish: Callable[[], None] | None = None
    slot: Slot | None = None
    pool: SlotPool | None = None
    alive: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.receives:
            work.wait()
        self.receives = []
        if self.finish is not None:
            self.finish()
            self.finish = None
        if self.slot is not None and self.pool is not None:
            self.pool.release(self.slot)
            self.slot = None

    def release(self) -> None:
        self.wait()
        for work in self.sends:
            work.wait()
        self.sends = []
        self.alive = []


class GroupCollectives:
    """The process group's own all-gather and reduce-scatter, in place where it can (NCCL; gloo for tests).

    Chunks must have one size for such a collective, so a gradient whose rows do not divide evenly is padded by a
    copy; gathers need none, since padding lies behind the last row.
    """

    def __init__(
        self, gather_group: dist.ProcessGroup, reduce_group: dist.ProcessGroup, reduce_dtype: torch.dtype
    ) -> None:
        self._gather_group = gather_group
        self._reduce_group = reduce_group
        self._reduce_dtype = reduce_dtype
        self.rank = gather_group.rank()
        self.world = gather_group.size()

    def gather(self, parts: Sequence[GatherPart], tag: int) -> Pending:
        """See Collectives."""
        works = []
        for part in parts:
            if part.chunk:
                own = part.full[self.rank * part.chunk : (self.rank + 1) * part.chunk]
                if own.device.type == "cpu":
                    own = own.clone()  # gloo wants the input apart from the output
                works.append(
                    dist.all_gather_into_tensor(part.full, own, group=self._gather_group, async_op=True)
                )
        return _Collective(works)

    def reduce(self, parts: Sequence[ReducePart], dtype: torch.dtype, tag: int) -> Pending:
        """See Collectives. The order of the sum is the process group's."""
        works = []
        copies = []
        alive = []
        for part in parts:
            if not part.chunk:
                continue
            total = self.world * part.chunk
            if part.grad is not None and part.grad.numel() == total and dtype == self._reduce_dtype:
                padded = part.grad
            else:
                padded = part.out.new_zeros(total, dtype=self._reduce_dtype)
                if part.grad is not None:
                    padded[: part.grad.numel()].copy_(part.grad)
            mean = part.out.new_empty(part.chunk, dtype=self._reduce_dtype)
            works.append(dist.reduce_scatter_tensor(mean, padded, group=self._reduce_group, async_op=True))
            copies.append((part.out[: part.valid[self.rank]], mean))
            alive.append(padded)

        def finish() -> None:
            for out, mean in copies:
                out.copy_(mean[: out.numel()]).div_(self.world)

        return _Collective(works, finish, alive)


@dataclass
class _Collective:
    works: list[dist.Work]
    finish: Callable[[], None] | None = None
    alive: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []
        if self.finish is not None:
            self.finish()
            self.finish = None
        self.alive = []

    def release(self) -> None:
        self.wait()
