"""The pool of slots: what is lent again, what rests, what is dropped, and that references are counted right."""

from __future__ import annotations

import gc

import pytest
import torch

from zerosharder.engine.slots import GRANULE, MAX_OVERSIZE, Slot, SlotPool

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def pool():
    return SlotPool(CPU)


def test_a_released_slot_is_lent_again(pool):
    first = pool.acquire(MIB)
    pool.release(first)
    assert pool.acquire(MIB) is first
    assert (pool.nbytes, pool.in_use, pool.peak) == (MIB, MIB, MIB)


def test_two_at_a_time_are_two(pool):
    a, b = pool.acquire(MIB), pool.acquire(MIB)
    assert a is not b and a.tensor.data_ptr() != b.tensor.data_ptr()
    assert (pool.nbytes, pool.in_use) == (2 * MIB, 2 * MIB)
    pool.release(a)
    assert (pool.nbytes, pool.in_use, pool.peak) == (2 * MIB, MIB, 2 * MIB)


def test_sizes_are_rounded_to_pages_and_never_to_powers_of_two(pool):
    for asked, got in ((0, GRANULE), (1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE)):
        assert pool.acquire(asked).nbytes == got
    assert pool.acquire(5 * MIB + 3).nbytes == 5 * MIB + GRANULE


def test_slots_start_on_a_page(pool):
    for nbytes in (1, GRANULE + 1, MIB, 3 * MIB):
        assert pool.acquire(nbytes).tensor.data_ptr() % GRANULE == 0


@pytest.mark.parametrize(
    "share, reused", [(1.0, True), (1 / MAX_OVERSIZE, True), (0.79, False), (1.01, False)]
)
def test_a_slot_serves_only_units_of_about_its_size(pool, share, reused):
    big = pool.acquire(100 * GRANULE)
    pool.release(big)
    assert (pool.acquire(int(share * 100 * GRANULE)) is big) == reused


def test_the_smallest_slot_that_fits_is_taken(pool):
    slots = [pool.acquire(n * GRANULE) for n in (120, 100, 110)]
    for slot in slots:
        pool.release(slot)
    assert pool.acquire(100 * GRANULE) is slots[1]
    assert pool.acquire(100 * GRANULE) is slots[2]
    assert pool.acquire(100 * GRANULE) is slots[0]


def test_a_steady_pattern_allocates_nothing(pool):
    sizes = [3 * MIB, MIB, MIB, 2 * MIB]
    for step in range(5):
        held = [pool.acquire(nbytes) for nbytes in sizes]
        for slot in held:
            pool.release(slot)
        if step == 0:
            after_first = pool.nbytes
    assert pool.nbytes == after_first == sum(sizes)


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[:4],
        lambda t: t.view(torch.float32)[2:6],
        lambda t: t.untyped_storage(),
        lambda t: torch.nn.Parameter(t[:8].view(torch.float32)),
        lambda t: t[:16].detach().as_strided((2, 2), (2, 1)),
    ],
    ids=["view", "dtype", "storage", "parameter", "strided"],
)
def test_a_slot_that_somebody_refers_to_rests(pool, keep):
    slot = pool.acquire(MIB)
    kept = keep(slot.tensor)
    pool.release(slot)
    assert slot.is_referenced
    other = pool.acquire(MIB)
    assert other is not slot
    other.tensor.fill_(7)
    pool.release(other)
    del kept
    assert not slot.is_referenced
    assert pool.acquire(MIB) in (slot, other)
    assert pool.acquire(MIB) in (slot, other)
    assert pool.nbytes == 2 * MIB


def test_what_autograd_saved_makes_a_slot_rest(pool):
    slot = pool.acquire(MIB)
    weight = slot.tensor[: 4 * 16].view(torch.float32).view(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    y = x @ weight  # saves a view of the slot
    del weight
    pool.release(slot)
    assert pool.acquire(MIB) is not slot
    y.sum().backward()
    del y
    assert not slot.is_referenced


def test_cached_views_are_made_once_and_count_as_ours(pool):
    slot = pool.acquire(MIB)
    made = []

    def make(raw: torch.Tensor) -> list[torch.Tensor]:
        made.append(1)
        return [raw[:8], raw[8:16].view(torch.float32)]

    first = slot.views("unit", make)
    assert slot.views("unit", make) is first and made == [1]
    other = slot.views("another", make)
    assert other is not first and made == [1, 1]
    pool.release(slot)
    del first, other
    assert not slot.is_referenced
    assert pool.acquire(MIB) is slot
    view = slot.views("unit", make)[0][2:3]  # a view of a cached view is somebody else's
    assert slot.is_referenced
    del view
    assert not slot.is_referenced


def test_a_cached_view_given_away_makes_a_slot_rest(pool):
    """A parameter whose ``data`` is a cached view shares storage, not the cached tensor."""
    slot = pool.acquire(MIB)
    view = slot.views("unit", lambda raw: raw[:16].view(torch.float32))
    leaf = torch.nn.Parameter(torch.zeros(4))
    leaf.data = view
    assert slot.is_referenced
    leaf.data = torch.zeros(4)
    assert not slot.is_referenced


def test_trim_drops_what_nobody_needs(pool):
    used, free, held = pool.acquire(MIB), pool.acquire(2 * MIB), pool.acquire(3 * MIB)
    kept = held.tensor[:1]
    pool.release(free)
    pool.release(held)
    pool.trim()
    assert pool.nbytes == 4 * MIB and pool.in_use == MIB
    assert pool.acquire(2 * MIB) is not free
    del kept
    assert pool.acquire(3 * MIB) is held
    pool.release(used)
    assert pool.acquire(MIB) is used


def test_trim_gives_memory_back(pool):
    slot = pool.acquire(MIB)
    alive = torch.UntypedStorage._new_with_weak_ptr  # the storage dies with its last handle
    weak = slot.tensor.untyped_storage()._weak_ref()
    pool.release(slot)
    del slot
    pool.trim()
    gc.collect()
    assert alive(weak) is None


def test_a_new_slot_is_not_referenced():
    assert not Slot(GRANULE, CPU).is_referenced
