"""A rank that stops talking (it raised, was killed, or is elsewhere) becomes a DesyncError that names it on the others.

The settings in use here wait for two or three seconds only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed, in_fresh_process
from harness.processes import base_environment, own_paths
from parity import assert_same, full_grads
from tiny import features, mlp, rank
from torch import Tensor, nn

import zerosharder as zs
from zerosharder.errors import DesyncError

SHORT = zs.Config(timeout=2)


def _works(model: nn.Module) -> None:
    model(features(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def _one_rank_only(act: Callable[[nn.Module], None], *parts: str) -> None:
    """Rank 0 calls ``act``, rank 1 does something else; rank 0 is told."""
    model = zs.shard(mlp(), config=SHORT)
    _works(model)
    if rank() == 0:
        with pytest.raises(DesyncError) as caught:
            act(model)
        text = str(caught.value)
        assert caught.value.culprits == (1,), text
        for part in ("rank 0", "rank 1: is not waiting", *parts):
            assert part in text, text
    dist.barrier()


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a_forward_on_one_rank_only() -> None:
    _one_rank_only(lambda model: model(features(1)), "gather of unit", "order so far")


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_full_params_on_one_rank_only() -> None:
    def act(model: nn.Module) -> None:
        with zs.full_params(model):
            pass

    _one_rank_only(act, "gather of unit", "full_params")


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a_backward_on_one_rank_only() -> None:
    model = zs.shard(mlp(), config=zs.Config(timeout=2, reshard="always"))
    loss = model(features(0)).sum()
    if rank() == 0:
        with pytest.raises(DesyncError) as caught:
            loss.backward()
        assert caught.value.culprits == (1,), caught.value
    dist.barrier()


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_different_modules_on_different_ranks() -> None:
    """Both wait, each for what the other does not send; both learn both orders."""
    model = zs.shard(mlp(), config=SHORT)
    first, second = (0, 1) if rank() == 0 else (1, 0)
    with pytest.raises(DesyncError) as caught:
        model.layers[first](features(0))
        model.layers[second](features(0))
    text = str(caught.value)
    assert "layers.0" in text and "layers.1" in text, text
    dist.barrier()


# -- a rank that fails --


class Fails(nn.Module):
    """Raises on rank 1 in the forward of its second layer, when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(4))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.armed and i == 2 and rank() == 1:
                raise ValueError("rank 1 ran out of luck")
            x = layer(x)
        return x


@pytest.mark.parametrize("prefetch", ["auto", 0, "1GiB"])
@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_an_exception_in_forward_on_one_rank(prefetch: Any) -> None:
    model = Fails()
    zs.shard(model, config=zs.Config(timeout=2, prefetch=prefetch))
    for step in range(2):
        model(features(step)).sum().backward()
    model.armed = True
    if rank() == 1:
        with pytest.raises(ValueError, match="out of luck"):
            model(features(2)).sum().backward()
    else:
        with pytest.raises(DesyncError) as caught:
            model(features(2)).sum().backward()
        text = str(caught.value)
        assert caught.value.culprits == (1,) and "rank 1: is not waiting" in text, text
    dist.barrier()


@distributed(world=3, timeout=30, expect_pool_loss=True)
def test_an_exception_on_one_of_three_ranks_reaches_both_others() -> None:
    model = Fails()
    zs.shard(model, config=SHORT)
    model(features(0)).sum().backward()
    model.armed = True
    if rank() == 1:
        with pytest.raises(ValueError, match="out of luck"):
            model(features(1)).sum().backward()
    else:
        with pytest.raises(DesyncError) as caught:
            model(features(1)).sum().backward()
        assert 1 in caught.value.culprits, caught.value
    dist.barrier()


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_an_exception_in_backward_on_one_rank() -> None:
    model = Fails()
    zs.shard(model, config=SHORT)
    model(features(0)).sum().backward()
    x = features(1).requires_grad_()
    hidden = model.layers[1](model.layers[0](x))

    def refuse(_: Tensor) -> None:
        raise ValueError("rank 1 ran out of luck")

    if rank() == 1:
        hidden.register_hook(refuse)
    loss = model.layers[3](model.layers[2](hidden)).sum()
    if rank() == 1:
        with pytest.raises(ValueError, match="out of luck"):
            loss.backward()
    else:
        with pytest.raises(DesyncError) as caught:
            loss.backward()
        assert caught.value.culprits == (1,), caught.value
    dist.barrier()


