"""The report of a test that did not finish well: tracebacks, stacks and output of every rank."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterable

from harness.processes import Worker
from harness.protocol import Reply

LOG_TAIL = 8000  # characters of a rank's output that a failure shows


class DistributedFailure(AssertionError):
    """A distributed test did not finish well on every rank; the message is the report."""


def indent(text: str, title: str) -> str:
    """Lines of `text` below a title."""
    return f"{title}:\n{textwrap.indent(text.rstrip(), '    ')}"


def report(
    workers: list[Worker],
    what: str,
    timeout: float,
    failed: bool,
    replies: dict[int, Reply],
    dead: dict[int, int],
) -> str:
    """What every rank did, for a test that did not finish well on all of them."""
    late = [w.rank for w in workers if w.rank not in replies and w.rank not in dead]
    errors = [rank for rank, reply in replies.items() if reply.kind == "error"]
    lines = []
    if errors:
        lines.append(f"{what}: rank {_ranks(errors)} failed")
    if dead:
        lines.append(f"{what}: rank {_ranks(dead)} died")
    if late and not failed:
        lines.append(f"{what}: rank {_ranks(late)} had not finished after {timeout:g} s")
    stacks = _stacks(workers)
    for worker in workers:
        rank = worker.rank
        if rank in dead:
            lines.append(f"-- rank {rank} died: {_exit_reason(dead[rank])}")
        elif rank in errors:
            lines.append(f"-- rank {rank} failed:\n{replies[rank].text.rstrip()}")
        else:
            state = "had finished" if rank in replies else "was still running"
            lines.append(f"-- rank {rank} {state}; its stacks:\n{stacks.get(rank, '(none)').rstrip()}")
        if output := worker.new_output():
            lines.append(indent(output[-LOG_TAIL:], f"rank {rank} printed"))
    return "\n".join(lines)


def _stacks(workers: list[Worker]) -> dict[int, str]:
    """All threads of all living ranks, as faulthandler writes them on SIGUSR1."""
    alive = [w for w in workers if w.process.poll() is None and w.stacks.exists()]
    for worker in alive:
        os.kill(worker.process.pid, signal.SIGUSR1)
    texts = {worker.rank: "" for worker in alive}
    for _ in range(40):  # until every file has something and none grows any more
        time.sleep(0.05)
        now = {worker.rank: worker.stacks.read_text(errors="replace") for worker in alive}
        if now == texts and all(now.values()):
            break
        texts = now
    return texts


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
