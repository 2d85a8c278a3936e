"""`zerosharder._C.Engine` and `File`: both engines, with and without O_DIRECT, with and without disturbances."""

from __future__ import annotations

import errno
import gc
import os
import threading

import numpy as np
import pytest

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.offload import engines  # noqa: E402

MIB = 1 << 20


@pytest.fixture(params=engines.BACKENDS)
def kind(request):
    why_not = engines.backends()[request.param]
    if why_not is not None:
        pytest.skip(f"{request.param} does not work here: {why_not}")
    return request.param


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request, tmp_path):
    with _C.File(tmp_path / "data", write=True, create=True, direct=request.param) as opened:
        if request.param and not opened.direct:
            pytest.skip(f"no O_DIRECT in {tmp_path}: {opened.why_not_direct}")
        yield opened


def content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_a_wrong_kind_depth_or_block():
    with pytest.raises(ValueError, match="io_uring or threads, not libaio"):
        _C.Engine("libaio")
    for block in (1, 4095, 5000, 2**31):
        with pytest.raises(ValueError, match=f"power of two.*{block}"):
            _C.Engine("threads", block=block)
    with pytest.raises(ValueError, match="at most 256 threads, not 257"):
        _C.Engine("threads", depth=257)


def test_too_many_requests():
    if engines.backends()["io_uring"] is not None:
        pytest.skip("io_uring does not work here")
    with pytest.raises(ValueError, match="at most 1024 requests, not 1025"):
        _C.Engine("io_uring", depth=1025)


@pytest.mark.parametrize("block", [4096, 64 << 10, 0])
@pytest.mark.parametrize("misaligned", [0, 1])
def test_round_trip_through_several_blocks(kind, file, block, misaligned):
    """What is written is read back, also from memory no device could reach directly; the length is exact."""
    nbytes, offset = 5 * MIB // 4 + 13, 4096 + 5
    data = content(nbytes)
    memory = memoryview(_C.Buffer(nbytes + 1))[misaligned : misaligned + nbytes]
    memory[:] = data
    with _C.Engine(kind, block=block) as engine:
        assert engine.write(file, offset, memory).wait() == nbytes
        assert file.size == offset + nbytes
        memory[:] = bytes(nbytes)
        assert engine.read(file, offset, memory).wait() == nbytes
        assert memory == data
    with open(file.path, "rb") as plain:
        assert plain.read() == bytes(offset) + data


def test_readers_outside_see_what_was_written_and_writers_outside_are_seen(kind, file):
    """The page cache of others and the direct transfers agree, in both directions."""
    data = content(3 * MIB + 100)
    with _C.Engine(kind, block=MIB) as engine, open(file.path, "r+b", buffering=0) as plain:
        engine.write(file, 0, data).wait()
        assert plain.read() == data
        plain.seek(MIB - 7)
        plain.write(b"from outside")
        expected = bytearray(data)
        expected[MIB - 7 : MIB + 5] = b"from outside"
        back = bytearray(len(data))
        engine.read(file, 0, back).wait()
        assert back == expected
        engine.write(file, MIB - 8, b"from inside!!!").wait()
        plain.seek(MIB - 8)
        assert plain.read(14) == b"from inside!!!"


def test_neighbours_in_one_page_do_not_disturb_each_other(kind, file):
    """Requests that meet in the middle of a page, all in flight at once."""
    data = content(300_000)
    cuts = [0, 1, 4095, 4096, 10_000, 10_001, 150_000, 150_003, 299_999, 300_000]
    with _C.Engine(kind, block=16384) as engine:
        pieces = [(begin, data[begin:end]) for begin, end in zip(cuts, cuts[1:], strict=False)]
        for future in [engine.write(file, begin, piece) for begin, piece in pieces]:
            future.wait()
        back = [(bytearray(len(piece)), begin, piece) for begin, piece in pieces]
        for future in [engine.read(file, begin, buffer) for buffer, begin, _ in back]:
            future.wait()
        assert all(buffer == piece for buffer, _, piece in back)


def test_nothing_at_all(kind, file):
    """A request of no bytes succeeds anywhere and does not make the file longer."""
    with _C.Engine(kind) as engine:
        assert engine.write(file, 10**12, b"").wait() == 0
        assert engine.read(file, 10**12, bytearray()).wait() == 0
        assert file.size == 0


