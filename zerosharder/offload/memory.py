"""Host memory for flat buffers: page aligned, on huge pages where it pays, and zero at the start."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys

import torch

try:
    from zerosharder import _C
except ImportError:  # no compiler at install time, see `python -m zerosharder doctor`
    _C = None  # type: ignore[assignment]

__all__ = ["HUGE_PAGE_BYTES", "extension_present", "flat_buffer", "host_buffer", "return_free_memory"]

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it


def extension_present() -> bool:
    """Return whether the native extension was built and loads."""
    return _C is not None


def host_buffer(nbytes: int, *, populate: bool = False) -> torch.Tensor:
    """Return zeroed host memory as a tensor.

    Args:
        nbytes: size in bytes, at least 1.
        populate: touch every page now. Otherwise the first write to a page pays for it.

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
        return _mmap_buffer(nbytes, populate=populate)
    buffer = _C.Buffer(nbytes, huge=nbytes >= HUGE_PAGE_BYTES, populate=populate)
    # frombuffer makes the storage hold a reference to the buffer object.
    return torch.frombuffer(buffer, dtype=torch.uint8)


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
