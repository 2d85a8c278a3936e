"""`python -m zerosharder doctor`: what this machine offers, what is missing, and what that costs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from zerosharder.config import Config, distributed_env
from zerosharder.errors import ZerosharderError
from zerosharder.offload import engines, memory
from zerosharder.offload.limits import cgroup_memory_limit, lock_budget, memory_budget
from zerosharder.optim import native

MIN_TORCH = (2, 6)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def collect(folders: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts as JSON-ready values; `problems` and `notes` are lists of sentences.

    Args:
        folders: where NVMe offload would put its files. A small file is made in each and removed.
    """
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
    io_backends = engines.backends()
    # Without the extension there is one reason for all, and it was given above.
    if extension:
        notes += [f"No file I/O by {name}: {why}." for name, why in io_backends.items() if why is not None]
    memory_left = memory_budget()
    lock_left = lock_budget(memory_left)
    if lock_left.limit == "RLIMIT_MEMLOCK":
        notes.append(
            f"Only {_gib(lock_left.nbytes)} of memory can be locked (RLIMIT_MEMLOCK), the rest stays pageable. To lift "
            "the limit: ulimit -l unlimited, or --ulimit memlock=-1 for a container."
        )
    inspected = [inspect_folder(folder) for folder in folders]
    for facts in inspected:
        if facts["error"] is not None:
            problems.append(f"{facts['path']} cannot hold files: {facts['error']}.")
        elif not facts["direct"]:
            notes.append(
                f"{facts['path']} is used through the page cache, not with O_DIRECT ({facts['reason']}): slower, and "
                "the cache competes for memory. Choose a folder on a local ext4 or xfs."
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
            "budget_bytes": memory_left.nbytes,
            "budget_limit": memory_left.limit,
            "lockable_bytes": lock_left.nbytes,
            "lockable_limit": lock_left.limit,
        },
        "huge_pages": huge_pages,
        "extension": extension,
        "optimizer_kernels": _optimizer_kernels(),
        "process_group_backends": backends,
        "io_backends": io_backends,
        "folders": inspected,
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
        ("to be had", f"{_gib(mem['budget_bytes'])} ({mem['budget_limit']})"),
        ("to be locked", f"{_gib(mem['lockable_bytes'])} ({mem['lockable_limit']})"),
        ("huge pages", facts["huge_pages"] or "not supported by this kernel"),
        ("extension", "present" if facts["extension"] else "missing"),
        ("kernels", _kernel_line(facts["optimizer_kernels"])),
        ("backends", ", ".join(facts["process_group_backends"]) or "none"),
        ("file I/O", ", ".join(name for name, why in facts["io_backends"].items() if why is None) or "none"),
    ]
    for folder in facts["folders"]:
        if folder["error"] is None:
            way = "O_DIRECT" if folder["direct"] else f"page cache ({folder['reason']})"
            rows.append(("folder", f"{folder['path']}: {_gib(folder['free_bytes'])} free, {way}"))
    lines = [f"{label:<13} {value}" for label, value in rows]
    lines += [f"note: {text}" for text in facts["notes"]]
    lines += [f"problem: {text}" for text in facts["problems"]]
    if not facts["problems"]:
        lines.append("ready: zerosharder can shard on this machine")
    return "\n".join(lines) + "\n"


def inspect_folder(folder: str) -> dict[str, Any]:
    """Return what file I/O finds in `folder`: free bytes, O_DIRECT or why not, and an error if it is of no use."""
    facts: dict[str, Any] = {
        "path": folder,
        "free_bytes": None,
        "direct": False,
        "reason": None,
        "error": None,
    }
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="zerosharder-doctor-") as file:
            facts["free_bytes"] = shutil.disk_usage(folder).free
            if not memory.extension_present():
                facts["reason"] = "needs the extension"
                return facts
            with memory.native().File(file.name, write=True) as opened:
                facts["direct"] = opened.direct
                facts["reason"] = opened.why_not_direct or None
    except OSError as error:
        facts["error"] = str(error)
    return facts


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
