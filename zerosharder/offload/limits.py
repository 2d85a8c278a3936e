"""How much host memory this process may use, and how much of it it may lock: the smallest of all limits in force."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["Budget", "cgroup_memory_limit", "lock_budget", "memory_budget"]

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14  # number of the capability in the kernel's masks

# Version 1 of control groups writes "no limit" as a number close to 2**63.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may still be taken, and the name of the limit that says so."""

    nbytes: int
    limit: str


def cgroup_memory_limit(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the smallest memory limit in bytes of the control groups this process is in, None without one.

    A limit of any ancestor counts, so the path is walked up to the root. Both versions of the interface are
    read.
    """
    return min((group.limit for group in _limited_groups(root, membership)), default=None)


def memory_budget(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> Budget:
    """Return the host memory this process may still take: what RAM and each of its control groups leave free.

    All ranks of a host share it. Page cache that the kernel can drop counts as free.
    """
    budgets = [Budget(int(psutil.virtual_memory().available), "available RAM")]
    for group in _limited_groups(root, membership):
        budgets.append(
            Budget(max(0, group.limit - group.used()), f"memory limit of the cgroup {group.folder}")
        )
    return min(budgets, key=lambda budget: budget.nbytes)


def lock_budget(memory: Budget | None = None, status: Path = _STATUS) -> Budget:
    """Return the host memory this process may still lock: RLIMIT_MEMLOCK, within ``memory``.

    Args:
        memory: what may be taken at all; by default `memory_budget()`.
        status: the process's status file (tests).
    """
    memory = memory_budget() if memory is None else memory
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = _status_fields(status)
    privileged = int(fields.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    if privileged or limit == resource.RLIM_INFINITY:
        return memory
    locked = int(fields.get("VmLck", "0").split()[0]) * 1024
    left = max(0, limit - locked)
    return Budget(left, "RLIMIT_MEMLOCK") if left < memory.nbytes else memory


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group with a memory limit."""

    folder: Path
    limit: int
    usage_name: str
    cache_name: str

    def used(self) -> int:
        """Bytes charged to the group, less file cache that the kernel drops first."""
        try:
            usage = int((self.folder / self.usage_name).read_text())
            lines = (self.folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            return 0
        stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return max(0, usage - int(stat.get(self.cache_name, "0")))


def _limited_groups(root: Path, membership: Path) -> Iterator[_Group]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's and not exist here; its parents lead to the mount point.
        for folder in (inside, *inside.parents):
            try:
                text = (base / folder / names[0]).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _NO_LIMIT:
                yield _Group(base / folder, int(text), names[1], names[2])


def _status_fields(status: Path) -> dict[str, str]:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
