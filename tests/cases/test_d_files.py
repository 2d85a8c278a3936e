"""Group D: files of offloaded state, as far as reads and writes go."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from zerosharder.offload import engines, memory

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(params=engines.BACKENDS)
def kind(request):
    why_not = engines.backends()[request.param]
    if why_not is not None:
        pytest.skip(f"{request.param} does not work here: {why_not}")
    return request.param


def run_child(source: str, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_d1_every_size_at_every_offset(kind, tmp_path, depth, direct):
    """Sizes and offsets that are multiples of nothing come back byte for byte, and the file is exactly as long."""
    edges = [0, 1, 511, 512, 513, 4095, 4097, MIB + 1, 3 * MIB + 7]
    data = np.random.default_rng(0).bytes(edges[-1])
    with _C.Engine(kind, depth=depth, block=MIB) as engine:
        for offset in edges:
            path = tmp_path / str(offset)
            with _C.File(path, write=True, create=True, direct=direct) as file:
                longest = 0
                for nbytes in edges:
                    engine.write(file, offset, data[:nbytes]).wait()
                    longest = max(longest, offset + nbytes if nbytes else 0)
                    assert file.size == longest
                    back = bytearray(nbytes)
                    engine.read(file, offset, back).wait()
                    assert back == data[:nbytes]
            assert path.read_bytes() == bytes(offset) + data
            path.unlink()


def test_d2_a_file_that_was_cut_short(kind, tmp_path):
    """A read names the file, what it expected and what it found; the process goes on."""
    path = tmp_path / "state"
    with _C.Engine(kind) as engine, _C.File(path, write=True, create=True) as file:
        engine.write(file, 0, bytes(3 * MIB)).wait()
        os.truncate(path, 2 * MIB + 100)
        with pytest.raises(OSError, match="the file ends there") as caught:
            engine.read(file, 0, bytearray(3 * MIB)).wait()
        error = caught.value
        assert (error.filename, error.expected, error.done) == (str(path), 3 * MIB, 2 * MIB + 100)
        assert error.offset == 2 * MIB + 100
        engine.write(file, 0, bytes(3 * MIB)).wait()
        assert engine.read(file, 0, bytearray(3 * MIB)).wait() == 3 * MIB


def test_d4_fewer_staging_slots_than_tensors(kind, tmp_path):
    """Twelve tensors through two slots: each waits for its turn, all arrive."""
    tensors = [torch.full((300_000,), float(i)) for i in range(12)]
    nbytes = 1_200_000
    pool = memory.staging_pool(nbytes, 2)
    with engines.open_engine(kind) as engine, _C.File(tmp_path / "state", write=True, create=True) as file:
        flying: list[tuple[object, object]] = []
        for i, tensor in enumerate(tensors):
            if pool.free == 0:
                future, slot = flying.pop(0)
                future.wait()
                slot.release()
            slot = pool.acquire(timeout=60)
            torch.frombuffer(slot, dtype=torch.float32).copy_(tensor)
            flying.append((engine.write(file, i * nbytes, slot), slot))
        for future, _ in flying:
            future.wait()
        for i, tensor in enumerate(tensors):
            back = torch.empty_like(tensor)
            engine.read(file, i * nbytes, engines.bytes_of(back)).wait()
            assert torch.equal(back, tensor)


def test_d5_a_tensor_larger_than_a_slot(kind, tmp_path):
    """8 MiB through slots of 1 MiB, in pieces."""
    tensor = torch.arange(2 * MIB, dtype=torch.float32)
    pool = memory.staging_pool(MIB, 2)
    source, back = engines.bytes_of(tensor), torch.zeros_like(tensor)
    target = engines.bytes_of(back)
    with engines.open_engine(kind) as engine, _C.File(tmp_path / "state", write=True, create=True) as file:
        for begin in range(0, len(source), MIB):
            with pool.acquire(timeout=60) as slot:
                memoryview(slot)[:] = source[begin : begin + MIB]
                engine.write(file, begin, slot).wait()
        for begin in range(0, len(source), MIB):
            with pool.acquire(timeout=60) as slot:
                engine.read(file, begin, slot).wait()
                target[begin : begin + MIB] = memoryview(slot)
    assert torch.equal(back, tensor)


def test_d6_a_full_disk(kind, tmp_path):
    """On a file system of 16 MiB, reserving 64 MiB is an error before anything is written, and so is a write."""
    result = run_child(
        f"""
        import errno, importlib.util, subprocess
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", {str(tmp_path)!r}])
        if done.returncode: print("NO MOUNT"); raise SystemExit
        spec = importlib.util.spec_from_file_location("zerosharder._C", {_C.__file__!r})  # without torch: quicker
        _C = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_C)
        path = {str(tmp_path / "state")!r}
        with _C.Engine({kind!r}) as engine, _C.File(path, write=True, create=True) as file:
            for call in (lambda: file.reserve(64 << 20), lambda: engine.write(file, 0, bytes(64 << 20)).wait()):
                try:
                    call()
                except OSError as error:
                    caught = error
                    print(caught.errno == errno.ENOSPC and path in str(caught))
            print(caught.expected == 64 << 20 and 0 < caught.done <= 16 << 20)
        """,
        *("unshare", "--mount"),
    )
    if result.returncode and "unshare" in result.stderr or "NO MOUNT" in result.stdout:
        pytest.skip("no right to mount a small file system")
    assert result.stdout.split() == ["True"] * 3, result.stderr


def test_d9_a_file_system_without_direct_io(kind):
    """In memory (tmpfs) the page cache is used, the reason can be asked for, and the bytes are right."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm")
    path = folder / f"zerosharder-test-{os.getpid()}"
    data = np.random.default_rng(0).bytes(MIB + 13)
    try:
        with _C.Engine(kind) as engine, _C.File(path, write=True, create=True) as file:
            assert not file.direct and "tmpfs" in file.why_not_direct
            engine.write(file, 77, data).wait()
            back = bytearray(len(data))
            engine.read(file, 77, back).wait()
            assert back == data
    finally:
        path.unlink(missing_ok=True)


