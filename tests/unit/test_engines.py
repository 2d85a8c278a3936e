"""The choice of an I/O engine, and what is said about those that do not work."""

from __future__ import annotations

import errno
import logging
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from zerosharder.cli import bench_io, doctor
from zerosharder.cli.main import main
from zerosharder.errors import ZerosharderError
from zerosharder.offload import engines, memory
from zerosharder.offload.limits import Budget

REPOSITORY = Path(__file__).resolve().parents[2]
needs_extension = pytest.mark.skipif(not memory.extension_present(), reason="the extension is not built here")


class Native:
    """Stands for an extension whose engines fail with given errnos."""

    HAVE_LIBURING = True

    def __init__(self, **failures: int) -> None:
        self._failures = failures

    def Engine(self, kind: str, **options: object) -> object:
        if kind in self._failures:
            raise OSError(self._failures[kind], "the call")
        return memory_engine(kind, **options)


def memory_engine(kind: str, **options: object) -> object:
    class Engine:
        def __init__(self) -> None:
            self.kind = kind

        def close(self) -> None:
            pass

    return Engine()


@pytest.fixture
def fail(monkeypatch):
    def install(**failures: int) -> Native:
        native = Native(**failures)
        monkeypatch.setattr(memory, "_C", native)
        monkeypatch.setattr(engines, "_reported", set())
        return native

    return install


@pytest.mark.parametrize(
    "code, words",
    [
        (errno.EPERM, "seccomp.*io_uring_disabled"),
        (errno.ENOMEM, "RLIMIT_MEMLOCK.*ulimit -l"),
        (errno.EMFILE, "RLIMIT_NOFILE.*ulimit -n"),
        (errno.ENOSYS, "Linux 5.6"),
        (errno.EBADF, "Bad file descriptor"),
    ],
)
def test_falls_through_with_the_reason_once(fail, caplog, code, words):
    fail(io_uring=code)
    with caplog.at_level(logging.WARNING, logger="zerosharder"):
        assert [engines.open_engine().kind for _ in range(3)] == ["threads"] * 3
    assert len(caplog.records) == 1
    assert re.search(f"without io_uring: .*{words}", caplog.text)
    assert engines.backends()["threads"] is None and engines.backends()["io_uring"]


def test_built_without_liburing(fail):
    native = fail(io_uring=errno.ENOSYS)
    native.HAVE_LIBURING = False
    assert "built without liburing; apt-get install liburing-dev" in engines.backends()["io_uring"]


def test_the_first_that_works_is_taken(fail):
    fail()
    assert engines.open_engine().kind == "io_uring"
    assert engines.open_engine("threads").kind == "threads"


def test_what_was_asked_for_by_name_is_not_replaced(fail):
    fail(io_uring=errno.EPERM, threads=errno.EAGAIN)
    with pytest.raises(PermissionError, match="seccomp"):
        engines.open_engine("io_uring")
    for backend in ("threads", "auto"):
        with pytest.raises(OSError, match="ulimit -u"):
            engines.open_engine(backend)
    with pytest.raises(ValueError, match="auto, io_uring or threads, not 'libaio'"):
        engines.open_engine("libaio")


def test_without_the_extension(monkeypatch, capsys):
    monkeypatch.setattr(memory, "_C", None)
    assert all("compiler" in why for why in engines.backends().values())
    for call in (engines.open_engine, lambda: memory.staging_pool(1, 1)):
        with pytest.raises(ZerosharderError, match="native extension"):
            call()
    assert main(["bench", "io"]) == 1
    assert "native extension" in capsys.readouterr().err
    assert main(["doctor"]) == 0
    assert "file I/O      none" in capsys.readouterr().out


def run_child(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)


