"""Groups D and S: optimizer steps on the CPU keep to their threads and to the dtypes they were given."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.optim import native  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_s1_a_rank_uses_its_share_of_the_cores(ranks):
    """S1: a pool of cores / ranks threads starts that many and no more, during steps too, and leaves none."""
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    n = 500_000
    torch.randn(1)
    before = len(os.listdir("/proc/self/task"))
    with native.StepPool(share) as pool:
        tensors = native.Range(torch.ones(n), torch.ones(n), [torch.zeros(n), torch.zeros(n)])
        created = len(os.listdir("/proc/self/task"))
        for number in (1, 2):
            native.step(pool, "adamw", tensors, native.Hyper(lr=1e-3), number=number)
        assert len(os.listdir("/proc/self/task")) <= created
    assert pool.threads == share and created - before <= share - 1 + torch.get_num_threads()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d16_the_weights_stay_float32(dtype):
    """D16: float32 masters move by less than the 16-bit gradient and copy could show."""
    n = 10_000
    copy = torch.zeros(n, dtype=dtype)
    tensors = native.Range(torch.ones(n), torch.ones(n, dtype=dtype), [torch.zeros(n), torch.zeros(n)], copy)
    with native.StepPool(2) as pool:
        native.step(pool, "adamw", tensors, native.Hyper(lr=1e-5))
        assert tensors.weight.dtype == torch.float32
        assert torch.equal(tensors.weight, torch.full((n,), 1 - 1e-5)) and torch.equal(
            copy, torch.ones(n, dtype=dtype)
        )
