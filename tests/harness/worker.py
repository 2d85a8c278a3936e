"""The worker's side: one rank, which runs what the parent sends and puts its state back after each test."""

from __future__ import annotations

import ast
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import types
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.protocol import GROUP_SECONDS, Reply, notes

MAX_THREADS = 300  # a worker with more (groups that tests left behind) is replaced before the next test


def main(descriptor: str, stacks: str) -> None:
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

    def answer(self, kind: str, arguments: list[Any]) -> Reply:
        import pytest

        notes.clear()
        try:
            reply: Reply = getattr(self, "_do_" + kind)(*arguments)
        except pytest.skip.Exception as skip:
            reply = Reply("skip", str(skip))
        except BaseException as error:  # also pytest.fail and SystemExit
            # The first two entries are this function and _do_*; what the test did begins after them.
            tb = error.__traceback__
            for _ in range(2):
                tb = tb.tb_next if tb is not None and tb.tb_next is not None else tb
            text = "".join(traceback.format_exception(type(error), error, tb))
            reply = Reply("error", text)
        reply.notes = list(notes)
        return reply

    def _do_store(self, world: int) -> Reply:
        self.store = self.dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        return Reply("ok", str(self.store.port))

    def _do_join(self, rank: int, world: int, port: str) -> Reply:
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
        return Reply("ok")

    def _do_load(self, path: str, name: str) -> Reply:
        self.modules[path] = _load(path, name)
        self._settle()
        # What is alive now stays alive; the collections after each test need not look at it again.
        gc.collect()
        gc.freeze()
        return Reply("ok")

    def _do_call(
        self, call: int, path: str, qualname: str, arguments: dict[str, bytes], env: dict[str, str]
    ) -> Reply:
        function: Any = self.modules[path]
        for part in qualname.split("."):
            owner, function = function, getattr(function, part)
        function = getattr(function, "__distributed__", function)
        if inspect.isclass(owner):
            function = functools.partial(function, owner())
        os.environ.update(env)
        kwargs = {name: pickle.loads(value) for name, value in arguments.items()}
        value = function(**kwargs)
        return Reply("ok", value=b"" if value is None else pickle.dumps(value))

    def _do_reset(self, call: int) -> Reply:
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
        return Reply("ok", worn=_worn())

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