@needs_extension
def test_no_more_threads(tmp_path):
    """A process that may not start threads gets an error with the limit, not an abort."""
    result = run_child(
        """
    import resource
    from zerosharder.offload import engines
    with open("/proc/self/status") as lines:
        used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)  # less than the stacks need
    try:
        engines.open_engine("threads", depth=64)
    except OSError as error:
        print(error)
    """
    )
    assert result.returncode == 0 and "ulimit -u" in result.stdout, result.stderr


@needs_extension
def test_memory_that_may_not_be_locked(tmp_path):
    """It is pageable and usable, and one warning names the limit."""
    result = run_child(
        """
    import logging, os, resource; logging.basicConfig()
    from zerosharder import _C
    from zerosharder.offload.memory import host_buffer
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.getuid() == 0:
        os.setuid(65534)  # root may lock all the same
    buffers = [host_buffer(1 << 20, lock=True) for _ in range(3)]
    for buffer in buffers:
        buffer.fill_(1)
    print(_C.memory_counters()["locked"])
    small = host_buffer(4096, lock=True)
    print(_C.memory_counters()["locked"])
    """
    )
    assert result.stdout.split() == ["0", "4096"], result.stderr
    assert result.stderr.count("stay pageable") == 1
    assert "RLIMIT_MEMLOCK" in result.stderr and "ulimit -l" in result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_bytes_of(dtype):
    tensor = torch.zeros(3, 5, dtype=dtype)
    view = engines.bytes_of(tensor)
    assert (view.nbytes, view.readonly) == (15 * dtype.itemsize, False)
    view[0] = 1
    assert tensor.view(torch.uint8)[0, 0] == 1
    assert engines.bytes_of(torch.zeros(0, dtype=dtype)).nbytes == 0
    assert engines.bytes_of(torch.zeros(2, dtype=dtype, requires_grad=dtype.is_floating_point)).nbytes
    for bad in (torch.zeros(3, 5, dtype=dtype).t(), torch.zeros(2, device="meta", dtype=dtype)):
        with pytest.raises(ValueError, match="contiguous tensor on the CPU"):
            engines.bytes_of(bad)


@needs_extension
def test_doctor_looks_at_folders(tmp_path, capsys):
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"folder        {tmp_path}: " in text and " free, " in text
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "--folder", str(tmp_path / "absent")]) == 1
    assert f"problem: {tmp_path / 'absent'} cannot hold files" in capsys.readouterr().out


def test_doctor_says_what_a_small_limit_costs(monkeypatch):
    monkeypatch.setattr(doctor, "lock_budget", lambda memory: Budget(8 << 20, "RLIMIT_MEMLOCK"))
    facts = doctor.collect()
    assert [note for note in facts["notes"] if "RLIMIT_MEMLOCK" in note and "ulimit -l unlimited" in note]


@needs_extension
def test_bench_io(tmp_path, capsys):
    """Every contender appears in both directions with its figures, and the file is gone."""
    assert main(["bench", "io", "--dir", str(tmp_path), "--size", "8MiB", "--rounds", "2", "--no-fio"]) == 0
    text = capsys.readouterr().out
    facts = bench_io.measure(tmp_path, 8 << 20, 2, use_fio=False)
    working = [f"zerosharder {name}" for name, why in engines.backends().items() if why is None]
    found = {(row["name"], row["direction"]) for row in facts["results"]}
    assert found == {(name, way) for name in [*working, "plain loop"] for way in ("read", "write")}
    for row in facts["results"]:
        assert row["mb_s"]["min"] <= row["mb_s"]["median"] <= row["mb_s"]["max"] and row["cpu_s_per_gb"] >= 0
        assert row["name"] in text and row["mb_s"]["runs"] == 2 and row["ratio_to_fio"] is None
    assert list(tmp_path.iterdir()) == []


def test_bench_io_refuses_sizes(tmp_path, capsys):
    for size in ("1MiB", "5MiB", "nonsense"):
        assert main(["bench", "io", "--dir", str(tmp_path), "--size", size]) == 1
        assert capsys.readouterr().err.startswith("bench io: ")
