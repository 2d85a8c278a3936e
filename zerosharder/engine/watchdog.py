"""No hang without a culprit: what every rank is doing, asked for when one of them waits in vain.

Each rank runs one daemon thread that sleeps on a key of the process group's store. A rank whose wait fails sets the
keys of all; every thread then posts where its rank is (unit, operation, recent order, stack of the main thread). The
rank that waited collects the answers and raises DesyncError with all of them; one without an answer is dead or frozen.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from zerosharder.errors import DesyncError

# Seconds to wait for the others to say where they are. Their threads answer at once unless they are gone.
ANSWER_SECONDS = 3.0
# The longest wait on the store in one call; it is renewed, this only bounds one request.
LISTEN = timedelta(hours=12)


class Watchdog:
    """Answers for this rank, and explains a failed wait with everybody's answers."""

    def __init__(self, store: dist.Store, rank: int, ranks: list[int]) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks  # of the job, not of a group
        # Says where the engine at work is; set by whichever engine of this rank started the last pass.
        self.describe: Callable[[], dict[str, str]] = _nothing_yet
        self._main = threading.get_ident()
        # A connection of its own, since waiting on one blocks it.
        listener = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self._listen, args=(listener,), name="zerosharder-watchdog", daemon=True
        )
        self._thread.start()
        # A thread that sits in the store when the interpreter ends would take the process down with an abort.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the thread. Does nothing if it has ended."""
        if self._thread.is_alive():
            with contextlib.suppress(
                RuntimeError, dist.DistError
            ):  # the rank that hosts the store may be gone
                self._store.set(f"alarm/{self._rank}", "exit")
            self._thread.join(ANSWER_SECONDS)

    def explain(self, mine: str, error: RuntimeError) -> Exception:
        """The exception for this rank's wait ``mine``, which failed with ``error``; names who was elsewhere."""
        try:
            self._store.set(f"answer/{self._rank}", json.dumps(self._answer()))
            for rank in self._ranks:
                self._store.set(f"alarm/{rank}", "ask")
            answers = self._collect()
            self._let_others_collect(answers)
        except (RuntimeError, dist.DistError) as lost:
            return DesyncError(
                f"rank {self._rank}: {mine} failed ({_short(error)}), and the store that knows the other ranks is gone "
                f"({_short(lost)}): the rank that hosts it has ended"
            )
        culprits = tuple(
            rank for rank, answer in answers.items() if answer is None or answer["waiting"] != mine
        )
        lines = [f"rank {self._rank}: {mine} failed: {_short(error)}"]
        for rank, answer in answers.items():
            if answer is None:
                lines.append(f"  rank {rank}: no answer; the process has ended or is frozen")
                continue
            doing = f"waits for {answer['waiting']}" if answer["waiting"] else "is not waiting"
            order = answer["order"] or "no pass yet"
            lines.append(f"  rank {rank}: {doing} ({answer['phase']}); order so far: {order}")
            lines.append(f"    last: {answer['last']}")
            if not answer["waiting"]:
                lines.append("    " + answer["stack"].replace("\n", "\n    "))
        lines.append(
            "Every rank must run the same modules in the same order and make the same collective calls (full_params, "
            "save, and shard itself included). Put modules that ranks choose between into one unit (units=)."
        )
        return DesyncError("\n".join(lines), culprits=culprits)

    def _collect(self) -> dict[int, dict[str, str] | None]:
        deadline = time.monotonic() + ANSWER_SECONDS
        answers: dict[int, dict[str, str] | None] = {}
        for rank in self._ranks:
            key = f"answer/{rank}"
            left = max(0.05, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
                answers[rank] = json.loads(self._store.get(key))
            except (RuntimeError, dist.DistError):
                answers[rank] = None
        return answers

    def _let_others_collect(self, answers: dict[int, dict[str, str] | None]) -> None:
        """The exception may end this process, and with it the store: those that wait too read the answers first."""
        self._store.set(f"told/{self._rank}", "")
        waiting = [f"told/{rank}" for rank, answer in answers.items() if answer and answer["waiting"]]
        with contextlib.suppress(RuntimeError, dist.DistError):  # they may have no error of their own yet
            self._store.wait(waiting, timedelta(seconds=ANSWER_SECONDS))

    def _listen(self, store: dist.Store) -> None:
        while True:
            try:
                store.wait([f"alarm/{self._rank}"], LISTEN)
                if store.get(f"alarm/{self._rank}") == b"ask" and not store.check([f"answer/{self._rank}"]):
                    store.set(f"answer/{self._rank}", json.dumps(self._answer()))
                return
            except (RuntimeError, dist.DistError) as error:
                if "timeout" not in str(error).lower():
                    return  # the job is over, the store with it

    def _answer(self) -> dict[str, str]:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame, limit=6)).rstrip() if frame else ""
        return {"stack": stack, **self.describe()}


def _nothing_yet() -> dict[str, str]:
    return {"waiting": "", "phase": "no pass yet", "order": "", "last": "nothing"}


def _short(error: BaseException) -> str:
    return str(error).split("This is typically", 1)[0].strip().splitlines()[0]
