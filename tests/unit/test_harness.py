"""The harness reports what goes wrong in a rank, and the next test is not the victim."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import distributed, in_fresh_process, pool, processes, run_distributed
from harness.report import DistributedFailure

# -- bodies that misbehave, called through run_distributed --


def _rank_one_raises() -> None:
    if dist.get_rank() == 1:
        expected, found = 3, 4
        assert expected == found
    dist.barrier()


def _every_rank_raises() -> None:
    raise RuntimeError(f"raised on {dist.get_rank()}")


def _rank_one_never_joins() -> None:
    print(f"here is {dist.get_rank()}")
    if dist.get_rank() == 1:
        _sleep_forever()
    dist.all_reduce(torch.ones(1))


def _sleep_forever() -> None:
    while True:
        time.sleep(60)


def _rank_one_skips() -> None:
    if dist.get_rank() == 1:
        pytest.skip("rank 1 has no such thing")


def _rank_one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leaves_a_collective_behind() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 100), async_op=True)


def _destroys_the_group() -> None:
    dist.destroy_process_group()


def _rank() -> int:
    dist.barrier()
    return dist.get_rank()


def _pid_after_change() -> int:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["ZEROSHARDER_LOG"] = "debug"
    os.environ["PATH"] = "/nowhere"
    os.chdir("/")
    torch.rand(3), random.random()
    return os.getpid()


def _state() -> tuple[object, ...]:
    settings = [name for name in os.environ if name.startswith("ZEROSHARDER_")]
    flags = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    numbers = (torch.rand(1).item(), random.random())
    return (os.getpid(), *flags, settings, os.environ["PATH"], os.getcwd(), *numbers)


def _setting() -> str | None:
    return os.environ.get("ZEROSHARDER_PREFETCH")


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_SECONDS", 1.0)


# -- tests --


@distributed(world=2)
def test_runs_on_every_rank_in_one_group() -> None:
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]))
    assert [int(r) for r in ranks] == [0, 1]
    assert os.environ["RANK"] == str(dist.get_rank()) and os.environ["WORLD_SIZE"] == "2"
    assert dist.get_backend() == "gloo" and torch.get_num_threads() == 1


@distributed(world=(1, 2))
@pytest.mark.parametrize("value", [torch.float32, (1, "a")], ids=str)
def test_forwards_parameters_and_fixtures(world: int, value: object, tmp_path: Path) -> None:
    assert dist.get_world_size() == world
    assert value in (torch.float32, (1, "a"))
    assert tmp_path.is_dir()


@pytest.mark.parametrize("value", [1])
@distributed(world=2)
def test_takes_marks_from_outside(world: int, value: int) -> None:
    assert (world, value) == (2, 1)


class TestMethod:
    @distributed(world=2)
    def test_method(self) -> None:
        assert isinstance(self, TestMethod) and dist.get_world_size() == 2


def test_skip_is_forwarded() -> None:
    with pytest.raises(pytest.skip.Exception, match="rank 1 has no such thing"):
        run_distributed(_rank_one_skips, 2)


@distributed(world=2, env={"ZEROSHARDER_PREFETCH": "0"})
def test_sets_variables() -> None:
    assert os.environ["ZEROSHARDER_PREFETCH"] == "0"


@distributed(world=2, expect_pool_loss=True)
def test_may_lose_a_rank_on_purpose() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()


def test_returns_what_each_rank_returned() -> None:
    assert run_distributed(_rank, 2) == [0, 1]


def test_variables_do_not_stay() -> None:
    assert run_distributed(_setting, 2, env={"ZEROSHARDER_PREFETCH": "0"}) == ["0", "0"]
    assert run_distributed(_setting, 2) == [None, None]


def test_every_call_starts_from_the_same_state() -> None:
    first = run_distributed(_state, 2)
    pids = run_distributed(_pid_after_change, 2)
    assert [state[0] for state in first] == pids, "the pool is shared"
    assert run_distributed(_state, 2) == first


def test_failing_rank_is_reported_with_its_traceback(short_grace: None) -> None:
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(_rank_one_raises, 2)
    report = str(caught.value)
    assert "test_harness.py::_rank_one_raises on 2 ranks: rank 1 failed" in report
    assert "assert expected == found" in report and "assert 3 == 4" in report
    assert "rank 0 was still running; its stacks" in report and "barrier" in report
    assert "worker.py" not in report.split("-- rank 1 failed")[1], "the traceback begins in the test"
    assert run_distributed(_rank, 2) == [0, 1]


def test_all_failing_ranks_are_reported() -> None:
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(_every_rank_raises, 2)
    report = str(caught.value)
    assert "rank 0, 1 failed" in report and "raised on 0" in report and "raised on 1" in report


def test_hang_shows_the_stacks_of_all_ranks() -> None:
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(_rank_one_never_joins, 2, timeout=3)
    report = str(caught.value)
    assert "rank 0, 1 had not finished after" in report
    assert "in all_reduce" in report, "where rank 0 is"
    assert "in _sleep_forever" in report, "where rank 1 is"
    assert "here is 0" in report and "here is 1" in report, "what they printed"
    assert run_distributed(_rank, 2) == [0, 1]


def test_killed_rank_is_reported(short_grace: None) -> None:
    with pytest.raises(DistributedFailure, match=r"rank 1 died: signal 9 \(SIGKILL\)"):
        run_distributed(_rank_one_is_killed, 2)
    assert run_distributed(_rank, 2) == [0, 1]


def test_half_a_collective_is_found(short_grace: None) -> None:
    with pytest.raises(DistributedFailure, match="clean-up after .*_leaves_a_collective_behind"):
        run_distributed(_leaves_a_collective_behind, 2)
    assert run_distributed(_rank, 2) == [0, 1]


def test_lost_group_is_found(short_grace: None) -> None:
    with pytest.raises(DistributedFailure, match="default process group is gone"):
        run_distributed(_destroys_the_group, 2)
    assert run_distributed(_rank, 2) == [0, 1]


def test_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="'value' cannot be sent"):
        run_distributed(_rank, 2, {"value": lambda: None})


def test_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="local function"):

        @distributed(world=2)
        def test_local() -> None: ...


def test_few_pools_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Pool:
        worn = False

        def __init__(self, world: int) -> None:
            self.world = world

        def close(self) -> None:
            closed.append(self.world)

    monkeypatch.setattr(pool, "_pools", {})
    monkeypatch.setattr(pool, "Pool", Pool)
    for world in (1, 2, 4, 4, 2, 5, 3):
        pool.pool_of(world)
    assert closed == [4, 1], "4 for 5, the other large one; 1 for 3, as the longest unused"
    pool.pool_of(2).worn = True  # left too much behind
    pool.pool_of(2)
    assert closed == [4, 1, 2] and list(pool._pools) == [5, 3, 2]


def test_fresh_process_is_alone() -> None:
    source = """
        import os, sys
        print(sorted(n for n in os.environ if n in ("RANK", "WORLD_SIZE") or n.startswith("ZEROSHARDER_")))
        import harness
        sys.exit(3)
    """
    done = in_fresh_process(source, env={"ZEROSHARDER_LOG": "info"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "['ZEROSHARDER_LOG']\n", "")


def test_fresh_process_under_torchrun() -> None:
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"{int(total)} ranks\\n", end="")
        dist.destroy_process_group()
    """
    done = in_fresh_process(source, nproc=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks") == 2


_HANGS = """
    import time
    def stuck_here():
        print("before", flush=True)
        while True:
            time.sleep(60)
    stuck_here()
"""


def test_fresh_process_that_hangs_is_ended() -> None:
    with pytest.raises(DistributedFailure) as caught:
        in_fresh_process(_HANGS, timeout=2)
    report = str(caught.value)
    assert "had not finished after" in report and "before" in report and "in stuck_here" in report


def test_torchrun_that_hangs_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_root", tmp_path)
    with pytest.raises(DistributedFailure, match="had not finished after"):
        in_fresh_process(_HANGS, nproc=2, timeout=6)
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [c for c in commands if any(str(tmp_path) in word for word in c)]