def test_many_at_once(kind, file):
    """More requests than fit the engine; each lands where it belongs."""
    with _C.Engine(kind, depth=2, block=4096) as engine:
        pieces = [content(5000, seed) for seed in range(200)]
        for future in [engine.write(file, 5000 * i, piece) for i, piece in enumerate(pieces)]:
            future.wait()
        buffers = [bytearray(5000) for _ in pieces]
        futures = [engine.read(file, 5000 * i, buffer) for i, buffer in enumerate(buffers)]
        assert sum(future.wait() for future in reversed(futures)) == 200 * 5000
        assert buffers == pieces


@pytest.mark.parametrize("seed", range(3))
def test_short_transfers_go_on_and_refusals_are_tried_again(kind, file, seed):
    data = content(MIB + 777, seed)
    faults = _C.RandomFaults(seed, again=0.3, cut=0.5)
    with _C.Engine(kind, block=16384, faults=faults) as engine:
        assert engine.write(file, 3, data).wait() == len(data)
        back = bytearray(len(data))
        assert engine.read(file, 3, back).wait() == len(data)
    assert back == data and file.size == 3 + len(data)


def test_an_error_names_everything(kind, file):
    """errno, its text, path, offset, bytes expected and bytes done, as text and as attributes."""
    with _C.Engine(kind, block=4096) as engine:
        engine.write(file, 0, bytes(40960)).wait()
    with _C.Engine(kind, depth=1, block=4096, faults=_C.RandomFaults(error=1.0, after=3)) as engine:
        future = engine.read(file, 4096, bytearray(36864))
        with pytest.raises(OSError, match="Input/output error") as caught:
            future.wait()
        error = caught.value
        assert (error.errno, error.filename, error.offset) == (errno.EIO, file.path, 4 * 4096)
        assert (error.expected, error.done) == (36864, 3 * 4096)
        for part in (
            "read of 36864 bytes at offset 4096",
            "stopped at offset 16384",
            "12288 bytes done",
            file.path,
        ):
            assert part in str(error)
        assert future.done() and future.done_bytes == 3 * 4096
        with pytest.raises(OSError, match="Input/output error"):
            future.result()  # as often as one asks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPERM, errno.EINVAL])
def test_the_errno_is_kept(kind, tmp_path, code):
    with _C.File(tmp_path / "data", write=True, create=True, direct=False) as file:
        with _C.Engine(kind, faults=_C.RandomFaults(error=1.0, code=code)) as engine:
            with pytest.raises(OSError) as caught:
                engine.write(file, 0, b"x").wait()
            assert caught.value.errno == code and isinstance(caught.value, type(OSError(code, "")))


def test_a_file_system_that_takes_direct_descriptors_and_refuses_transfers(kind, tmp_path):
    """EINVAL for an aligned transfer makes the file go through the page cache from then on, with the reason."""
    with _C.File(tmp_path / "data", write=True, create=True) as file:
        if not file.direct:
            pytest.skip(f"no O_DIRECT in {tmp_path}: {file.why_not_direct}")
        data = content(64 << 10)
        with _C.Engine(kind, faults=_C.RandomFaults(error=1.0, code=errno.EINVAL)) as engine:
            with pytest.raises(OSError, match="Invalid argument"):  # the page cache "refuses" it, too
                engine.write(file, 0, data).wait()
        assert not file.direct and "EINVAL" in file.why_not_direct
        with _C.Engine(kind) as engine:
            engine.write(file, 0, data).wait()
            back = bytearray(len(data))
            engine.read(file, 0, back).wait()
            assert back == data


def test_endless_refusal_ends(kind, file):
    """EAGAIN for ever is an error at the deadline, not a hang."""
    with _C.Engine(kind, faults=_C.RandomFaults(error=1.0, code=errno.EAGAIN)) as engine:
        with pytest.raises(TimeoutError):
            engine.write(file, 0, b"x", timeout=0.05).wait()


def test_a_read_beyond_the_end(kind, file):
    """Says where the file ends instead of handing out what was in the buffer."""
    with _C.Engine(kind, block=4096) as engine:
        engine.write(file, 0, bytes(10_000)).wait()
        for offset, nbytes in ((9_000, 1_001), (0, 16384), (10_000, 1), (10**9, 4096)):
            with pytest.raises(OSError, match="the file ends there") as caught:
                engine.read(file, offset, bytearray(nbytes)).wait()
            assert caught.value.errno == errno.ENODATA
            assert caught.value.expected == nbytes and caught.value.done <= max(0, 10_000 - offset)


