"""Processes of a test run: their folder, environment, start and end."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.protocol import Reply

TESTS = Path(__file__).resolve().parent.parent

_root: Path | None = None


def use_folder(folder: Path) -> None:
    """Logs, stacks and scripts go below `folder` from now on (conftest gives pytest's)."""
    global _root
    _root = folder


def base_folder() -> Path:
    global _root
    if _root is None:
        _root = Path(tempfile.mkdtemp(prefix="zerosharder-tests-"))
        atexit.register(shutil.rmtree, _root, ignore_errors=True)
    return _root


# Arguments: the folder of the tests, the pipe's descriptor, the file for stacks.
_WORKER_SOURCE = """
import sys
sys.path.insert(0, sys.argv[1])
from harness.worker import main
main(*sys.argv[2:])
"""


class Worker:
    def __init__(self, rank: int, folder: Path, environment: dict[str, str]) -> None:
        self.rank = rank
        self.folder = folder
        self.log = folder / "log"
        self.stacks = folder / "stacks"
        self.seen = 0  # bytes of the log already shown
        parent, child = _pipe()
        self.connection = parent
        folder.mkdir(parents=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WORKER_SOURCE, str(TESTS), str(child), str(self.stacks)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,  # never written: it ends when the parent ends, and the worker with it
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child],
                start_new_session=True,
            )
        os.close(child)

    def send(self, *message: Any) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # it died; the wait for its answer reports it

    def receive(self) -> Reply | None:
        """The answer, or None if the worker is gone."""
        try:
            return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None

    def new_output(self) -> str:
        """What it printed since the last look."""
        with open(self.log, "rb") as log:
            log.seek(self.seen)
            data = log.read()
        self.seen += len(data)
        return data.decode(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:  # else the number may be someone else's by now
            end_tree(self.process.pid)
            self.process.wait()
        self.release()

    def release(self) -> None:
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _pipe() -> tuple[Connection, int]:
    parent, child = socket.socketpair()
    return Connection(parent.detach()), child.detach()


def base_environment() -> dict[str, str]:
    """The parent's environment without what belongs to a distributed job or to the settings under test."""
    foreign = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("ZEROSHARDER_", "TORCHELASTIC_", "PYTEST_"))
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return environment


def own_paths() -> list[str]:
    """What a bare interpreter lacks in sys.path: the tests, and the package where it is not installed."""
    prefixes = {sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()}
    paths = [os.path.abspath(p) for p in sys.path]
    paths = [p for p in paths if not any(p == q or p.startswith(q + os.sep) for q in prefixes)]
    return list(dict.fromkeys([*paths, str(TESTS)]))


def end_tree(pid: int, ask: signal.Signals | None = None) -> None:
    """Ends a process that we started and its descendants, by pid; `ask` goes first, with time to answer."""
    import psutil

    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]  # children first: nobody restarts them
    except psutil.NoSuchProcess:
        return
    steps = [(ask, 2.0)] if ask else []
    for number, seconds in [*steps, (signal.SIGKILL, 5.0)]:
        for process in tree:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                pass
        deadline = time.monotonic() + seconds
        while not all(_gone(process) for process in tree) and time.monotonic() < deadline:
            time.sleep(0.02)


def _gone(process: Any) -> bool:
    """Ended, reaped or not: the root is left for whoever holds its Popen."""
    import psutil

    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
