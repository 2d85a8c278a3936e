"""`python -m zerosharder bench io`: one large read and write by each engine, beside fio and a plain loop.

All contenders use one file and take turns within every round, so that a noisy machine hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerosharder.config import parse_size
from zerosharder.errors import ZerosharderError
from zerosharder.offload import engines, memory

HELP = "one large read and write of a file by each engine, beside fio and a plain loop"

_TILE = 1 << 20
_LOOP_BLOCK = 4 << 20
_DIRECTIONS = ("write", "read")

# The settings of fio that are tried; the best of each direction takes part in the rounds.
_FIO_BLOCKS = ("1m", "4m")
_FIO_DEPTHS = (8, 32)
# Name -> words before the command and options of it. The pages behind a buffer matter as much as the engine does.
_FIO_PAGES: dict[str, tuple[list[str], list[str]]] = {
    "4 KiB pages": ([], []),
    "transparent huge pages": (["env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"], ["--iomem=malloc"]),
    "reserved huge pages": ([], ["--iomem=mmaphuge"]),
}


@dataclass
class Series:
    """What one contender reached in one direction."""

    name: str
    direction: str
    settings: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def row(self, nbytes: int) -> dict[str, Any]:
        """Return the figures: MB/s (10**6 bytes) with spread, and CPU seconds for each GB (10**9 bytes)."""
        rates = [nbytes / seconds / 1e6 for seconds in self.seconds]
        middle = statistics.median(rates)
        return {
            "name": self.name,
            "direction": self.direction,
            "settings": self.settings,
            "mb_s": {"median": middle, "min": min(rates), "max": max(rates), "runs": len(rates)},
            "spread_pct": 100 * (max(rates) - min(rates)) / middle,
            "cpu_s_per_gb": statistics.median(self.cpu_seconds) / (nbytes / 1e9),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--dir", default=".", help="a folder on the disk to be measured (default: here)")
    parser.add_argument("--size", default="1GiB", help="bytes of the file (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of everything (default 5)")
    parser.add_argument("--no-fio", action="store_true", help="leave fio out although it is installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and returns the exit status of the process."""
    try:
        nbytes = parse_size(arguments.size)
        if nbytes < _LOOP_BLOCK or nbytes % _LOOP_BLOCK or arguments.rounds < 1:
            raise ValueError("--size must be a multiple of 4MiB and --rounds at least 1")
        facts = measure(Path(arguments.dir), nbytes, arguments.rounds, use_fio=not arguments.no_fio)
    except (ValueError, OSError, ZerosharderError) as error:
        print(f"bench io: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if arguments.json else as_text(facts))
    return 0


def measure(folder: Path, nbytes: int, rounds: int, *, use_fio: bool = True) -> dict[str, Any]:
    """Return all figures of reading and writing `nbytes` in `folder`; the file is removed afterwards."""
    C = memory.native()
    buffer = C.Buffer(nbytes, huge=True, populate=True)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(-1, _TILE)
    tile = torch.randint(0, 256, (_TILE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor.copy_(tile)
    series: list[Series] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="zerosharder-bench-") as inside:
        path = Path(inside) / "io.bin"
        with C.File(path, write=True, create=True) as file:
            file.reserve(nbytes)
            opened = {
                name: engines.open_engine(name) for name, why in engines.backends().items() if why is None
            }
            contenders: list[tuple[Series, Callable[[], None]]] = []
            for name, engine in opened.items():
                engine.write(file, 0, buffer).wait()  # also: every block of the file was written once
                # Staging buffers are made once and known to the engine, so this is how it is used.
                known = engine.register_memory(buffer) == 0
                settings = f"default: block {engine.block}, depth {engine.depth}" + (
                    ", registered" if known else ""
                )
                for direction in _DIRECTIONS:
                    transfer = getattr(engine, direction)
                    call = _waiting(transfer, file, buffer)
                    contenders.append((Series(f"zerosharder {name}", direction, settings), call))
            loop_settings = (
                f"O_DIRECT, one thread, block {_LOOP_BLOCK}" if file.direct else "buffered, one thread"
            )
            for direction in _DIRECTIONS:
                call = _loop(path, memoryview(buffer), direction, direct=file.direct)
                contenders.append((Series("plain loop", direction, loop_settings), call))
            fio = _Fio(path, nbytes, direct=file.direct) if use_fio else None
            best = fio.sweep() if fio is not None and fio.command else {}

            for _ in range(rounds):
                for one, call in contenders:
                    if one.direction == "read":
                        tensor.zero_()
                    _timed(one, call)
                    if not bool((tensor == tile).all()):
                        raise OSError(f"{one.name} read back other bytes than were written")
                for direction, setting in best.items():
                    fio_series = next((s for s in series if s.direction == direction), None)
                    if fio_series is None:
                        fio_series = Series("fio", direction, setting.text)
                        series.append(fio_series)
                    assert fio is not None
                    seconds, cpu = fio.run(direction, setting)
                    fio_series.seconds.append(seconds)
                    fio_series.cpu_seconds.append(cpu)
            series += [one for one, _ in contenders]
            for engine in opened.values():
                engine.close()
            direct, reason = file.direct, file.why_not_direct
    rows = [one.row(nbytes) for one in series]
    bound = {row["direction"]: row["mb_s"]["median"] for row in rows if row["name"] == "fio"}
    for row in rows:
        limit = bound.get(row["direction"])
        row["ratio_to_fio"] = row["mb_s"]["median"] / limit if limit else None
    return {
        "nbytes": nbytes,
        "rounds": rounds,
        "folder": str(folder),
        "direct": direct,
        "why_not_direct": reason or None,
        "machine": _machine(),
        "fio": None if fio is None else fio.facts,
        "results": rows,
    }


def as_text(facts: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        f"{facts['nbytes'] / 2**20:.0f} MiB in {facts['folder']}, medians of {facts['rounds']}, "
        + ("O_DIRECT" if facts["direct"] else f"page cache ({facts['why_not_direct']})"),
        f"{'':<22}{'':<7}{'MB/s':>7}{'spread':>8}{'CPU s/GB':>10}{'to fio':>8}  settings",
    ]
    for row in sorted(facts["results"], key=lambda row: row["direction"]):
        ratio = "" if row["ratio_to_fio"] is None else f"{row['ratio_to_fio']:.2f}"
        lines.append(
            f"{row['name']:<22}{row['direction']:<7}{row['mb_s']['median']:>7.0f}{row['spread_pct']:>7.0f}%"
            f"{row['cpu_s_per_gb']:>10.3f}{ratio:>8}  {row['settings']}"
        )
    if facts["fio"] is not None and facts["fio"]["why_not"] is not None:
        lines.append(f"without fio: {facts['fio']['why_not']}")
    return "\n".join(lines) + "\n"


def _waiting(transfer: Callable[..., Any], file: Any, buffer: Any) -> Callable[[], None]:
    def call() -> None:
        transfer(file, 0, buffer).wait()

    return call


def _loop(path: Path, view: memoryview, direction: str, *, direct: bool) -> Callable[[], None]:
    """What one would write by hand: a loop of pread or pwrite over an aligned buffer."""

    def call() -> None:
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        try:
            for begin in range(0, len(view), _LOOP_BLOCK):
                done = 0
                while done < _LOOP_BLOCK:
                    rest = view[begin + done : begin + _LOOP_BLOCK]
                    moved = (
                        os.preadv(fd, [rest], begin + done)
                        if direction == "read"
                        else os.pwrite(fd, rest, begin + done)
                    )
                    if moved == 0:
                        raise OSError(f"{direction} of {path} moved nothing at {begin + done}")
                    done += moved
        finally:
            os.close(fd)

    return call


def _timed(series: Series, call: Callable[[], None]) -> None:
    cpu, begin = _cpu_seconds(), time.perf_counter()
    call()
    series.seconds.append(time.perf_counter() - begin)
    series.cpu_seconds.append(_cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class _FioSetting:
    block: str
    depth: int
    pages: str

    @property
    def text(self) -> str:
        return f"io_uring, block {self.block}, depth {self.depth}, registered, {self.pages}"


class _Fio:
    """The reference: fio with its io_uring engine and registered buffers, one pass over the same file."""

    def __init__(self, path: Path, nbytes: int, *, direct: bool) -> None:
        self.command = shutil.which("fio")
        self._path, self._nbytes, self._direct = path, nbytes, direct
        self.facts: dict[str, Any] = {"why_not": None, "sweep": [], "refused": {}}
        if self.command is None:
            self.facts["why_not"] = "it is not installed (apt-get install fio)"

    def sweep(self) -> dict[str, _FioSetting]:
        """Tries every setting once; returns the best of each direction."""
        best: dict[str, tuple[float, _FioSetting]] = {}
        for pages in _FIO_PAGES:
            for setting in [_FioSetting(b, d, pages) for b in _FIO_BLOCKS for d in _FIO_DEPTHS]:
                for direction in _DIRECTIONS:
                    if pages in self.facts["refused"]:
                        continue
                    try:
                        seconds, _ = self.run(direction, setting)
                    except OSError as error:
                        self.facts["refused"][pages] = str(error)
                        continue
                    rate = self._nbytes / seconds / 1e6
                    self.facts["sweep"].append(
                        {"direction": direction, "settings": setting.text, "mb_s": rate}
                    )
                    if direction not in best or seconds < best[direction][0]:
                        best[direction] = (seconds, setting)
        if not best:
            self.facts["why_not"] = "; ".join(set(self.facts["refused"].values()))
        return {direction: setting for direction, (_, setting) in best.items()}

    def run(self, direction: str, setting: _FioSetting) -> tuple[float, float]:
        """Returns seconds and CPU seconds of one pass, without fio's own start."""
        before, options = _FIO_PAGES[setting.pages]
        command = [
            *before,
            str(self.command),
            "--name=bench",
            f"--filename={self._path}",
            f"--rw={direction}",
        ]
        command += [
            f"--bs={setting.block}",
            f"--iodepth={setting.depth}",
            "--ioengine=io_uring",
            "--fixedbufs=1",
        ]
        command += [
            f"--direct={int(self._direct)}",
            f"--size={self._nbytes}",
            "--fallocate=none",
            "--overwrite=1",
        ]
        # Constant bytes that are not refilled: making up new ones is no part of a write.
        command += [
            "--zero_buffers=1" if direction == "read" else "--buffer_pattern=0x5a",
            "--output-format=json",
        ]
        result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        if result.returncode != 0:
            said = (result.stderr + result.stdout.partition("{")[0]).split()
            raise OSError(" ".join(["fio:", *said])[:300])
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
        seconds = self._nbytes / job[direction]["bw_bytes"]
        return seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds


def _machine() -> dict[str, Any]:
    model = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        pass  # not every system has it
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release()}
