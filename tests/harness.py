"""Distributed tests that share their process groups.

    from harness import distributed

    @distributed(world=2)            # or world=(1, 2, 4): one test per world size
    def test_x(tmp_path):            # runs on every rank, inside a living gloo group
        assert torch.distributed.get_world_size() == 2

What happens: the first test of a world size starts a *pool*, one process per rank, joined by a gloo group
over loopback. The pool lives for the session. For each test the parent sends (file, function, arguments) to
every worker; each imports the test file, runs the undecorated function and answers. The parent waits, under
a hard timeout.

What a test can rely on:
- a clean start: seeds, default dtype and device, deterministic flags, environment and current folder are
  put back after every test, garbage is collected, a small all-reduce proves that no collective was left
  half done;
- a hang is a failure that shows the stacks of all ranks; an exception shows the traceback of every rank
  that raised and the stacks of the others; a dead rank shows its signal and the tail of what it printed;
- after any of these the pool is thrown away and the next test gets a fresh one.

What a worker has in its environment: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT as under torchrun; no accelerator; no ZEROSHARDER_* variable except those given as `env=`.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import random
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
MAX_POOLS = 3  # alive at once; the least recently used goes first
LARGE_WORLD = 4  # only one pool of at least this many ranks is alive at a time
START_SECONDS = 120.0  # start of a pool; import of a test file
RESET_SECONDS = 30.0  # clean-up after a test
GRACE_SECONDS = 3.0  # after a rank failed, how long the others may still answer
GROUP_SECONDS = 600  # gloo's own timeout: the harness, which shows stacks, is to come first
MAX_THREADS = 300  # a worker with more (groups that tests left behind) is replaced before the next test
LOG_TAIL = 8000  # characters of a rank's output that a failure shows


class DistributedFailure(AssertionError):
    """A distributed test did not finish well on every rank; the message is the report."""


def scaled(seconds: float) -> float:
    """A hard timeout, times TEST_TIMEOUT_SCALE for machines that are slower than usual."""
    return seconds * float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))


# -- what tests use --


def distributed(
    world: int | Iterable[int],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect_pool_loss: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test function on every rank of a gloo group; see the module's text.

    world: number of ranks, or several to make one test of each. A parameter called `world`, if any, gets it.
    timeout: seconds for the call on all ranks; a hard limit.
    env: variables set in the workers during the call.
    expect_pool_loss: the test breaks the group on purpose. Ranks may die; those that answer must pass; the
    pool is dropped afterwards.

    Fixtures and parameters of pytest arrive as usual if they can be pickled.
    """
    worlds = (world,) if isinstance(world, int) else tuple(world)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        if "<locals>" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} is a local function, and workers find a test by its name"
            )
        signature = inspect.signature(function)
        wants_world = "world" in signature.parameters

        @functools.wraps(function)
        def run(*instance: Any, **kwargs: Any) -> None:
            import pytest

            ranks = kwargs.pop("world", worlds[0])
            if wants_world:
                kwargs["world"] = ranks
            report = ""
            try:
                run_distributed(
                    function, ranks, kwargs, timeout=timeout, env=env, expect_pool_loss=expect_pool_loss
                )
            except DistributedFailure as failure:
                report = str(failure)
            if report:  # outside of the handler, whose context would repeat it
                pytest.fail(report, pytrace=False)

        shown = [p for p in signature.parameters.values() if p.name != "world"]
        if not isinstance(world, int):
            shown.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=shown, return_annotation=None)  # type: ignore[attr-defined]
        run.__distributed__ = function  # type: ignore[attr-defined]
        run.__worlds__ = worlds  # type: ignore[attr-defined]
        if isinstance(world, int):
            return run

        import pytest

        return pytest.mark.parametrize("world", worlds, ids=[f"W{w}" for w in worlds])(run)

    return decorate


def run_distributed(
    function: Callable[..., Any],
    world: int,
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect_pool_loss: bool = False,
) -> list[Any]:
    """Calls a module-level function on every rank of the pool of `world`; returns what each rank returned.

    Raises DistributedFailure with the report, or pytest's skip if a rank skipped. A rank that died under
    `expect_pool_loss` has None.
    """
    arguments = {}
    for name, value in (kwargs or {}).items():
        try:
            arguments[name] = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"{function.__qualname__}: argument {name!r} cannot be sent to the workers: {error}"
            ) from error
    target = _Target(inspect.getfile(function), function.__module__, function.__qualname__)
    return _pool(world).call(target, arguments, scaled(timeout), dict(env or {}), expect_pool_loss)


