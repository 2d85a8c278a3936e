"""`python -m zerosharder doctor`: what this machine offers, what is missing, and what that costs."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
import torch.distributed as dist

from zerosharder.config import Config, distributed_env
from zerosharder.errors import ZerosharderError
from zerosharder.offload import memory
from zerosharder.optim import native

MIN_TORCH = (2, 6)
_CGROUPS = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def collect() -> dict[str, Any]:
    """Return the facts as JSON-ready values; `problems` and `notes` are lists of sentences."""
    notes: list[str] = []
    problems: list[str] = []

    extension = memory.extension_present()
    if not extension:
        notes.append(
            "The extension zerosharder._C is missing: host buffers come from Python's mmap module (same "
            "results, slower to allocate). To get it, install a C++17 compiler and the Python headers, and "
            "reinstall."
        )
    huge_pages = _selected(_HUGE_PAGES)
    if huge_pages in (None, "never"):
        notes.append(
            "Transparent huge pages are off: the first touch of large buffers is several times slower. To "
            f"turn them on, as root: echo madvise > {_HUGE_PAGES}"
        )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        problems.append(f"torch {torch.__version__} is too old, 2.6 or newer is needed.")
    backends = _backends()
    if not backends:
        problems.append("This torch has no process-group backend: only a world of one can be sharded.")
    if torch.cuda.is_available() and "nccl" not in backends:
        problems.append("torch sees a CUDA device but has no NCCL backend: several ranks cannot use it.")
    for check in (Config.resolve, distributed_env):
        try:
            check()
        except ZerosharderError as error:
            problems.append(str(error))

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "devices": _devices(),
        "cores": {
            "usable": _usable_cores(),
            "physical": psutil.cpu_count(logical=False),
            "torch_threads": torch.get_num_threads(),
        },
        "memory": {
            "total_bytes": psutil.virtual_memory().total,
            "available_bytes": psutil.virtual_memory().available,
            "cgroup_limit_bytes": cgroup_memory_limit(),
        },
        "huge_pages": huge_pages,
        "extension": extension,
        "optimizer_kernels": _optimizer_kernels(),
        "process_group_backends": backends,
        "notes": notes,
        "problems": problems,
    }


def as_json(facts: dict[str, Any]) -> str:
    """Return `facts` as one JSON object."""
    return json.dumps(facts, indent=2) + "\n"


def as_text(facts: dict[str, Any]) -> str:
    """Return `facts` as lines for a person."""
    cores, mem = facts["cores"], facts["memory"]
    limit = mem["cgroup_limit_bytes"]
    rows = [
        ("Python", facts["python"]),
        ("torch", facts["torch"]),
        ("devices", ", ".join(facts["devices"])),
        (
            "cores",
            f"{cores['usable']} usable, {cores['physical'] or 'unknown'} physical, "
            f"torch uses {cores['torch_threads']} threads",
        ),
        ("memory", f"{_gib(mem['total_bytes'])}, {_gib(mem['available_bytes'])} available"),
        ("cgroup limit", "none" if limit is None else _gib(limit)),
        ("huge pages", facts["huge_pages"] or "not supported by this kernel"),
        ("extension", "present" if facts["extension"] else "missing"),
        ("kernels", _kernel_line(facts["optimizer_kernels"])),
        ("backends", ", ".join(facts["process_group_backends"]) or "none"),
    ]
    lines = [f"{label:<13} {value}" for label, value in rows]
    lines += [f"note: {text}" for text in facts["notes"]]
    lines += [f"problem: {text}" for text in facts["problems"]]
    if not facts["problems"]:
        lines.append("ready: zerosharder can shard on this machine")
    return "\n".join(lines) + "\n"


def cgroup_memory_limit(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the smallest memory limit in bytes of the control groups this process is in, None without one.

    A limit of any ancestor counts, so the path is walked up to the root. Both versions of the interface are
    read.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's and not exist here; its parents lead to the mount point.
        for folder in (inside, *inside.parents):
            try:
                text = (base / folder / name).read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number close to 2**63.
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text))
    return min(limits, default=None)


def _optimizer_kernels() -> dict[str, Any] | None:
    if not native.available():
        return None
    usable = native.usable_isas()
    return {"chosen": usable[0], "usable": usable, "cpu_features": native.cpu_features()}


def _kernel_line(kernels: dict[str, Any] | None) -> str:
    if kernels is None:
        return "none without the extension: optimizer steps are torch's"
    features = " ".join(kernels["cpu_features"]) or "nothing beyond the base"
    return f"optimizer steps use {kernels['chosen']} (usable: {', '.join(kernels['usable'])}; CPU has {features})"


def _selected(path: Path) -> str | None:
    """Return the bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _devices() -> list[str]:
    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return [*found, "cpu"]


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    candidates = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, available in candidates.items() if available()]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
