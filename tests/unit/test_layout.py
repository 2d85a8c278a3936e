"""Where rows lie: properties of layouts over random parameter lists and world sizes, and one simulated exchange."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from zerosharder.partition.layout import (
    LINE_ELEMENTS,
    PACK_BELOW_BYTES,
    PAGE_ELEMENTS,
    BucketLayout,
    bucket_layout,
    chunk_rows,
    unit_layout,
)

WORLDS = (1, 2, 3, 4, 5, 8, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SEEDS = range(12)


def _random_params(seed: int) -> list[tuple[str, torch.Size]]:
    """Shapes that people have and shapes that break things: scalars, empty ones, one row, a few large ones."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(rng.randint(1, 14)):
        dims = rng.choice((0, 1, 1, 2, 2, 2, 3, 4))
        shape = [rng.choice((0, 1, 1, 2, 3, 5, 7, 8, 10, 64, 97)) for _ in range(dims)]
        if dims == 2 and rng.random() < 0.4:
            shape = [rng.choice((1, 2, 3, 10, 255, 256, 257)), rng.choice((1000, 4096, 8192))]
        shapes.append(torch.Size(shape))
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


def _case(seed: int, world: int) -> tuple[list[tuple[str, torch.Size]], BucketLayout]:
    params = _random_params(seed)
    return params, bucket_layout(params, DTYPES[seed % len(DTYPES)], True, world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_are_those_of_torch_chunk(seed, world):
    params, layout = _case(seed, world)
    assert [(p.name, p.shape) for p in layout.params] == [(name, tuple(shape)) for name, shape in params]
    for p in layout.params:
        whole = torch.arange(p.numel).view(p.shape)
        if not p.shape:
            assert p.replicated and p.valid == (1,) * world
            assert all(p.local_shape(rank) == () and p.start_of(rank) == 0 for rank in range(world))
            continue
        chunks = list(torch.chunk(whole, world)) if p.shape[0] else []
        chunks += [whole[:0]] * (world - len(chunks))
        for rank, chunk in enumerate(chunks):
            assert p.local_shape(rank) == tuple(chunk.shape), (p, rank)
            assert p.valid[rank] == chunk.numel() <= p.chunk
            assert p.rows_of(rank) == chunk.shape[0]
            start = p.start_of(rank)
            assert torch.equal(whole.reshape(-1)[start : start + p.valid[rank]], chunk.reshape(-1))
        assert sum(p.valid) == p.numel


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_overlaps_and_everything_is_aligned(seed, world):
    _, layout = _case(seed, world)
    shard, full = [], [(layout.pack_full_offset, layout.pack_full_offset + layout.pack_numel * world)]
    for p in layout.params:
        shard.append((p.shard_offset, p.shard_offset + p.chunk))
        full.append((p.full_offset, p.full_offset + (p.chunk * world if p.direct else p.numel)))
        assert p.direct == (bool(p.shape) and p.chunk * layout.dtype.itemsize >= PACK_BELOW_BYTES)
        if p.direct:
            assert p.shard_offset % PAGE_ELEMENTS == 0 and p.full_offset % PAGE_ELEMENTS == 0
            assert p.shard_offset + p.chunk <= layout.pack_shard_offset
        else:
            assert p.full_offset % LINE_ELEMENTS == 0
            assert p.shard_offset >= layout.pack_shard_offset
    assert layout.pack_shard_offset % LINE_ELEMENTS == 0 and layout.pack_full_offset % LINE_ELEMENTS == 0
    assert layout.pack_shard_offset + layout.pack_numel == layout.shard_numel
    for name, spans, length in (("shard", shard, layout.shard_numel), ("full", full, layout.full_numel)):
        spans = sorted(span for span in spans if span[0] != span[1])
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), f"{name}: {spans}"
        assert not spans or spans[-1][1] <= length


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_padding_is_small(seed, world):
    """At most one short row chunk, a page for each direct parameter, and a line here and there."""
    params, layout = _case(seed, world)
    needed = sum(-(-p.numel // world) for p in layout.params)
    row = sum(math.prod(p.shape[1:]) for p in layout.params if p.shape)
    assert layout.shard_numel <= needed + row + (len(params) + 1) * PAGE_ELEMENTS
    small = [p for p in layout.params if not p.direct]
    if len(small) == len(params):  # packed chunks lie back to back
        assert layout.shard_numel == sum(p.chunk for p in small)


@pytest.mark.parametrize("world", (1, 2, 3, 8))
@pytest.mark.parametrize("seed", SEEDS)
def test_an_exchange_by_these_offsets_gives_back_the_parameters(seed, world):
    params, layout = _case(seed, world)
    whole = {name: torch.randn(shape).to(layout.dtype) for name, shape in params}
    shards = []
    for rank in range(world):
        flat = torch.full((layout.shard_numel,), float("nan"), dtype=layout.dtype)
        for p in layout.params:
            rows = whole[p.name].reshape(-1)[p.start_of(rank) : p.start_of(rank) + p.valid[rank]]
            flat[p.shard_offset : p.shard_offset + p.valid[rank]] = rows
        shards.append(flat)
    full = torch.full((layout.full_numel,), float("nan"), dtype=layout.dtype)
    for rank, flat in enumerate(shards):
        for p in layout.params:
            if p.direct:
                at = p.full_offset + rank * p.chunk
                full[at : at + p.valid[rank]] = flat[p.shard_offset : p.shard_offset + p.valid[rank]]
        at = layout.pack_full_offset + rank * layout.pack_numel
        full[at : at + layout.pack_numel] = flat[layout.pack_shard_offset :]
    for p in layout.params:
        for rank in range(world) if not p.direct else ():
            source = (
                layout.pack_full_offset + rank * layout.pack_numel + p.shard_offset - layout.pack_shard_offset
            )
            at = p.full_offset + p.start_of(rank)
            full[at : at + p.valid[rank]] = full[source : source + p.valid[rank]]
        found = full[p.full_offset : p.full_offset + p.numel].view(p.shape)
        assert torch.equal(found, whole[p.name]), p


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (0, 4), (4, 0), (1, 7), (3, 1), (1, 1, 1), (2, 0, 3)], ids=str
)
def test_odd_shapes(shape, world):
    layout = bucket_layout([("p", torch.Size(shape)), ("q", torch.Size((5,)))], torch.float32, True, world)
    p, q = layout.params
    assert p.numel == math.prod(shape) and p.replicated == (shape == ())
    assert not p.direct and q.shard_offset == p.shard_offset + p.chunk
    assert sum(p.valid) == (world if shape == () else p.numel)


