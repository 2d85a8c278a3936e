"""The pools of workers, one for each world size, and the protocol with them."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.processes import Worker, base_environment, base_folder, own_paths
from harness.protocol import Reply, Target, notes, scaled
from harness.report import DistributedFailure, indent, report

MAX_POOLS = 3  # alive at once; the least recently used goes first
LARGE_WORLD = 4  # only one pool of at least this many ranks is alive at a time
START_SECONDS = 120.0  # start of a pool; import of a test file
RESET_SECONDS = 30.0  # clean-up after a test
GRACE_SECONDS = 3.0  # after a rank failed, how long the others may still answer

_pools: dict[int, Pool] = {}  # least recently used first


def shutdown() -> None:
    """Ends all pools."""
    for world in list(_pools):
        _pools.pop(world).close()


atexit.register(shutdown)


def pool_of(world: int) -> Pool:
    pool = _pools.pop(world, None)
    if pool is not None and pool.worn:
        pool.close()
        pool = None
    if pool is None:
        for other in [w for w in _pools if world >= LARGE_WORLD and w >= LARGE_WORLD]:
            _pools.pop(other).close()
        while len(_pools) >= MAX_POOLS:
            _pools.pop(next(iter(_pools))).close()
        pool = Pool(world)
    _pools[world] = pool
    return pool


class Pool:
    """The processes of one world size and the protocol with them: start; load, call, reset for each test."""

    started = 0  # pools so far, for folder names

    def __init__(self, world: int) -> None:
        Pool.started += 1
        self.world = world
        self.worn = False
        self.calls = 0
        self.loaded: set[str] = set()
        folder = base_folder() / f"pool{Pool.started}-W{world}"
        environment = base_environment()
        environment["PYTHONPATH"] = os.pathsep.join(own_paths())
        self.workers: list[Worker] = []
        try:
            for rank in range(world):
                mine = environment | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                }
                self.workers.append(Worker(rank, folder / f"rank{rank}", mine))
            # Rank 0 lets its store choose a free port; the others, importing torch, wait for the number.
            first = self.workers[0]
            first.send("store", world)
            port = self._answers("start of the store", scaled(START_SECONDS), only=first)[0].text
            for worker in self.workers:
                worker.send("join", worker.rank, world, port)
            self._answers("start of the group", scaled(START_SECONDS))
        except BaseException:
            self.discard()
            raise

    def call(
        self,
        target: Target,
        arguments: dict[str, bytes],
        timeout: float,
        env: dict[str, str],
        expect_loss: bool,
    ) -> list[Any]:
        import pytest

        self.calls += 1
        title = f"{Path(target.path).name}::{target.qualname} on {self.world} ranks"
        try:
            if target.path not in self.loaded:
                self._ask("load", target.path, target.module)
                self._answers(f"import for {title}", scaled(START_SECONDS))
                self.loaded.add(target.path)
            self._ask("call", self.calls, target.path, target.qualname, arguments, env)
            replies = self._answers(title, timeout, deaths_allowed=expect_loss)
            for reply in replies.values():
                notes.extend(reply.notes)
            if expect_loss:
                self.discard()
            else:
                self._ask("reset", self.calls)
                after = self._answers(f"clean-up after {title}", scaled(RESET_SECONDS))
                self.worn = any(reply.worn for reply in after.values())
        except BaseException:  # also an interrupt at the keyboard: its ranks are anywhere now
            self.discard()
            raise
        for reply in replies.values():
            if reply.kind == "skip":
                pytest.skip(reply.text)
        values = {rank: pickle.loads(reply.value) for rank, reply in replies.items() if reply.value}
        return [values.get(rank) for rank in range(self.world)]

    def close(self) -> None:
        """Ends an idle pool."""
        self._ask("exit")
        for worker in self.workers:
            try:
                worker.process.wait(timeout=5)
                worker.release()
            except subprocess.TimeoutExpired:
                worker.end()

    def discard(self) -> None:
        """Ends a pool whose ranks may be anywhere."""
        if _pools.get(self.world) is self:
            del _pools[self.world]
        for worker in self.workers:
            worker.end()

    def _ask(self, *message: Any) -> None:
        for worker in self.workers:
            worker.send(*message)

    def _answers(
        self, what: str, timeout: float, *, only: Worker | None = None, deaths_allowed: bool = False
    ) -> dict[int, Reply]:
        """Waits for all answers; a missing, bad or dead rank raises the report."""
        waiting = {only.connection: only} if only else {w.connection: w for w in self.workers}
        replies: dict[int, Reply] = {}
        dead: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting), timeout=min(left, 0.2))
            # A child of a dead worker may hold its end of the pipe open, so ask the process as well.
            gone = [] if ready else [c for c, w in waiting.items() if w.process.poll() is not None]
            for connection in [*ready, *gone]:
                worker = waiting.pop(connection)  # type: ignore[call-overload]
                reply = worker.receive() if connection in ready else None
                if reply is None:
                    dead[worker.rank] = worker.process.wait()
                else:
                    replies[worker.rank] = reply
                bad = reply.kind == "error" if reply else not deaths_allowed
                if bad and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed or waiting or not replies:
            raise DistributedFailure(report(self.workers, what, timeout, failed, replies, dead))
        for worker in self.workers:
            if output := worker.new_output():
                print(indent(output, f"rank {worker.rank} printed"))
        return replies
