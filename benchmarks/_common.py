"""What the benchmarks share: the machine, memory of a process, groups of processes, and how results are
told.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """What has to be known about the machine to read a number."""
    import torch

    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    flags = re.search(r"flags\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    total = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "vector_instructions": [name for name in known if flags and name in flags[1].split()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": os.getloadavg()[0],
    }


# ------------------------------------------------------------------------------ memory of this process, MiB


def resident() -> float:
    return _status("VmRSS")


def peak_resident() -> float:
    return _status("VmHWM")


def reset_peak() -> None:
    """Let the peak start over from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def proportional() -> float:
    """Resident memory in which a page shared by n processes counts 1/n."""
    found = re.search(r"^Pss:\s*(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes that the spans (begin, end) cover; views of one buffer may overlap and count once."""
    total = reached = 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _status(field: str) -> float:
    found = re.search(rf"^{field}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


# ------------------------------------------------------------------------------------- groups of processes


class GroupError(RuntimeError):
    """A worker died or did not answer; the message ends with what it wrote to stderr."""


class Group:
    """The ranks of one engine, each a process of its own that runs `_worker.py`.

    The environment of a rank is the one torchrun would set. `prefix(rank)` goes in front of its command line (a
    network namespace). A group of one rank gets no launcher environment: it is what `python script.py` is.
    """

    def __init__(
        self,
        engine: str,
        world: int,
        options: Sequence[str],
        *,
        address: str = "127.0.0.1",
        environment: dict[str, str] | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        timeout: float = 900,
    ) -> None:
        self.engine, self.world, self.timeout = engine, world, timeout
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[queue.Queue[str]] = []
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115 - closed by close()
        port = free_port()
        for rank in range(world):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **(environment or {}),
            }
            for name in (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "MASTER_ADDR",
                "MASTER_PORT",
            ):
                env.pop(name, None)
            if world > 1:
                env.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR=address, MASTER_PORT=str(port))
                env.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            env.update(environment or {})
            command = [*prefix(rank), sys.executable, str(HERE / "_worker.py"), "--engine", engine, *options]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors[rank],
                text=True,
                env=env,
            )
            self.processes.append(process)
            self.answers.append(queue.Queue())
            threading.Thread(target=_read, args=(process, self.answers[rank]), daemon=True).start()

    def call(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give all ranks the same command; their answers."""
        return self.call_each([{"do": do, **arguments}] * self.world)

    def call_each(self, commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for process, command in zip(self.processes, commands, strict=True):
            try:
                process.stdin.write(json.dumps(command) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass  # it died: told below, with its last words
        until = time.monotonic() + self.timeout
        return [self._answer(rank, commands[rank]["do"], until) for rank in range(self.world)]

    def _answer(self, rank: int, what: str, until: float) -> dict[str, Any]:
        while time.monotonic() < until:
            try:
                return json.loads(self.answers[rank].get(timeout=0.5))  # type: ignore[no-any-return]
            except queue.Empty:
                dead = [r for r, p in enumerate(self.processes) if p.poll() is not None]
                if dead and self.answers[rank].empty():
                    self._fail(dead[0], f"exited with {self.processes[dead[0]].returncode} in {what!r}")
        return self._fail(rank, f"did not answer {what!r} within {self.timeout:.0f} s")

    def _fail(self, rank: int, what: str) -> Any:
        self.errors[rank].seek(0)
        tail = self.errors[rank].read()[-3000:]
        self.kill()
        raise GroupError(f"{self.engine}, rank {rank} of {self.world} {what}\n{tail}")

    def close(self) -> None:
        """Let the workers end, and wait for them."""
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in self.errors:
            file.close()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    for line in process.stdout or ():
        answers.put(line)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


# ------------------------------------------------------------------------------------------------ results


class Results:
    """Measurements and a summary, told as a table to people and as JSON lines to programs.

    With ``--json FILE`` the lines go to the file, with ``--json -`` to stdout and the table to stderr.
    """

    def __init__(self, benchmark: str, target: str | None) -> None:
        self.benchmark, self.target = benchmark, target
        self.machine = machine()
        self.file = None if target is None else sys.stdout if target == "-" else open(target, "w")  # noqa: SIM115

    def measurement(self, **fields: Any) -> dict[str, Any]:
        self._write({"kind": "measurement", "benchmark": self.benchmark, **fields})
        return fields

    def summary(self, **fields: Any) -> None:
        after = {"load_average_after": os.getloadavg()[0]}
        self._write(
            {"kind": "summary", "benchmark": self.benchmark, "machine": self.machine | after, **fields}
        )
        if self.file not in (None, sys.stdout):
            self.file.close()  # type: ignore[union-attr]

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self.target == "-" else sys.stdout, flush=True)

    def table(self, title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A Markdown table."""
        cells = [[str(c) for c in row] for row in (head, *rows)]
        width = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in cells
        ]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in width) + "|")
        self.say("\n".join(["", title, "", *lines]))

    def say_machine(self) -> None:
        m = self.machine
        self.say(
            f"\n{m['cpu']} ({', '.join(m['vector_instructions']) or 'no AVX2'}), {m['cores']} cores, "
            f"{m['memory_gib']} GiB, Linux {m['kernel']}, torch {m['torch']}, "
            f"load before {m['load_average_before']:.1f}. Quote ratios, never these times."
        )

    def _write(self, fields: dict[str, Any]) -> None:
        if self.file is not None:
            print(json.dumps(fields), file=self.file, flush=True)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def slowest(answers: Sequence[dict[str, Any]]) -> list[float]:
    """The time of each step: that of its slowest rank."""
    return [max(seconds) for seconds in zip(*(a["seconds"] for a in answers), strict=True)]


def mean_losses(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(a["losses"] for a in answers), strict=True)]


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of the ratios of what was measured one after the other: drift of the machine cancels out."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------ bytes over a socket


def connect(address: str, port: int) -> socket.socket:
    """Wait for the other side to listen."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, port))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def send(link: socket.socket, nbytes: int) -> None:
    block = memoryview(bytes(1 << 20))
    while nbytes:
        nbytes -= link.send(block[: min(nbytes, len(block))])


def receive(link: socket.socket, nbytes: int) -> None:
    block = memoryview(bytearray(1 << 20))
    while nbytes:
        count = link.recv_into(block[: min(nbytes, len(block))])
        if not count:
            raise ConnectionError("the other side closed the connection")
        nbytes -= count
