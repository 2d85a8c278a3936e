"""Counters and the event log against closed forms: gathers, reductions, frees, bytes, memory."""

from __future__ import annotations

import pytest
import tiny
import torch
from harness import distributed
from runs import CHECKPOINT, RESHARD, engine
from tiny import adamw, gpt, gpt_loss, train
from torch import Tensor, nn

import zerosharder as zs


def _counted(reshard: str, prefetch: str, optimizer_steps: int = 4):
    """Gathers, reductions and frees of one step once the order is known, and the units."""
    model = gpt()
    optimizer = adamw(model)
    units = [tiny.Block, nn.Embedding]
    zs.shard(model, optimizer, units=units, config=zs.Config(reshard=reshard, prefetch=prefetch))
    train(model, optimizer, optimizer_steps)
    before = zs.stats(model)
    train(model, optimizer, 1, first=optimizer_steps)
    after = zs.stats(model)
    return model, before, after


@pytest.mark.parametrize("prefetch", ["0", "auto", "1GB"])
@distributed(world=2)
def test_counters_of_a_step(prefetch: str) -> None:
    """Closed form. Units: embedding, whose backward reads no weight, three blocks, and the root.

    always: all in the forward, all but the embedding again in the backward. auto: the root and the last block stay.
    """
    once = 5
    twice = 2 * once - 1
    for reshard, gathers in (("always", twice), ("auto", twice - 2), ("never", once)):
        model, before, after = _counted(reshard, prefetch)
        assert after.units == once
        assert after.gathers - before.gathers == gathers, reshard
        assert after.frees - before.frees == gathers, reshard
        assert after.reduces - before.reduces == once, reshard
        assert (after.passes - before.passes, after.backwards - before.backwards) == (1, 1)
        assert after.deviations == 0
        assert (after.prefetched > before.prefetched) == (prefetch != "0"), reshard
        assert after.parameters == sum(p.numel() for p in model.parameters())
        log = list(engine(model).runtime.log)
        assert sum(event.kind == "gather" for event in log) == after.gathers
        assert sum(event.kind == "reduce" for event in log) == after.reduces


@distributed(world=(2, 3))
def test_counted_bytes(world: int) -> None:
    """Bytes received in a step: (W - 1) / W of each gather and of each gradient, apart from padding."""
    model, before, after = _counted("never", "0")
    numel = sum(p.numel() for p in model.parameters())
    for what in ("gather", "reduce"):
        found = after.bytes_received[what] - before.bytes_received[what]
        exact = 4 * numel * (world - 1) / world
        assert exact <= found <= 1.2 * exact + 5 * 4096 * 4, (what, found, exact)


@CHECKPOINT
@distributed(world=2)
def test_one_reduction_for_each_unit_in_a_backward(checkpoint: str | None) -> None:
    """Also for a unit that is used several times, and however many outputs and parameters get a gradient."""
    model = gpt(shared=True, checkpoint=checkpoint, tied=True)
    optimizer = adamw(model)
    zs.shard(model, optimizer, units=[tiny.Block])
    for step in range(3):
        before = zs.stats(model)
        train(model, optimizer, 1, first=step)
        after = zs.stats(model)
        assert after.units == 2
        assert after.reduces - before.reduces == 2
    kinds = [(event.kind, event.unit) for event in engine(model).runtime.log if event.kind == "reduce"]
    assert kinds == [("reduce", "blocks.0"), ("reduce", "")] * 3


@CHECKPOINT
@distributed(world=2)
def test_backward_frees_in_time(checkpoint: str | None) -> None:
    """From the log: in the backward of a block nothing but that block and the root is gathered."""
    model = gpt(depth=5, checkpoint=checkpoint)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(prefetch=0, reshard="always"))
    train(model, optimizer, 3)
    gathered: set[str] = set()
    for event in engine(model).runtime.log:
        if event.kind == "gather":
            gathered.add(event.unit)
            assert len(gathered - {""}) <= 1, gathered
        elif event.kind == "free":
            gathered.remove(event.unit)
    assert not gathered


@RESHARD
@CHECKPOINT
@distributed(world=2)
def test_steady_state_allocates_nothing(checkpoint: str | None, reshard: str) -> None:
    from zerosharder.engine import slots
    from zerosharder.offload import memory

    model = gpt(checkpoint=checkpoint)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))

    def step(number: int) -> None:
        with model.no_sync():
            gpt_loss(model, number, 1).backward()
        train(model, optimizer, 1, first=number)
        with torch.no_grad():
            gpt_loss(model, number, 2)

    for number in range(3):
        step(number)
    runtime = engine(model).runtime
    settled = runtime.pool.nbytes
    original = memory.host_buffer

    def refuse(nbytes: int) -> Tensor:
        raise AssertionError(f"{nbytes} bytes are allocated in steady state")

    slots.host_buffer = memory.host_buffer = refuse
    try:
        for number in range(3, 7):
            step(number)
            assert runtime.pool.nbytes == settled
            assert runtime.pool.in_use == 0
    finally:
        slots.host_buffer = memory.host_buffer = original


@distributed(world=2)
def test_memory_is_a_share_of_the_model() -> None:
    """Between steps a rank holds its rows of weights and gradients; the largest pool is two units and staging."""
    model = gpt(depth=9)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard="always"))
    train(model, optimizer, 3)
    stats = zs.stats(model)
    nbytes = 4 * stats.parameters
    host = stats.current_bytes["host"]
    assert host["gathered"] == 0
    for role in ("shards", "gradients"):
        assert nbytes / 2 <= host[role] <= nbytes / 2 * 1.25 + 7 * 8192, role
    largest = max(unit.nbytes for unit in engine(model).units)
    assert stats.peak_bytes["host"]["gathered"] < 6 * largest < nbytes
