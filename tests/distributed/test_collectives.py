"""Both transports against arithmetic on one rank: even, uneven, empty chunks, every dtype, missing gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from zerosharder.engine.collectives import (
    Collectives,
    GatherPart,
    GroupCollectives,
    PairwiseExchange,
    ReducePart,
)
from zerosharder.engine.slots import SlotPool
from zerosharder.partition.layout import chunk_rows

ROWS = (0, 1, 2, 7, 64, 1000)
WIDTH = 33


def _transport(kind: str, reduce_dtype: torch.dtype = torch.float32) -> Collectives:
    gather, reduce = dist.new_group(), dist.new_group()
    if kind == "pairwise":
        return PairwiseExchange(gather, reduce, SlotPool(torch.device("cpu")))
    return GroupCollectives(gather, reduce, reduce_dtype)


def _chunks(rows: int, world: int) -> tuple[int, tuple[int, ...]]:
    valid = tuple(chunk_rows(rows, world, rank) * WIDTH for rank in range(world))
    return -(-rows // world) * WIDTH, valid


def _values(rows: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + rank)
    return torch.randn(rows * WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("kind", ["pairwise", "group"])
@distributed(world=(1, 2, 3, 4))
def test_gather_brings_every_rank_s_rows(kind: str) -> None:
    transport = _transport(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        _check_gather(transport, dtype)


def _check_gather(transport: Collectives, dtype: torch.dtype) -> None:
    rank, world = transport.rank, transport.world
    parts, expected = [], []
    for rows in ROWS:
        chunk, valid = _chunks(rows, world)
        whole = _values(rows, 0, dtype)
        full = torch.full((chunk * world,), float("nan"), dtype=dtype)
        full[rank * chunk : rank * chunk + valid[rank]] = whole[rank * chunk : rank * chunk + valid[rank]]
        parts.append(GatherPart(full, chunk, valid))
        expected.append(whole)
    pending = transport.gather(parts, 0)
    pending.wait()
    pending.release()
    for part, whole in zip(parts, expected, strict=True):
        assert torch.equal(part.full[: whole.numel()], whole)


@pytest.mark.parametrize("kind", ["pairwise", "group"])
@distributed(world=(1, 2, 3, 4))
def test_reduce_gives_the_mean_of_this_rank_s_rows(kind: str) -> None:
    transport = _transport(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _check_reduce(transport, dtype, exact=kind == "pairwise")


def _check_reduce(transport: Collectives, dtype: torch.dtype, exact: bool) -> None:
    rank, world = transport.rank, transport.world
    parts, expected = [], []
    for number, rows in enumerate(ROWS):
        chunk, valid = _chunks(rows, world)
        # The last rank has no gradient for every other part.
        missing = number % 2 == 1 and world > 1
        mine = None if missing and rank == world - 1 else _values(rows, rank, dtype)
        total = torch.zeros(rows * WIDTH)
        for other in range(world):
            if not (missing and other == world - 1):
                total += _values(rows, other, dtype).float()
        out = torch.full((chunk,), float("nan"))
        parts.append(ReducePart(mine, chunk, valid, out))
        expected.append((total / world)[rank * chunk : rank * chunk + valid[rank]])
    pending = transport.reduce(parts, dtype, 0)
    pending.wait()
    pending.release()
    for part, mean in zip(parts, expected, strict=True):
        got = part.out[: mean.numel()]
        if exact:  # rank order, in fp32: these very bits
            assert torch.equal(got, mean)
        else:
            torch.testing.assert_close(got, mean, rtol=1e-6, atol=1e-6)


@distributed(world=(2, 3, 4))
def test_operations_of_two_units_may_overlap_in_any_order() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = _transport("pairwise")
    started = []
    order = range(8) if rank % 2 else reversed(range(8))
    for unit in order:
        full = torch.full((world * 1000,), -1.0)
        full[rank * 1000 : (rank + 1) * 1000] = 100.0 * unit + rank
        part = GatherPart(full, 1000, (1000,) * world)
        started.append((unit, part, transport.gather([part], unit * 4096)))
    for unit, part, pending in sorted(started, key=lambda item: item[0]):
        pending.wait()
        for other in range(world):
            assert (part.full[other * 1000 : (other + 1) * 1000] == 100.0 * unit + other).all()
    for _, _, pending in started:
        pending.release()
