"""What host memory may be taken and locked: the smallest of all limits."""

from __future__ import annotations

import resource

import psutil
import pytest

from zerosharder.offload.limits import Budget, cgroup_memory_limit, lock_budget, memory_budget


def test_cgroup_limit_is_the_smallest_on_the_way_up(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    inner = tmp_path / "v2" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    assert cgroup_memory_limit(tmp_path / "v2", membership) is None
    (inner.parent / "memory.max").write_text("1000\n")
    assert cgroup_memory_limit(tmp_path / "v2", membership) == 1000
    (inner / "memory.max").write_text("2000\n")
    assert cgroup_memory_limit(tmp_path / "v2", membership) == 1000


def test_cgroup_limit_of_the_first_version_and_in_a_container(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/the/path/on/the/host\n")
    mount = tmp_path / "v1" / "memory"
    mount.mkdir(parents=True)
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_memory_limit(tmp_path / "v1", membership) is None
    (mount / "memory.limit_in_bytes").write_text("4096\n")
    assert cgroup_memory_limit(tmp_path / "v1", membership) == 4096
    assert cgroup_memory_limit(tmp_path / "v1", tmp_path / "absent") is None


@pytest.fixture
def version_2(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job\n")
    group = tmp_path / "v2" / "job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{64 << 20}\n")
    (group / "memory.current").write_text(f"{24 << 20}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {4 << 20}\n")
    return tmp_path / "v2", membership


def test_the_budget_is_what_the_cgroup_leaves(version_2):
    """Cache that the kernel drops first counts as free."""
    budget = memory_budget(*version_2)
    assert budget.nbytes == (64 - 24 + 4) << 20
    assert "cgroup" in budget.limit and budget.limit.endswith("/job")


def test_the_budget_of_the_first_version(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/job\n")
    group = tmp_path / "v1" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{64 << 20}\n")
    (group / "memory.usage_in_bytes").write_text(f"{70 << 20}\n")
    (group / "memory.stat").write_text(f"inactive_file 9\ntotal_inactive_file {1 << 20}\n")
    assert (
        memory_budget(tmp_path / "v1", membership).nbytes == 0
    )  # more than allowed is used: nothing is left
    (group / "memory.usage_in_bytes").write_text(f"{60 << 20}\n")
    assert memory_budget(tmp_path / "v1", membership).nbytes == 5 << 20


def test_without_a_cgroup_ram_is_the_limit(tmp_path):
    budget = memory_budget(tmp_path, tmp_path / "absent")
    assert budget.limit == "available RAM"
    assert 0 < budget.nbytes <= psutil.virtual_memory().total


@pytest.fixture
def limit_of_8_mib(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))


def test_locking_is_limited_by_the_process(limit_of_8_mib, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmLck:\t    2048 kB\nCapEff:\t0000000000000000\n")
    memory = Budget(1 << 30, "available RAM")
    assert lock_budget(memory, status) == Budget(6 << 20, "RLIMIT_MEMLOCK")
    assert lock_budget(Budget(1 << 20, "available RAM"), status) == Budget(1 << 20, "available RAM")


def test_locking_with_the_privilege_is_limited_by_memory_only(limit_of_8_mib, tmp_path):
    status = tmp_path / "status"
    status.write_text("VmLck:\t0 kB\nCapEff:\t0000000000004000\n")  # bit 14
    memory = Budget(1 << 30, "available RAM")
    assert lock_budget(memory, status) is memory