@distributed(world=2)
def test_forward_after_a_failed_backward_without_reset() -> None:
    model = zs.shard(mlp())

    def refuse(_: Tensor) -> None:
        raise ValueError("no")

    out = model(features(0)).sum()
    out.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        out.backward()
    model2 = zs.shard(mlp())
    model(features(1))  # the backward did not reach the model, so there is nothing to reset
    _works(model2)
    zs.reset(model)
    model(features(2)).sum().backward()
    model2.zero_grad()
    model2(features(2)).sum().backward()
    assert_same(full_grads(model), full_grads(model2))


KILLED = """
    import json, os, signal, sys, torch, torch.distributed as dist, zerosharder as zs
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        def forward(self, x, dies=False):
            for i, layer in enumerate(self.layers):
                if dies and i == 2 and dist.get_rank() == {victim}:
                    os.kill(os.getpid(), signal.{signal})
                x = layer(x)
            return x

    model = Model()
    zs.shard(model, config=zs.Config(timeout=3))
    for step in range(2):
        model(torch.ones(2, 8)).sum().backward()
    try:
        model(torch.ones(2, 8), dies=True).sum().backward()
    except zs_errors.DesyncError as error:
        with open(f"{folder}/{{dist.get_rank()}}", "w") as out:
            json.dump({{"text": str(error), "culprits": error.culprits}}, out)
        os._exit(0)
"""


def _kill(tmp_path: Any, victim: int, world: int, how: str) -> dict[int, dict[str, Any]]:
    """What the survivors say; plain processes, because torchrun would end them before they can."""

    source = "import zerosharder.errors as zs_errors\n" + textwrap.dedent(
        KILLED.format(victim=victim, folder=tmp_path, signal=how)
    )
    script = tmp_path / "script.py"
    script.write_text(source)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = base_environment() | {
        "PYTHONPATH": os.pathsep.join(own_paths()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store outlives any rank
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    outputs = {}
    try:
        for r, process in enumerate(processes):
            if r != victim:
                outputs[r] = process.communicate(timeout=60)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = {}
    for r, output in outputs.items():
        said = tmp_path / str(r)
        assert said.exists(), f"rank {r} raised no DesyncError:\n{output}"
        found[r] = json.loads(said.read_text())
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named(tmp_path, victim):
    said = _kill(tmp_path, victim, 2, "SIGKILL")
    (survivor,) = said
    assert said[survivor]["culprits"] == [victim], said
    assert f"rank {victim}: no answer" in said[survivor]["text"], said


def test_both_others_name_a_rank_that_is_killed(tmp_path):
    said = _kill(tmp_path, 1, 3, "SIGKILL")
    assert sorted(said) == [0, 2]
    for answer in said.values():
        assert 1 in answer["culprits"], said
        assert "rank 1: no answer; the process has ended or is frozen" in answer["text"], said


def test_a_rank_that_is_frozen_is_named(tmp_path):
    said = _kill(tmp_path, 1, 2, "SIGSTOP")
    assert said[0]["culprits"] == [1] and "rank 1: no answer" in said[0]["text"], said


def test_the_job_ends_when_a_rank_is_killed_under_torchrun(tmp_path):
    done = in_fresh_process(
        "import zerosharder.errors as zs_errors\n"
        + "\n".join(
            line[4:] for line in KILLED.format(victim=1, folder=tmp_path, signal="SIGKILL").splitlines()
        ),
        nproc=2,
        timeout=90,
    )
    assert done.returncode != 0
    assert f"exitcode  : -{int(signal.SIGKILL)}" in done.stderr or "Signal 9" in done.stderr, done.stderr[
        -2000:
    ]