SECCOMP = """
    import ctypes, struct
    libc = ctypes.CDLL(None, use_errno=True)
    # BPF: load the number of the system call; if it is io_uring_setup (425), EPERM, else allow.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    filter = Program(len(code), ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(filter), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        print("NO SECCOMP"); raise SystemExit
"""


def test_d13_io_uring_forbidden_as_in_a_container(tmp_path):
    """With the system call forbidden by a seccomp filter, files are written all the same, and the log says why."""
    if engines.backends()["io_uring"] is not None:
        pytest.skip("io_uring does not work here")
    result = run_child(
        SECCOMP
        + f"""
    import logging; logging.basicConfig()
    from zerosharder import _C
    from zerosharder.offload import engines
    for _ in range(2):
        with engines.open_engine() as engine, _C.File({str(tmp_path / "data")!r}, write=True, create=True) as file:
            print(engine.kind, engine.write(file, 0, b"abc").wait())
    """
    )
    if "NO SECCOMP" in result.stdout:
        pytest.skip("this kernel has no seccomp filters")
    assert result.stdout.split() == ["threads", "3"] * 2, result.stderr
    assert result.stderr.count("without io_uring") == 1 and "seccomp" in result.stderr


def test_d13_no_ring_for_want_of_descriptors(tmp_path):
    """The limit is named in the reason."""
    result = run_child(
        """
    import os, resource
    from zerosharder.offload import engines
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    print(engines.backends())
    """
    )
    assert result.returncode == 0, result.stderr
    if "built without liburing" not in result.stdout:
        assert "RLIMIT_NOFILE" in result.stdout and "ulimit -n" in result.stdout
    assert "'threads': None" in result.stdout
