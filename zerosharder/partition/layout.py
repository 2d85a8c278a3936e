"""Where every row of every parameter of a unit lies, on this rank and in the gathered buffer.

[Note: unit buffers]
A unit keeps its parameters in buckets, one for each (dtype, trainable) pair. A bucket has two forms:

* the *flat shard* (1-D, this rank's rows of every parameter, one after another), which the optimizer steps over
  and which moves between tiers;
* the *gathered buffer* (1-D, every row of every parameter), which the forward and the backward compute with.

A parameter of shape [rows, ...] is cut along its rows into ``world`` chunks of ``ceil(rows / world)`` rows, as
``torch.chunk`` and ``DTensor``'s ``Shard(0)`` do; the last chunks may be short or empty. Chunks have the same
*capacity* on every rank, so that padding lies behind the last row of a parameter and never inside it.

Two kinds of parameters share a gathered buffer:

* *direct* ones are large: their chunks arrive in place, side by side, and need no copy afterwards;
* *packed* ones are small: all of them travel in one message per rank through the pack area at the end of the
  buffer, and are copied out to where the unit reads them.

A parameter whose memory is not in row order (transposed, channels-last) is packed whatever its size, and copied out to
the strides it had: operators round differently for another memory order.

A 0-dim parameter has no rows to cut. It is *replicated*: every rank holds it whole and steps it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

# A chunk below this many bytes is packed: a message costs about as much as copying this much (measured on
# loopback: 20 to 50 microseconds a message, 1.5 GB/s a byte).
PACK_BELOW_BYTES = 32 * 1024

# Elements. Direct parameters start on a page in both forms (4 KiB for 2-byte elements, 8 KiB for 4-byte ones):
# copies between addresses that differ within a page run at a quarter of the speed (docs/design.md).
PAGE_ELEMENTS = 2048
# Packed parameters start on a cache line where they are read.
LINE_ELEMENTS = 32


@dataclass(frozen=True)
class ParamLayout:
    """One parameter of a bucket. All offsets and lengths are elements."""

    name: str
    shape: tuple[int, ...]
    replicated: bool
    direct: bool
    chunk: int  # capacity of one rank's chunk
    valid: tuple[int, ...]  # for each rank: how many elements of its chunk are real
    shard_offset: int  # where this rank's chunk starts in the flat shard
    full_offset: int  # where the parameter starts in the gathered buffer
    stride: tuple[int, ...] | None = None  # in the gathered buffer, where it is not row order

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds: its rows, or everything if the parameter is replicated."""
        if self.replicated:
            return self.shape
        return (self.rows_of(rank), *self.shape[1:])

    def rows_of(self, rank: int) -> int:
        """How many rows ``rank`` holds (a replicated parameter counts as one row)."""
        if self.replicated:
            return 1
        return chunk_rows(self.shape[0], len(self.valid), rank)

    def first_row(self, rank: int) -> int:
        """The first row that ``rank`` holds."""
        if self.replicated:
            return 0
        return min(rank * -(-self.shape[0] // len(self.valid)), self.shape[0])

    def start_of(self, rank: int) -> int:
        """First element of the whole, flattened parameter that ``rank`` holds."""
        return 0 if self.replicated else min(rank * self.chunk, self.numel)


@dataclass(frozen=True)
class BucketLayout:
    """All parameters of one dtype of a unit; see [Note: unit buffers]."""

    dtype: torch.dtype
    trainable: bool
    params: tuple[ParamLayout, ...]
    world: int
    shard_numel: int  # flat shard, padding included
    pack_shard_offset: int  # the packed chunks lie together at the end of the flat shard, from here
    pack_numel: int  # elements of one rank's packed chunks
    pack_full_offset: int  # the pack area of the gathered buffer: [world, pack_numel]
    full_numel: int  # gathered buffer, padding and pack area included

    @property
    def chunk_numel(self) -> int:
        """Elements of one rank's chunks as they travel, padding included."""
        return sum(p.chunk for p in self.params if p.direct) + self.pack_numel


def chunk_rows(rows: int, world: int, rank: int) -> int:
    """Rows that ``rank`` of ``world`` holds of ``rows``, as ``torch.chunk`` cuts them."""
    per_rank = -(-rows // world)
    return max(0, min(per_rank, rows - rank * per_rank))


def bucket_layout(
    params: Sequence[tuple[str, torch.Size]],
    dtype: torch.dtype,
    trainable: bool,
    world: int,
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> BucketLayout:
    """Lays out ``params`` (name and shape, in registration order) for ``world`` ranks.

    ``strides`` has those of parameters whose memory is not in row order.
    The result is the same on every rank: it depends on nothing but its arguments.
    """
    direct: list[ParamLayout] = []
    packed: list[ParamLayout] = []
    shard = full = 0
    measured = [(name, tuple(shape), _cut(tuple(shape), world)) for name, shape in params]

    def is_direct(name: str, shape: tuple[int, ...], chunk: int) -> bool:
        return bool(shape) and name not in strides and chunk * dtype.itemsize >= PACK_BELOW_BYTES

    for name, shape, (chunk, valid) in measured:
        if not is_direct(name, shape, chunk):
            continue
        shard, full = _align(shard, PAGE_ELEMENTS), _align(full, PAGE_ELEMENTS)
        direct.append(ParamLayout(name, shape, False, True, chunk, valid, shard, full))
        shard += chunk
        full += chunk * world

    pack_shard_offset = _align(shard, LINE_ELEMENTS)
    shard = pack_shard_offset
    for name, shape, (chunk, valid) in measured:
        if is_direct(name, shape, chunk):
            continue
        full = _align(full, LINE_ELEMENTS)
        packed.append(
            ParamLayout(name, shape, not shape, False, chunk, valid, shard, full, strides.get(name))
        )
        shard += chunk
        full += math.prod(shape)
    pack_numel = shard - pack_shard_offset
    pack_full_offset = _align(full, LINE_ELEMENTS)

    order = {name: position for position, (name, _) in enumerate(params)}
    return BucketLayout(
        dtype=dtype,
        trainable=trainable,
        params=tuple(sorted(direct + packed, key=lambda p: order[p.name])),
        world=world,
        shard_numel=shard,
        pack_shard_offset=pack_shard_offset,
        pack_numel=pack_numel,
        pack_full_offset=pack_full_offset,
        full_numel=pack_full_offset + pack_numel * world,
    )


def unit_layout(
    params: Iterable[tuple[str, torch.Size, torch.dtype, bool]],
    world: int,
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[BucketLayout, ...]:
    """Splits ``params`` (name, shape, dtype, trainable) into buckets and lays each out; see ``bucket_layout``."""
    buckets: dict[tuple[torch.dtype, bool], list[tuple[str, torch.Size]]] = {}
    for name, shape, dtype, trainable in params:
        buckets.setdefault((dtype, trainable), []).append((name, shape))
    return tuple(
        bucket_layout(found, dtype, trainable, world, strides)
        for (dtype, trainable), found in buckets.items()
    )


def _cut(shape: tuple[int, ...], world: int) -> tuple[int, tuple[int, ...]]:
    """Chunk capacity and, for each rank, its real elements."""
    if not shape:
        return 1, (1,) * world
    row = math.prod(shape[1:])
    valid = tuple(chunk_rows(shape[0], world, rank) * row for rank in range(world))
    return -(-shape[0] // world) * row, valid


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to
