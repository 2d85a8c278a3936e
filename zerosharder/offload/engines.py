"""The I/O engines: which of them work here, why the others do not, and the choice between them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerosharder.errors import ZerosharderError
from zerosharder.observe.log import log
from zerosharder.offload import memory

if TYPE_CHECKING:
    from zerosharder import _C

__all__ = ["BACKENDS", "backends", "bytes_of", "open_engine"]

# In order of preference.
BACKENDS = ("io_uring", "threads")

_URING_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_reported: set[str] = set()  # reasons that were logged already, once in a process


def backends() -> dict[str, str | None]:
    """Return every engine, in order of preference, with None if it works here and else why not and the fix."""
    found: dict[str, str | None] = {}
    for name in BACKENDS:
        try:
            _open(name, 1, 0, None).close()
            found[name] = None
        except (OSError, ZerosharderError) as error:
            found[name] = _reason(name, error)
    return found


def open_engine(
    backend: str = "auto", *, depth: int = 0, block: int = 0, events: _C.EventRing | None = None
) -> _C.Engine:
    """Return an engine for reads and writes.

    Args:
        backend: `io_uring`, `threads`, or `auto` for the first of them that works. What does not work is logged
            once in a process, with the limit that is in the way.
        depth: parts in flight at most (requests of io_uring, threads of the other), 0 for the default.
        block: bytes of a part, a power of two of at least 4096; 0 for the default, 4 MiB.
        events: where finished reads and writes are recorded.

    Raises:
        ValueError: no such backend, or a depth or block that no engine takes.
        OSError: the backend that was asked for does not work; for `auto`, none does.
        ZerosharderError: the native extension is missing.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be auto, {' or '.join(BACKENDS)}, not {backend!r}")
    names = BACKENDS if backend == "auto" else (backend,)
    for name in names[:-1]:
        try:
            return _open(name, depth, block, events)
        except OSError as error:
            reason = _reason(name, error)
            if reason not in _reported:
                _reported.add(reason)
                log.warning("file I/O goes on without %s: %s", name, reason)
    try:
        return _open(names[-1], depth, block, events)
    except OSError as error:
        raise OSError(error.errno, _reason(names[-1], error)) from None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor, for `read` (which fills it) and `write`.

    Raises:
        ValueError: the tensor is on a device or has gaps between its elements.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor on the CPU is needed, not {tensor.shape} on {tensor.device}")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _open(name: str, depth: int, block: int, events: _C.EventRing | None) -> _C.Engine:
    engine: _C.Engine = memory.native().Engine(name, depth=depth, block=block, events=events)
    return engine


def _reason(name: str, error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    text = os.strerror(error.errno)
    if name != "io_uring":
        return f"{text} (RLIMIT_NPROC or a pids cgroup?); raise the limit: ulimit -u"
    if error.errno == errno.ENOSYS and not memory.native().HAVE_LIBURING:
        return (
            "the extension was built without liburing; apt-get install liburing-dev and reinstall zerosharder"
        )
    if error.errno in (errno.EPERM, errno.EACCES):
        try:
            switch = _URING_SWITCH.read_text().strip()
        except OSError:
            switch = "absent"
        return (
            f"{text}: forbidden by the seccomp profile of a container or by kernel.io_uring_disabled (here: "
            f"{switch}); allow io_uring_setup, io_uring_enter and io_uring_register in the profile, or "
            "sysctl kernel.io_uring_disabled=0"
        )
    hints = {
        errno.ENOSYS: "this kernel has no io_uring or an old one; Linux 5.6 or newer is needed",
        errno.ENOMEM: "RLIMIT_MEMLOCK or the memory cgroup is too small; ulimit -l unlimited",
        errno.EMFILE: "RLIMIT_NOFILE is reached; ulimit -n 65536",
        errno.ENFILE: "fs.file-max is reached; sysctl fs.file-max=1000000",
    }
    return f"{text}: {hints.get(error.errno, str(error))}"
