"""Host memory for flat buffers: page aligned, on huge pages where it pays, and zero at the start."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

import torch

from zerosharder.errors import ZerosharderError
from zerosharder.observe.log import log
from zerosharder.offload.limits import lock_budget

try:
    from zerosharder import _C
except ImportError:  # no compiler at install time, see `python -m zerosharder doctor`
    _C = None  # type: ignore[assignment]

__all__ = [
    "HUGE_PAGE_BYTES",
    "extension_present",
    "flat_buffer",
    "host_buffer",
    "native",
    "return_free_memory",
    "staging_pool",
]

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_refused_to_lock = False  # said once in a process


def extension_present() -> bool:
    """Return whether the native extension was built and loads."""
    return _C is not None


def native() -> Any:
    """Return the module `zerosharder._C`.

    Raises:
        ZerosharderError: it was not built here; the message says how to get it.
    """
    if _C is None:
        raise ZerosharderError(
            "This needs the native extension zerosharder._C, which was not built here. Install a C++17 compiler and "
            "the Python headers, and reinstall."
        )
    return _C


def host_buffer(nbytes: int, *, populate: bool = False, lock: bool = False) -> torch.Tensor:
    """Return zeroed host memory as a tensor.

    Args:
        nbytes: size in bytes, at least 1.
        populate: touch every page now. Otherwise the first write to a page pays for it.
        lock: lock the pages into RAM, which touches them, too. Where that is refused the memory is pageable, and a
            warning, once in a process, names the limit.

    Returns:
        uint8 tensor [nbytes]. It starts on a 2 MiB boundary and asks for huge pages if it is that long, else
        on a page boundary. The memory lives as long as the tensor's storage, so as long as any view of it.

    Raises:
        ValueError: `nbytes` is not positive.
        OSError: the kernel refused, with its errno and the bytes asked for.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"nbytes must be an int, not {type(nbytes).__name__}")
    if nbytes <= 0:
        raise ValueError(f"nbytes must be at least 1, got {nbytes}")
    if _C is None:
        if lock:
            _report_pageable(nbytes, "the native extension is missing")
        return _mmap_buffer(nbytes, populate=populate or lock)
    buffer = _C.Buffer(nbytes, huge=nbytes >= HUGE_PAGE_BYTES, populate=populate, lock=lock)
    if buffer.lock_error:
        _report_pageable(nbytes, os.strerror(buffer.lock_error))
    # frombuffer makes the storage hold a reference to the buffer object.
    return torch.frombuffer(buffer, dtype=torch.uint8)


def staging_pool(slot_bytes: int, count: int, *, lock: bool = False) -> _C.SlotPool:
    """Return a pool of equal slots for data on its way; one that is empty makes its users wait.

    Args:
        slot_bytes: bytes of one slot, at least 1.
        count: number of slots, at least 1.
        lock: as for `host_buffer`.

    Raises:
        ValueError: a size below 1.
        OSError: the kernel refused the memory.
        ZerosharderError: the native extension is missing.
    """
    pool: _C.SlotPool = native().SlotPool(slot_bytes, count, lock=lock)
    if pool.lock_error:
        _report_pageable(pool.nbytes, os.strerror(pool.lock_error))
    return pool


def flat_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed, page-aligned 1-D buffer of ``numel`` elements (at least one is allocated)."""
    if device.type == "cpu":
        return host_buffer(max(1, numel) * dtype.itemsize).view(dtype)[:numel]
    return torch.zeros(numel, dtype=dtype, device=device)


def return_free_memory() -> None:
    """Gives free heap pages back to the system where the C library can (glibc).

    A model that was just sharded leaves its old parameters as holes in the heap, which would count as used for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _report_pageable(nbytes: int, reason: str) -> None:
    global _refused_to_lock
    if _refused_to_lock:
        return
    _refused_to_lock = True
    budget = lock_budget()
    log.warning(
        "%d bytes of host memory stay pageable, they could not be locked: %s. The limit is %s, which leaves %d bytes; "
        "to raise it: ulimit -l unlimited (or --ulimit memlock=-1 for a container).",
        nbytes,
        reason,
        budget.limit,
        budget.nbytes,
    )


def _mmap_buffer(nbytes: int, *, populate: bool) -> torch.Tensor:
    """Do the same with the standard library: costs up to 2 MiB more of address space, none of memory."""
    huge = nbytes >= HUGE_PAGE_BYTES
    align = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = length + align - mmap.PAGESIZE
    try:
        # Private: shared anonymous memory would obey the huge-page setting of tmpfs instead.
        area = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        code = getattr(error, "errno", None) or errno.ENOMEM
        raise OSError(code, f"mmap of {nbytes} bytes: {error}") from None
    start = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % align
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE, start, length)
        except OSError:
            pass  # a kernel without huge pages: slower, not wrong
    buffer = torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)
    if populate and not _populate(area, start, length, nbytes):
        buffer[:: mmap.PAGESIZE].zero_()
    return buffer


def _populate(area: mmap.mmap, start: int, length: int, nbytes: int) -> bool:
    """Touch all pages through the kernel; False if it does not know how."""
    if sys.platform != "linux":
        return False
    try:
        area.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise OSError(error.errno, f"populating of {nbytes} bytes: {error.strerror}") from None
    return True
