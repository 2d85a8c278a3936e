"""`zerosharder._C.Buffer`."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import psutil
import pytest

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

HUGE = _C.HUGE_PAGE


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, HUGE - 1, HUGE, HUGE + 1])
@pytest.mark.parametrize("huge", [False, True])
def test_start_and_length(nbytes, huge):
    buffer = _C.Buffer(nbytes, huge=huge)
    assert buffer.address % HUGE == 0 and buffer.nbytes == len(buffer) == nbytes
    assert isinstance(buffer.huge, bool) and (huge or not buffer.huge)


def test_buffer_protocol():
    buffer = _C.Buffer(10_000)
    view = memoryview(buffer)
    assert (view.nbytes, view.format, view.itemsize, view.readonly, view.c_contiguous) == (
        10_000,
        "B",
        1,
        False,
        True,
    )
    array = np.frombuffer(buffer, dtype=np.uint8)
    assert array.ctypes.data == buffer.address and not array.any()
    view[-1] = 7
    assert array[-1] == 7


def test_a_view_keeps_the_memory():
    array = np.frombuffer(_C.Buffer(HUGE, populate=True), dtype=np.uint8)
    _C.Buffer(HUGE, populate=True)
    assert not array.any()


def test_release_pages():
    nbytes = 32 * HUGE
    buffer = _C.Buffer(nbytes, populate=True)
    array = np.frombuffer(buffer, dtype=np.uint8)
    array[:] = 1
    process = psutil.Process()
    before = process.memory_info().rss
    buffer.release_pages()
    assert before - process.memory_info().rss > 0.9 * nbytes
    assert not array[::4096].any()
    array[0] = 3  # still writable
    assert array[0] == 3


def test_nothing_stays_mapped():
    def mappings() -> int:
        with open("/proc/self/maps") as lines:
            return sum(1 for _ in lines)

    _C.Buffer(HUGE)
    before = mappings()
    for _ in range(200):
        _C.Buffer(HUGE + 1, huge=True, populate=True)
    assert mappings() <= before + 20


@pytest.mark.parametrize("nbytes", [0, -1, -(2**63), -(2**70)])
def test_not_positive(nbytes):
    with pytest.raises(ValueError, match=f"at least 1, got {nbytes}"):
        _C.Buffer(nbytes)


@pytest.mark.parametrize("nbytes", [2**48, 2**63 - 1, 2**63, 2**64, 2**70])
def test_absurd(nbytes):
    with pytest.raises(OSError, match=f"{nbytes} bytes") as caught:
        _C.Buffer(nbytes)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("nbytes", [1.5, "1", None])
def test_not_a_number(nbytes):
    with pytest.raises(TypeError):
        _C.Buffer(nbytes)


def test_other_threads_run_while_populating():
    """The counter moves while the constructor runs; with the lock held it would stand still for all of it."""
    ticks, stop = [], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        begin = time.perf_counter()
        _C.Buffer(256 * HUGE, populate=True)  # small pages: slow enough to see
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(begin < tick < end for tick in ticks) >= 3


def vm_locked() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))


def test_counters_follow_what_is_mapped():
    before = _C.memory_counters()
    buffer = _C.Buffer(3 * HUGE + 1)
    held = _C.memory_counters()["held"] - before["held"]
    assert held == 3 * HUGE + _C.PAGE
    assert _C.memory_counters()["peak"] >= before["held"] + held
    del buffer
    after = _C.memory_counters()
    assert after["held"] == before["held"] and after["peak"] >= before["held"] + held


def test_locked():
    """The kernel and the counter agree; a buffer that may not be locked is pageable, with the reason."""
    before, counted = vm_locked(), _C.memory_counters()["locked"]
    buffer = _C.Buffer(HUGE + 1, lock=True)
    if buffer.locked:
        assert buffer.lock_error == 0
        assert vm_locked() - before == _C.memory_counters()["locked"] - counted == HUGE + _C.PAGE
        with pytest.raises(OSError, match="releasing the pages"):
            buffer.release_pages()
    else:
        assert buffer.lock_error in (errno.ENOMEM, errno.EPERM, errno.EAGAIN)
    memoryview(buffer)[-1] = 1
    del buffer
    assert vm_locked() == before and _C.memory_counters()["locked"] == counted


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_touching_by_several_threads(threads):
    """Every page is there afterwards, whatever the split."""
    nbytes = 61 * HUGE + 5
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = _C.Buffer(nbytes, huge=True, populate=True, threads=threads)
    assert process.memory_info().rss - before > 0.98 * nbytes
    assert not np.frombuffer(buffer, dtype=np.uint8)[::4096].any()
