"""`zerosharder._C.SlotPool`."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

PAGE = _C.PAGE


def address(slot) -> int:
    return np.frombuffer(slot, dtype=np.uint8).ctypes.data


@pytest.mark.parametrize("nbytes, count", [(1, 1), (PAGE, 3), (PAGE + 1, 4), (3 << 20, 2)])
def test_slots_are_apart_and_page_aligned(nbytes, count):
    """Each has its bytes to itself, and the pool is not a byte larger than that needs."""
    pool = _C.SlotPool(nbytes, count)
    slots = [pool.acquire() for _ in range(count)]
    assert pool.free == 0 and [len(slot) for slot in slots] == [nbytes] * count
    assert all(address(slot) % PAGE == 0 for slot in slots)
    for i, slot in enumerate(slots):
        memoryview(slot)[:] = bytes([i + 1]) * nbytes
    assert all(memoryview(slot) == bytes([i + 1]) * nbytes for i, slot in enumerate(slots))
    assert sorted(slot.index for slot in slots) == list(range(count))
    assert pool.nbytes == -(-nbytes // PAGE) * PAGE * (count - 1) + nbytes


def test_given_back_by_hand_by_a_block_and_by_the_collector():
    pool = _C.SlotPool(10, 2)
    slot = pool.acquire()
    slot.release()
    slot.release()
    assert pool.free == 2
    with pytest.raises(ValueError, match="given back"):
        _ = slot.index
    with pytest.raises((ValueError, BufferError)):
        memoryview(slot)
    with pool.acquire() as slot:
        assert pool.free == 1 and len(slot) == 10
    assert pool.free == 2
    slot = pool.acquire()
    del slot
    assert pool.free == 2


def test_the_warm_slot_is_taken_again():
    pool = _C.SlotPool(10, 3)
    first = pool.acquire()
    index = first.index
    first.release()
    assert pool.acquire().index == index


def test_a_slot_outlives_its_pool():
    slot = _C.SlotPool(100, 1).acquire()
    memoryview(slot)[:] = b"x" * 100
    assert memoryview(slot) == b"x" * 100


def test_an_empty_pool_times_out():
    pool = _C.SlotPool(100, 2)
    slots = [pool.acquire(), pool.acquire()]
    with pytest.raises(TimeoutError, match="all 2 slots of 100 bytes") as caught:
        pool.acquire(timeout=0.02)
    assert caught.value.errno == errno.ETIMEDOUT
    assert pool.waiting == 0  # nobody is left in line
    slots.pop()
    assert pool.acquire(timeout=0).index >= 0


def test_who_waits_is_served_in_order():
    """Three threads in line get the one slot as they came."""
    pool = _C.SlotPool(10, 1)
    slot, served = pool.acquire(), []

    def wait(name: int) -> None:
        with pool.acquire():
            served.append(name)

    threads = []
    for name in range(3):
        threads.append(threading.Thread(target=wait, args=(name,)))
        threads[-1].start()
        while pool.waiting <= name:
            pass  # it also shows that waiting lets other Python threads run
    slot.release()
    for thread in threads:
        thread.join(timeout=60)
    assert served == [0, 1, 2] and pool.free == 1


def test_those_behind_one_who_gives_up_are_served():
    pool = _C.SlotPool(10, 1)
    slot, served = pool.acquire(), []

    def give_up() -> None:
        with pytest.raises(TimeoutError):
            pool.acquire(timeout=0.1)

    def wait() -> None:
        with pool.acquire():
            served.append(True)

    threads = [threading.Thread(target=give_up), threading.Thread(target=wait)]
    threads[0].start()
    while pool.waiting == 0 and threads[0].is_alive():
        pass
    threads[1].start()
    threads[0].join(timeout=60)
    slot.release()
    threads[1].join(timeout=60)
    assert served == [True] and pool.free == 1


@pytest.mark.parametrize("nbytes, count", [(0, 1), (1, 0), (-1, 1), (1, -5)])
def test_sizes_that_are_none(nbytes, count):
    with pytest.raises(ValueError, match="at least 1"):
        _C.SlotPool(nbytes, count)


@pytest.mark.parametrize("nbytes, count", [(2**62, 8), (2**40, 2**40), (2**47, 1)])
def test_sizes_that_no_machine_has(nbytes, count):
    with pytest.raises(OSError) as caught:
        _C.SlotPool(nbytes, count)
    assert caught.value.errno == errno.ENOMEM