def test_deadline(kind, file):
    """A stuck request is an error when its time is over, and its buffer is free again."""
    with _C.Engine(kind, faults=_C.RandomFaults(delay=3600)) as engine:
        futures = [
            engine.write(file, 0, bytearray(100), timeout=0.05) for _ in range(40)
        ]  # most in the queue
        for future in futures:
            with pytest.raises(TimeoutError) as caught:
                future.wait()
            assert caught.value.errno == errno.ETIMEDOUT and caught.value.done == 0
            assert future.done()


def test_waiting_with_a_timeout_leaves_the_request_alone(kind, file):
    with _C.Engine(kind, faults=_C.RandomFaults(delay=3600)) as engine:
        future = engine.write(file, 0, b"abc")
        with pytest.raises(TimeoutError, match="it goes on"):
            future.wait(timeout=0.01)
        assert not future.done()
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match="must not be negative"):
                future.wait(timeout)
        assert future.cancel() is True


def test_cancel(kind, file):
    """Afterwards the buffer is the caller's and nothing was written; cancelling what is over changes nothing."""
    with _C.Engine(kind, depth=1, faults=_C.RandomFaults(delay=3600)) as engine:
        buffer = bytearray(100)
        running, queued = engine.write(file, 0, buffer), engine.write(file, 0, buffer)
        for future in (queued, running):
            assert future.cancel() is True and future.done()
            with pytest.raises(OSError) as caught:
                future.wait()
            assert caught.value.errno == errno.ECANCELED
        buffer.append(1)  # BufferError while somebody holds it
        assert file.size == 0
    with _C.Engine(kind) as engine:
        future = engine.write(file, 0, b"abc")
        future.wait()
        assert future.cancel() is False and future.wait() == 3


def test_cancelling_what_the_kernel_has(kind, file):
    """Whatever had been done when it was cancelled: no part is in flight afterwards, the engine works on."""
    data = content(8 * MIB)
    with _C.Engine(kind, block=64 << 10) as engine:
        for _ in range(20):
            buffer = bytearray(data)
            future = engine.write(file, 0, buffer)
            future.cancel()
            buffer.extend(b"x")  # nobody holds it
        engine.write(file, 0, data).wait()
        back = bytearray(len(data))
        engine.read(file, 0, back).wait()
        assert back == data


def test_a_future_that_is_dropped_is_cancelled(kind, file):
    with _C.Engine(kind, faults=_C.RandomFaults(delay=3600)) as engine:
        buffer = bytearray(100)
        future = engine.read(file, 0, buffer)
        with pytest.raises(BufferError):
            buffer.append(1)
        del future
        buffer.append(1)


def test_closing_with_work_in_flight(kind, file):
    """Ends threads and descriptors, frees the buffers, and says so to those who wait and those who come."""
    threads, descriptors = own()
    buffers = [bytearray(100_000) for _ in range(50)]
    engine = _C.Engine(kind, depth=2, block=4096, faults=_C.RandomFaults(delay=0.001))
    futures = [engine.write(file, 0, buffer) for buffer in buffers]
    engine.close()
    engine.close()
    for future, buffer in zip(futures, buffers, strict=True):
        assert future.done()
        try:
            future.wait()
        except OSError as error:
            assert error.errno == errno.ECANCELED
        buffer.append(1)
    with pytest.raises(OSError, match="the I/O engine is closed") as caught:
        engine.read(file, 0, bytearray(1))
    assert caught.value.errno == errno.ESHUTDOWN
    del engine
    now = own()
    assert now[0] <= threads and now[1] <= descriptors


def own() -> tuple[set[str], set[str]]:
    """Threads and descriptors of this process, without those of objects nobody uses any more."""
    gc.collect()
    return set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))


def test_engines_leave_nothing_behind(kind, file):
    threads, descriptors = own()
    for _ in range(20):
        engine = _C.Engine(kind)
        engine.write(file, 0, bytes(5000)).wait()
        del engine
    now = own()
    assert now[0] <= threads and now[1] <= descriptors


