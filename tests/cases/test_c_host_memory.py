"""Group C: host memory, as far as single buffers go."""

from __future__ import annotations

import pytest

from zerosharder.offload.limits import lock_budget
from zerosharder.offload.memory import host_buffer, staging_pool

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

MIB = 1 << 20


def vm_locked() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))


@pytest.mark.parametrize("mib", [1.2, 36, 96])
def test_c1_nothing_is_rounded_up(mib):
    """Five locked buffers: our counter and the kernel say what was asked for, within 5 %."""
    nbytes = int(mib * MIB)
    if lock_budget().nbytes < 5 * 1.05 * nbytes:
        pytest.skip(f"may lock only {lock_budget().nbytes} bytes ({lock_budget().limit})")
    before, counted = vm_locked(), _C.memory_counters()["locked"]
    buffers = [host_buffer(nbytes, lock=True) for _ in range(5)]
    for found in (vm_locked() - before, _C.memory_counters()["locked"] - counted):
        assert 5 * nbytes <= found <= 1.05 * 5 * nbytes
    del buffers
    assert vm_locked() == before and _C.memory_counters()["locked"] == counted


def test_c2_nothing_is_locked_that_was_not_asked_for():
    before = vm_locked()
    buffers = [host_buffer(10 * MIB, populate=populate) for populate in (False, True)]
    pool = staging_pool(MIB, 3)
    assert vm_locked() == before and not pool.locked
    del buffers