def note(text: str) -> None:
    """A line for the end of pytest's report. In a distributed test every rank that calls this adds one."""
    notes.append(text)


def in_fresh_process(
    source: str,
    nproc: int = 1,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60.0,
    *,
    torchrun: bool | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `source` as a script in an empty folder: with plain python for nproc=1, else with torchrun.

    Nothing of the caller's distributed environment or ZEROSHARDER_* reaches it; `env` adds variables (None
    removes one). The exit status is the caller's business. A timeout raises DistributedFailure, with stacks.
    """
    folder = Path(tempfile.mkdtemp(prefix="fresh-", dir=_folder()))
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    variables = _base_environment()
    variables["PYTHONPATH"] = os.pathsep.join(_own_paths())
    variables["PYTHONFAULTHANDLER"] = "1"  # SIGABRT then prints the stacks
    for name, value in (env or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    command = [sys.executable]
    if torchrun if torchrun is not None else nproc > 1:
        command += ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command.append(str(script))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt at the keyboard is the parent's to handle
    )
    limit = scaled(timeout)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end_tree(process.pid, ask=signal.SIGABRT)
        out, err = process.communicate()
        raise DistributedFailure(
            f"script had not finished after {limit:g} s\n{_indent(script.read_text(), 'script')}\n"
            f"{_indent(out, 'stdout')}\n{_indent(err, 'stderr')}"
        ) from None
    except BaseException:
        _end_tree(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# -- the parent's side --

notes: list[str] = []
_pools: dict[int, _Pool] = {}  # least recently used first
_root: Path | None = None


def use_folder(folder: Path) -> None:
    """Logs, stacks and scripts go below `folder` from now on (conftest gives pytest's)."""
    global _root
    _root = folder


def shutdown() -> None:
    """Ends all pools."""
    for world in list(_pools):
        _pools.pop(world).close()


atexit.register(shutdown)


def _folder() -> Path:
    global _root
    if _root is None:
        _root = Path(tempfile.mkdtemp(prefix="zerosharder-tests-"))
        atexit.register(shutil.rmtree, _root, ignore_errors=True)
    return _root


def _pool(world: int) -> _Pool:
    pool = _pools.pop(world, None)
    if pool is not None and pool.worn:
        pool.close()
        pool = None
    if pool is None:
        for other in [w for w in _pools if world >= LARGE_WORLD and w >= LARGE_WORLD]:
            _pools.pop(other).close()
        while len(_pools) >= MAX_POOLS:
            _pools.pop(next(iter(_pools))).close()
        pool = _Pool(world)
    _pools[world] = pool
    return pool


@dataclasses.dataclass(frozen=True)
class _Target:
    path: str
    module: str
    qualname: str


@dataclasses.dataclass
class _Reply:
    """What a worker answers to a message."""

    kind: str  # ok, error, skip
    text: str = ""  # traceback or reason
    value: bytes = b""  # pickled return value
    notes: list[str] = dataclasses.field(default_factory=list)
    worn: bool = False


class _Worker:
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

    def receive(self) -> _Reply | None:
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
            _end_tree(self.process.pid)
            self.process.wait()
        self.release()

    def release(self) -> None:
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class _Pool:
    """The processes of one world size and the protocol with them: start; load, call, reset for each test."""

    started = 0  # pools so far, for folder names

    def __init__(self, world: int) -> None:
        _Pool.started += 1
        self.world = world
        self.worn = False
        self.calls = 0
        self.loaded: set[str] = set()
        folder = _folder() / f"pool{_Pool.started}-W{world}"
        environment = _base_environment()
        environment["PYTHONPATH"] = os.pathsep.join(_own_paths())
        self.workers: list[_Worker] = []
        try:
            for rank in range(world):
                mine = environment | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                }
                self.workers.append(_Worker(rank, folder / f"rank{rank}", mine))
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
        target: _Target,
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
        self, what: str, timeout: float, *, only: _Worker | None = None, deaths_allowed: bool = False
    ) -> dict[int, _Reply]:
        """Waits for all answers; a missing, bad or dead rank raises the report."""
        waiting = {only.connection: only} if only else {w.connection: w for w in self.workers}
        replies: dict[int, _Reply] = {}
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
            raise DistributedFailure(self._report(what, timeout, failed, replies, dead))
        for worker in self.workers:
            if output := worker.new_output():
                print(_indent(output, f"rank {worker.rank} printed"))
        return replies

    def _report(
        self, what: str, timeout: float, failed: bool, replies: dict[int, _Reply], dead: dict[int, int]
    ) -> str:
        late = [w.rank for w in self.workers if w.rank not in replies and w.rank not in dead]
        errors = [rank for rank, reply in replies.items() if reply.kind == "error"]
        lines = []
        if errors:
            lines.append(f"{what}: rank {_ranks(errors)} failed")
        if dead:
            lines.append(f"{what}: rank {_ranks(dead)} died")
        if late and not failed:
            lines.append(f"{what}: rank {_ranks(late)} had not finished after {timeout:g} s")
        stacks = self._stacks()
        for worker in self.workers:
            rank = worker.rank
            if rank in dead:
                lines.append(f"-- rank {rank} died: {_exit_reason(dead[rank])}")
            elif rank in errors:
                lines.append(f"-- rank {rank} failed:\n{replies[rank].text.rstrip()}")
            else:
                state = "had finished" if rank in replies else "was still running"
                lines.append(f"-- rank {rank} {state}; its stacks:\n{stacks.get(rank, '(none)').rstrip()}")
            if output := worker.new_output():
                lines.append(_indent(output[-LOG_TAIL:], f"rank {rank} printed"))
        return "\n".join(lines)

    def _stacks(self) -> dict[int, str]:
        """All threads of all living ranks, as faulthandler writes them on SIGUSR1."""
        alive = [w for w in self.workers if w.process.poll() is None and w.stacks.exists()]
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


