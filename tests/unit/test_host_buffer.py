"""Host buffers look the same from outside, with the extension and without it."""

from __future__ import annotations

import errno
import gc
import mmap

import psutil
import pytest
import torch

from zerosharder.offload import memory
from zerosharder.offload.memory import HUGE_PAGE_BYTES, host_buffer


@pytest.fixture(params=["extension", "mmap"])
def path(request, monkeypatch):
    if request.param == "mmap":
        monkeypatch.setattr(memory, "_C", None)
    elif not memory.extension_present():
        pytest.skip("the extension is not built here")
    return request.param


# Around a page and around a huge page, where alignment and rounding can go wrong; and an odd one.
SIZES = [
    1,
    4095,
    4096,
    4097,
    HUGE_PAGE_BYTES - 1,
    HUGE_PAGE_BYTES,
    HUGE_PAGE_BYTES + 1,
    3 * HUGE_PAGE_BYTES + 12345,
]


@pytest.mark.parametrize("populate", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_shape_alignment_and_zeros(path, nbytes, populate):
    buffer = host_buffer(nbytes, populate=populate)
    assert buffer.shape == (nbytes,) and buffer.dtype == torch.uint8 and buffer.device.type == "cpu"
    assert buffer.untyped_storage().nbytes() == nbytes
    assert buffer.data_ptr() % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE) == 0
    assert not buffer.any()
    buffer.fill_(255)
    assert buffer[0] == 255 and buffer[-1] == 255


def test_views_keep_the_memory(path):
    view = host_buffer(4 * HUGE_PAGE_BYTES).view(torch.float32)[-10:]
    view.fill_(2.5)
    gc.collect()
    others = [
        host_buffer(4 * HUGE_PAGE_BYTES, populate=True) for _ in range(4)
    ]  # would land in a freed mapping
    assert view.tolist() == [2.5] * 10
    del others


def test_memory_is_given_back_with_the_last_view(path):
    nbytes = 64 * HUGE_PAGE_BYTES
    process = psutil.Process()
    host_buffer(nbytes, populate=True)  # whatever the first use allocates
    before = process.memory_info().rss
    buffer = host_buffer(nbytes, populate=True)
    held = process.memory_info().rss - before
    view = buffer[:10]
    del buffer
    assert process.memory_info().rss - before > nbytes // 2
    del view
    left = process.memory_info().rss - before
    assert held > 0.9 * nbytes and left < 0.1 * nbytes


def test_populating_touches_and_nothing_else_does(path):
    nbytes = 32 * HUGE_PAGE_BYTES
    process = psutil.Process()
    before = process.memory_info().rss
    lazy = host_buffer(nbytes)
    assert process.memory_info().rss - before < 0.1 * nbytes
    del lazy


def test_populating_without_help_of_the_kernel(monkeypatch):
    monkeypatch.setattr(memory, "_C", None)
    monkeypatch.setattr(memory, "_populate", lambda *args: False)
    nbytes = 32 * HUGE_PAGE_BYTES
    before = psutil.Process().memory_info().rss
    buffer = host_buffer(nbytes, populate=True)
    assert psutil.Process().memory_info().rss - before > 0.9 * nbytes
    assert not buffer[::4096].any()


@pytest.mark.parametrize("nbytes", [0, -1, -(2**70)])
def test_sizes_that_are_no_sizes(path, nbytes):
    with pytest.raises(ValueError, match=f"at least 1, got {nbytes}"):
        host_buffer(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, "1", None, True])
def test_types_that_are_no_sizes(path, nbytes):
    with pytest.raises(TypeError, match="must be an int"):
        host_buffer(nbytes)


@pytest.mark.parametrize("nbytes", [2**50, 2**62, 2**63 - 1, 2**64, 2**80])
def test_sizes_that_no_machine_has(path, nbytes):
    with pytest.raises(OSError, match=str(nbytes)) as caught:
        host_buffer(nbytes)
    assert caught.value.errno == errno.ENOMEM
