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

import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.pool import pool_of
from harness.processes import base_environment, base_folder, end_tree, own_paths
from harness.protocol import Target, notes, scaled
from harness.report import DistributedFailure, indent


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
    target = Target(inspect.getfile(function), function.__module__, function.__qualname__)
    return pool_of(world).call(target, arguments, scaled(timeout), dict(env or {}), expect_pool_loss)


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
    folder = Path(tempfile.mkdtemp(prefix="fresh-", dir=base_folder()))
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    variables = base_environment()
    variables["PYTHONPATH"] = os.pathsep.join(own_paths())
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
        end_tree(process.pid, ask=signal.SIGABRT)
        out, err = process.communicate()
        raise DistributedFailure(
            f"script had not finished after {limit:g} s\n{indent(script.read_text(), 'script')}\n"
            f"{indent(out, 'stdout')}\n{indent(err, 'stderr')}"
        ) from None
    except BaseException:
        end_tree(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