def _pipe() -> tuple[Connection, int]:
    import socket

    parent, child = socket.socketpair()
    return Connection(parent.detach()), child.detach()


def _base_environment() -> dict[str, str]:
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


def _own_paths() -> list[str]:
    """What a bare interpreter lacks in sys.path: the tests, and the package where it is not installed."""
    prefixes = {sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()}
    paths = [os.path.abspath(p) for p in sys.path]
    paths = [p for p in paths if not any(p == q or p.startswith(q + os.sep) for q in prefixes)]
    return list(dict.fromkeys([*paths, str(TESTS)]))


def _end_tree(pid: int, ask: signal.Signals | None = None) -> None:
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


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


def _indent(text: str, title: str) -> str:
    return f"{title}:\n{textwrap.indent(text.rstrip(), '    ')}"


# -- the worker's side --

# Arguments: this folder, the pipe's descriptor, the file for stacks.
_WORKER_SOURCE = """
import sys
sys.path.insert(0, sys.argv[1])
import harness
harness._worker_main(*sys.argv[2:])
"""


def _worker_main(descriptor: str, stacks: str) -> None:
    os.set_inheritable(int(descriptor), False)
    connection = Connection(int(descriptor))
    stack_file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it for as long as the process lives)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_exit_with_parent, name="harness-parent-watch", daemon=True).start()
    try:
        session = _Session()
        while True:
            kind, *arguments = pickle.loads(connection.recv_bytes())
            if kind == "exit":
                break
            reply = session.answer(kind, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(pickle.dumps(reply))
    except (EOFError, OSError):
        pass  # the parent is gone
    os._exit(0)  # without destructors: the peers leave at the same moment, and gloo would complain


def _exit_with_parent() -> None:
    os.read(0, 1)  # returns when the parent's end of the pipe closes
    os._exit(1)


class _Session:
    """The state of one worker."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.modules: dict[str, types.ModuleType] = {}
        self.folder = os.getcwd()
        self.store: Any = None
        self.group: Any = None
        self.world = 1
        self.threads = Counter(t.name for t in threading.enumerate())  # names and most threads seen of each

    def answer(self, kind: str, arguments: list[Any]) -> _Reply:
        import pytest

        notes.clear()
        try:
            reply: _Reply = getattr(self, "_do_" + kind)(*arguments)
        except pytest.skip.Exception as skip:
            reply = _Reply("skip", str(skip))
        except BaseException as error:  # also pytest.fail and SystemExit
            # The first two entries are this function and _do_*; what the test did begins after them.
            tb = error.__traceback__
            for _ in range(2):
                tb = tb.tb_next if tb is not None and tb.tb_next is not None else tb
            text = "".join(traceback.format_exception(type(error), error, tb))
            reply = _Reply("error", text)
        reply.notes = list(notes)
        return reply

    def _do_store(self, world: int) -> _Reply:
        self.store = self.dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        return _Reply("ok", str(self.store.port))

    def _do_join(self, rank: int, world: int, port: str) -> _Reply:
        from datetime import timedelta

        limit = timedelta(seconds=GROUP_SECONDS)
        os.environ["MASTER_PORT"] = port
        self.world = world
        if self.store is None:
            self.store = self.dist.TCPStore("127.0.0.1", int(port), world, is_master=False)
        self.torch.set_num_threads(1)
        self.dist.init_process_group("gloo", store=self.store, rank=rank, world_size=world, timeout=limit)
        self.group = self.dist.group.WORLD
        self.environment = dict(os.environ)
        self._settle()
        return _Reply("ok")

    def _do_load(self, path: str, name: str) -> _Reply:
        self.modules[path] = _load(path, name)
        self._settle()
        # What is alive now stays alive; the collections after each test need not look at it again.
        gc.collect()
        gc.freeze()
        return _Reply("ok")

    def _do_call(
        self, call: int, path: str, qualname: str, arguments: dict[str, bytes], env: dict[str, str]
    ) -> _Reply:
        function: Any = self.modules[path]
        for part in qualname.split("."):
            owner, function = function, getattr(function, part)
        function = getattr(function, "__distributed__", function)
        if inspect.isclass(owner):
            function = functools.partial(function, owner())
        os.environ.update(env)
        kwargs = {name: pickle.loads(value) for name, value in arguments.items()}
        value = function(**kwargs)
        return _Reply("ok", value=b"" if value is None else pickle.dumps(value))

    def _do_reset(self, call: int) -> _Reply:
        self._settle()
        torch, dist = self.torch, self.dist
        left = []
        module = torch.nn.modules.module
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_global_") and name.endswith("_hooks") and value:
                left.append(f"torch.nn.modules.module.{name} holds {list(value.values())}")
        if not dist.is_initialized() or dist.group.WORLD is not self.group:
            left.append("the default process group is gone or another one (expect_pool_loss=True allows it)")
        if left:
            raise AssertionError("the test left behind: " + "; ".join(left))
        # All ranks are idle here, so every collective of the test must be over. If one is not, this meets it,
        # and hangs, fails or returns a wrong sum.
        token = torch.tensor([call])
        dist.all_reduce(token)
        if token.item() != call * self.world:
            raise AssertionError(f"the test left collectives out of step: a check summed {token.item()}")
        threads = Counter(t.name for t in threading.enumerate())
        if more := threads - self.threads:
            print(f"threads that stay alive after the test: {', '.join(sorted(more.elements()))}")
        self.threads |= threads
        return _Reply("ok", worn=_worn())

    def _settle(self) -> None:
        """The state every test starts from."""
        torch = self.torch
        os.chdir(self.folder)
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        gc.collect()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        random.seed(0)
        torch.manual_seed(0)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(0)


def _load(path: str, name: str) -> types.ModuleType:
    """Imports a test file by its path, under the name it has in the parent: pickled arguments refer to it."""
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(1, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(_compile(path), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _compile(path: str) -> types.CodeType:
    """Code of a test file, its asserts rewritten by pytest so that a failure shows the values."""
    source = Path(path).read_bytes()
    tree = ast.parse(source, path)
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:  # private to pytest; plain asserts will do
        pass
    else:
        rewrite_asserts(tree, source, path)
    return compile(tree, path, "exec", dont_inherit=True)


def _worn() -> bool:
    """Whether tests left so many groups behind that a fresh process is due."""
    import resource

    try:
        files = len(os.listdir("/proc/self/fd"))
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        return False
    return files > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 or threads > MAX_THREADS