def test_a_file_closed_during_a_transfer_stays_until_its_end(kind, tmp_path):
    file = _C.File(tmp_path / "data", write=True, create=True)
    with _C.Engine(kind, faults=_C.RandomFaults(delay=0.1)) as engine:
        future = engine.write(file, 0, b"abc")
        file.close()
        with pytest.raises(ValueError, match="closed"):
            engine.write(file, 0, b"abc")
        assert future.wait() == 3
    assert (tmp_path / "data").read_bytes() == b"abc"
    del future
    assert not [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == str(tmp_path / "data")]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_reading_only(kind, tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    with _C.File(tmp_path / "data") as file, _C.Engine(kind) as engine:
        back = bytearray(3)
        engine.read(file, 0, back).wait()
        assert back == b"abc"
        with pytest.raises(OSError, match="open for reading only") as caught:
            engine.write(file, 0, b"x")
        assert caught.value.errno == errno.EBADF and caught.value.filename == str(tmp_path / "data")
        with pytest.raises(BufferError):
            engine.read(file, 0, b"cannot be written to")


@pytest.mark.parametrize("offset", [2**63 - 2, 2**63, 2**64 - 1])
def test_offsets_that_no_file_has(kind, file, offset):
    with _C.Engine(kind) as engine:
        with pytest.raises(ValueError, match="exceed"):
            engine.write(file, offset, b"abc")
        with pytest.raises(TypeError):
            engine.write(file, -1, b"abc")


def test_registered_memory(kind, file):
    """The same bytes arrive; the engine keeps the memory until it is withdrawn."""
    buffer = _C.Buffer(3 * MIB)
    data = content(3 * MIB)
    with _C.Engine(kind, block=MIB) as engine:
        refusal = engine.register_memory(buffer)
        assert refusal == (0 if kind == "io_uring" else errno.ENOTSUP)
        if refusal == 0:
            assert engine.register_memory(buffer) == errno.EEXIST
        memoryview(buffer)[:] = data
        engine.write(file, 0, buffer).wait()
        memoryview(buffer)[:] = bytes(3 * MIB)
        engine.read(file, 0, buffer).wait()
        assert memoryview(buffer) == data
        # A part of it, and a stretch of other memory.
        engine.read(file, 4096, memoryview(buffer)[8192 : 8192 + MIB]).wait()
        assert memoryview(buffer)[8192 : 8192 + MIB] == data[4096 : 4096 + MIB]
        engine.withdraw_memory(buffer)
        engine.write(file, 0, buffer).wait()


def test_each_transfer_is_an_event(kind, file):
    ring = _C.EventRing(16)
    with _C.Engine(kind, events=ring, block=4096) as engine:
        engine.write(file, 0, bytes(10_000), unit=7).wait()
        engine.read(file, 0, bytearray(10_000), unit=8).wait()
        with pytest.raises(OSError):
            engine.read(file, 9_000, bytearray(2_000), unit=9).wait()
    events = ring.drain()
    assert [event[:2] for event in events] == [("write", 7), ("read", 8), ("read", 9)]
    assert [event[2] for event in events[:2]] == [10_000, 10_000] and events[2][2] == 1_000
    assert all(begin < end for *_, begin, end, _ in events)
    assert all(event[5] != threading.get_native_id() for event in events)


def test_a_forked_child_is_told(kind, file):
    """The threads of an engine are the parent's: the child gets an error instead of waiting for ever."""
    engine = _C.Engine(kind)
    engine.write(file, 0, b"abc").wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.read(file, 0, bytearray(3))
        except OSError as error:
            status = 0 if error.errno == errno.ECHILD else 2
        engine.close()  # must not wait for the parent's threads
        del engine
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = bytearray(3)
    engine.read(file, 0, back).wait()  # and the parent's engine is none the worse
    assert back == b"abc"


def test_reserve(tmp_path):
    with _C.File(tmp_path / "data", write=True, create=True) as file:
        reserved = file.reserve(MIB + 5)
        assert file.size == MIB + 5
        assert os.stat(file.path).st_mode & 0o777 == 0o600
        if reserved:
            assert os.stat(file.path).st_blocks * 512 >= MIB
        with pytest.raises(OSError) as caught:
            file.reserve(2**62)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and str(file.path) in str(caught.value)
        file.sync()


def test_paths_that_cannot_be_opened(tmp_path):
    for path, code in ((tmp_path / "absent", errno.ENOENT), (tmp_path, errno.EISDIR)):
        with pytest.raises(OSError, match=path.name) as caught:
            _C.File(path)
        assert caught.value.errno == code
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="positioned I/O") as caught:
        _C.File(tmp_path / "pipe", write=True)
    assert caught.value.errno == errno.ESPIPE
    with pytest.raises(ValueError, match="null"):
        _C.File("a\0b")
