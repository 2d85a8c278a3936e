"""The threads of the native optimizer steps, and what the steps refuse."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.errors import OptimizerError  # noqa: E402
from zerosharder.optim import native  # noqa: E402
from zerosharder.optim.native import Hyper, Range, StepPool  # noqa: E402

N = 300_001


def tensors(n: int = N) -> Range:
    generator = torch.Generator().manual_seed(1)
    return Range(
        torch.randn(n, generator=generator),
        torch.randn(n, generator=generator),
        [torch.zeros(n), torch.zeros(n)],
    )


def stepped(pool: StepPool) -> torch.Tensor:
    mine = tensors()
    native.step(pool, "adamw", mine, Hyper(lr=1e-3))
    return mine.weight


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def settled(count: int) -> bool:
    """A joined thread may still be listed for a moment."""
    for _ in range(500):
        if thread_count() == count:
            return True
        time.sleep(0.01)
    return False


def test_threads_end_with_the_pool():
    """Closing, leaving the context and forgetting the pool each end every thread."""
    stepped_once = tensors(10)
    before = thread_count()
    pool = StepPool(4)
    assert thread_count() == before + 3 and pool.threads == 4
    native.step(pool, "adamw", stepped_once, Hyper(lr=1e-3))
    pool.close()
    pool.close()
    assert settled(before)
    with StepPool(3):
        pass
    assert settled(before)
    forgotten = StepPool(3)
    del forgotten
    assert settled(before)


def test_a_closed_pool_says_so():
    """A step on a closed pool raises."""
    pool = StepPool(2)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        stepped(pool)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_number_of_threads_is_bounded(threads):
    """Zero, negative and absurd numbers raise ValueError."""
    with pytest.raises(ValueError, match=str(threads)):
        StepPool(threads)


def test_steps_from_several_threads_take_turns():
    """Four Python threads share a pool, one of them closes it at the end: all get the bits of a lone step."""
    with StepPool(1) as alone:
        expected = stepped(alone)
    pool = StepPool(3)
    results: list[torch.Tensor] = []
    callers = [
        threading.Thread(target=lambda: results.extend(stepped(pool) for _ in range(5))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    pool.close()
    assert len(results) == 20 and all(torch.equal(result, expected) for result in results)


def test_a_forked_child_steps_with_threads_of_its_own():
    """The child of a process with a warm pool gets the same bits and ends by itself; the parent goes on."""
    mine = tensors()
    with StepPool(3) as pool:
        native.step(pool, "adamw", mine, Hyper(lr=1e-3))
        again = tensors()  # made before the fork: torch's own threads do not survive it
        child = os.fork()
        if child == 0:
            status = 1
            try:
                native.step(pool, "adamw", again, Hyper(lr=1e-3))
                status = 0 if bytes(again.weight.numpy()) == bytes(mine.weight.numpy()) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(stepped(pool), mine.weight)


def test_the_interpreter_ends_with_an_open_pool():
    """A script that neither closes nor forgets its pool exits with status 0."""
    import subprocess
    import sys
    from pathlib import Path

    root = Path(native.__file__).resolve().parents[2]
    code = "from zerosharder.optim import native\npool = native.StepPool(4)\nkeep = [pool]; keep.append(keep)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_threads_run_during_a_step():
    """The lock of the interpreter is released: a counting thread moves while a step runs."""
    big = tensors(20_000_000)
    ticks, stop = [], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with StepPool(1) as pool:
            begin = time.perf_counter()
            native.step(pool, "adamw", big, Hyper(lr=1e-3), isa="portable")
            end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(begin < tick < end for tick in ticks) >= 3


@pytest.fixture(scope="module")
def pool():
    with StepPool(2) as threads:
        yield threads


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight": torch.zeros(8, dtype=torch.float64)}, TypeError, "weight must be float32"),
        ({"grad": torch.zeros(8, dtype=torch.int32)}, TypeError, "grad must be float32 or bfloat16"),
        ({"grad": torch.zeros(7)}, ValueError, "grad has 7 elements, weight has 8"),
        ({"grad": torch.zeros(16)[::2]}, TypeError, "contiguous"),
        ({"grad": torch.zeros(2, 4)}, TypeError, "1-D"),
        ({"grad": torch.zeros(8, device="meta")}, TypeError, "CPU"),
        ({"grad": None}, TypeError, "grad must be a tensor"),
        ({"state": [torch.zeros(8)]}, ValueError, "2 state ranges"),
        ({"state": [torch.zeros(8)] * 4}, ValueError, "at most 3"),
        ({"copy": torch.zeros(8)}, TypeError, "bfloat16 or float16"),
    ],
)
def test_wrong_tensors(pool, change, error, text):
    """Type, device, layout and length of every tensor are checked, with the name in the message."""
    with pytest.raises(error, match=text):
        native.step(pool, "adamw", replace(tensors(8), **change), Hyper(lr=1e-3))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"betas": (1.0, 0.9)}, "beta1"),
        ({"betas": (0.9, -0.1)}, "beta2"),
        ({"betas": (0.9, math.nan)}, "beta2"),
        ({"eps": -1e-8}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"weight_decay": math.nan}, "weight_decay"),
    ],
)
def test_wrong_hyperparameters(pool, change, name):
    """Values outside the domain, NaN among them, raise before anything is written."""
    mine = tensors(8)
    before = mine.weight.clone()
    with pytest.raises(ValueError, match=name):
        native.step(pool, "adamw", mine, replace(Hyper(lr=1e-3), **change))
    assert torch.equal(mine.weight, before)


def test_wrong_step_scale_rule_and_isa(pool):
    """Step 0, a NaN scale, unknown rules and variants raise and name what is accepted."""
    for options, text in (
        ({"number": 0}, "step"),
        ({"grad_scale": math.nan}, "grad_scale"),
        ({"isa": "sse9"}, "portable"),
    ):
        with pytest.raises(ValueError, match=text):
            native.step(pool, "adamw", tensors(8), Hyper(lr=1e-3), **options)
    with pytest.raises(ValueError, match="lion"):
        native.step(pool, "muon", tensors(8), Hyper(lr=1e-3))


@pytest.mark.parametrize(
    ("n", "weight", "grad", "text"),
    [
        (-1, 64, 64, "n must be"),
        (2**62, 64, 64, "n must be"),
        (4, 0, 64, "weight is a null pointer"),
        (4, 64, 0, "grad is a null pointer"),
        (4, 66, 64, "weight is not aligned to 4"),
        (4, 64, 66, "grad is not aligned to 4"),
    ],
)
def test_wrong_addresses(n, weight, grad, text):
    """Negative and overflowing sizes, null and misaligned addresses raise ValueError in the extension itself."""
    with pytest.raises(ValueError, match=text):
        _C.StepTensors(n, weight, grad, "float32", [])


def test_empty_ranges_may_have_null_addresses():
    """A shard without elements has no memory, which is no error."""
    _C.StepTensors(0, 0, 0, "float32", [0, 0])


def test_without_the_extension(monkeypatch):
    """The error names the extension and the way out."""
    monkeypatch.setattr(native, "_C", None)
    assert not native.available()
    with pytest.raises(OptimizerError, match=r"_C.*reinstall"):
        StepPool(1)