def test_huge_parameters_are_counted_in_exact_integers():
    shape = torch.Size((200_003, 70_001))  # 1.4e10 elements: beyond 32 bits in elements, bytes and offsets
    layout = bucket_layout([("a", shape), ("b", torch.Size((3,))), ("c", shape)], torch.bfloat16, True, 7)
    a, b, c = layout.params
    assert a.direct and c.direct and not b.direct
    assert a.numel == 200_003 * 70_001 == sum(a.valid)
    assert [a.rows_of(rank) for rank in range(7)] == [28_572] * 6 + [28_571]
    assert c.full_offset >= a.full_offset + 7 * a.chunk and c.shard_offset >= a.shard_offset + a.chunk
    assert layout.full_numel >= 2 * a.numel


def test_more_ranks_than_rows():
    layout = bucket_layout([("p", torch.Size((3, 2)))], torch.float32, True, 64)
    (p,) = layout.params
    assert p.valid == (2, 2, 2, *([0] * 61)) and p.start_of(63) == p.numel


@pytest.mark.parametrize("rows", range(12))
@pytest.mark.parametrize("world", range(1, 9))
def test_chunk_rows(rows, world):
    found = [chunk_rows(rows, world, rank) for rank in range(world)]
    expected = [len(c) for c in torch.chunk(torch.arange(rows), world)] if rows else []
    assert found == expected + [0] * (world - len(expected))


def test_the_threshold_between_packed_and_direct():
    rows = PACK_BELOW_BYTES // 4
    below, at = ((f"p{n}", torch.Size((2 * n,))) for n in (rows - 1, rows))
    layout = bucket_layout([below, at], torch.float32, True, 2)
    assert [p.direct for p in layout.params] == [False, True]
    assert layout.params[1].shard_offset == 0  # direct ones come first, whatever the order of registration


def test_buckets_are_by_dtype_and_trainability_in_order_of_first_use():
    params = [
        ("a", torch.Size((2,)), torch.float32, True),
        ("b", torch.Size((2,)), torch.bfloat16, True),
        ("c", torch.Size((2,)), torch.float32, False),
        ("d", torch.Size((2,)), torch.float32, True),
    ]
    found = unit_layout(params, 2)
    assert [(b.dtype, b.trainable, [p.name for p in b.params]) for b in found] == [
        (torch.float32, True, ["a", "d"]),
        (torch.bfloat16, True, ["b"]),
        (torch.float32, False, ["c"]),
    ]
    assert unit_layout([], 2) == ()


@distributed(world=2)
def test_ranks_compute_the_same_layouts() -> None:
    mine = [repr(_case(seed, world)[1]) for seed in SEEDS for world in WORLDS]
    everyone: list[list[str]] = [[], []]
    dist.all_gather_object(everyone, mine)
    assert everyone[0] == everyone[1]
