"""Accumulation, aliasing and replicas never change a gradient."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params, is_bitwise, reference_ddp
from tiny import Reference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerosharder as zs
from zerosharder.engine.collectives import PairwiseExchange
from zerosharder.engine.unit import Unit

BOUND = 1e-6


def _norm(model: nn.Module, p: float = 2.0) -> Tensor:
    """The norm that torch's clipping reports; clips nothing."""
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=p)
    return found.full_tensor() if isinstance(found, DTensor) else found


def _accumulate(
    param_dtype: str, micro: int, no_sync: bool, zero: str, steps: int = 2, rtol: float = BOUND
) -> None:
    """Steps of `micro` backwards each against a reference by hand: gradients, their norm, weights."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[param_dtype]
    reference = Reference(tiny.gpt(depth=2), dtype)
    by_hand = tiny.OPTIMIZERS["sgd_momentum"](reference.masters.parameters())
    model = tiny.gpt(depth=2)
    optimizer = tiny.OPTIMIZERS["sgd_momentum"](model.parameters())
    zs.shard(model, optimizer, config=zs.Config(param_dtype=param_dtype))
    for step in range(steps):
        for i in range(micro):
            keep = no_sync and i < micro - 1
            expected = tiny.gpt_loss(reference.model, step, i)
            (reference.accumulate if keep else reference.backward)(expected)
            with zs.no_sync(model) if keep else contextlib.nullcontext():
                tiny.gpt_loss(model, step, i).backward()
        assert_same(full_grads(model), reference.grads(), rtol=rtol, what=f"gradients of step {step}")
        assert_same(
            _norm(model), _norm(reference.masters), rtol=max(rtol, BOUND), what=f"norm of step {step}"
        )
        by_hand.step()
        optimizer.step()
        reference.refresh()
        if zero == "in between":
            by_hand.zero_grad()
            optimizer.zero_grad()
        elif zero == "to zeros":
            by_hand.zero_grad(set_to_none=False)
            optimizer.zero_grad(set_to_none=False)
    assert_same(full_params(model), reference.params(), rtol=rtol, what="weights")


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("micro", [1, 2, 4])
@distributed(world=2)
def test_b1_accumulation(micro: int, no_sync: bool, param_dtype: str) -> None:
    _accumulate(param_dtype, micro, no_sync, "in between")


@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("zero", ["never", "to zeros"])
@distributed(world=2)
def test_b2_accumulation_without_zero_grad(zero: str, no_sync: bool) -> None:
    """A new mean is added to what is there; zeros in place stay in place."""
    _accumulate("fp32", 2, no_sync, zero, steps=3)


@distributed(world=2)
def test_b2_the_gradient_object_stays_when_it_is_added_to() -> None:
    model = zs.shard(tiny.mlp())
    model(tiny.features(0)).sum().backward()
    first = [p.grad for p in model.parameters()]
    values = [g.full_tensor().clone() for g in first]
    model(tiny.features(0)).sum().backward()
    for p, g, value in zip(model.parameters(), first, values, strict=True):
        assert p.grad is g
        assert_same(g.full_tensor(), 2 * value, rtol=BOUND)


@distributed(world=2)
def test_b2_a_gradient_that_the_user_keeps_does_not_change() -> None:
    """zero_grad drops the reference; the next backward must not write into what somebody still holds."""
    model = zs.shard(tiny.mlp())
    model(tiny.features(0)).sum().backward()
    kept = [p.grad for p in model.parameters()]
    values = [g.to_local().clone() for g in kept]
    model.zero_grad()
    model(tiny.features(1)).sum().backward()
    for p, g, value in zip(model.parameters(), kept, values, strict=True):
        assert_same(g.to_local(), value, what="the gradient that was kept")
        assert p.grad is not g
    assert any(not is_bitwise(p.grad.to_local(), v) for p, v in zip(model.parameters(), values, strict=True))


@distributed(world=2)
def test_b2_a_gradient_that_the_user_assigns_is_added_to() -> None:
    plain = tiny.mlp()
    model = zs.shard(tiny.mlp())
    for net in (plain, model):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        net(tiny.features(0)).square().sum().backward()
    for p in plain.parameters():
        p.grad -= 1
    average_grads(plain)
    for p in plain.parameters():
        p.grad += 1
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND)


@contextlib.contextmanager
def _slow_messages(seed: int, seconds: float = 2e-3) -> Iterator[None]:
    """Every gather and reduction of this rank is delayed at random, before it is issued."""
    rng = random.Random(seed * 1000 + dist.get_rank())
    originals = PairwiseExchange.gather, PairwiseExchange.reduce

    def gather(self: PairwiseExchange, *args: object):
        time.sleep(rng.random() * seconds)
        return originals[0](self, *args)

    def reduce(self: PairwiseExchange, *args: object):
        time.sleep(rng.random() * seconds)
        return originals[1](self, *args)

    PairwiseExchange.gather, PairwiseExchange.reduce = gather, reduce
    try:
        yield
    finally:
        PairwiseExchange.gather, PairwiseExchange.reduce = originals


@distributed(world=4)
def test_b3_replicas_under_delays() -> None:
    """2x2 mesh, 30 backwards whose reductions come late: the same bits as without delays."""

    def run() -> list[Tensor]:
        model = tiny.mlp(16, 4)
        zs.shard(model, mesh=init_device_mesh("cpu", (2, 2)))
        found = []
        for step in range(30):
            model(tiny.features(step, 16)).square().mean().backward()
            found += [p.grad.to_local().clone() for p in model.parameters()]
            model.zero_grad()
        return found

    expected = run()
    with _slow_messages(3):
        assert_same(run(), expected)


@distributed(world=2)
def test_b4_gradients_do_not_alias_under_slow_reductions() -> None:
    """While a reduction is under way the heap is churned: nobody may get the memory that is being sent."""
    expected = None
    original = Unit.start_reduce
    for churn in (False, True):

        def start_reduce(self: Unit, churn: bool = churn) -> None:
            original(self)
            if churn:
                junk = [torch.full((n,), float("nan")) for n in (64, 256, 1024, 4096, 16384, 65536) * 3]
                time.sleep(1e-3)
                del junk

        Unit.start_reduce = start_reduce
        try:
            model = tiny.gpt()
            optimizer = tiny.sgd(model)
            zs.shard(model, optimizer)
            losses = tiny.train(model, optimizer, 10)
        finally:
            Unit.start_reduce = original
        found = [*losses, *full_params(model).values()]
        if expected is None:
            expected = found
    assert_same(found, expected)


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("micro", [1, 2, 4])
@distributed(world=1)
def test_b6_accumulation_in_a_world_of_one(micro: int, no_sync: bool, param_dtype: str) -> None:
    _accumulate(param_dtype, micro, no_sync, "in between")


@distributed(world=4)
def test_b8_replicas_train_as_one() -> None:
    """Shard group 2 x replicate 2, 20 steps: a secondary copy that is not refreshed would show at once."""
    plain = tiny.gpt(depth=2)
    expected = tiny.train(reference_ddp(plain), tiny.adamw(plain), 20)
    for mesh in (None, init_device_mesh("cpu", (2, 2))):
        model = tiny.gpt(depth=2)
        optimizer = tiny.adamw(model)
        zs.shard(model, optimizer, mesh=mesh)
        losses = tiny.train(model, optimizer, 20)
        assert_same(losses, expected, rtol=BOUND, what=f"mesh {mesh}")
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@distributed(world=3)
def test_b10_tied_head_that_does_not_divide(param_dtype: str) -> None:
    """Vocabulary 10 on 3 ranks (4, 4 and 2 rows): every rank's rows train."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[param_dtype]
    torch.manual_seed(1)
    reference = Reference(tiny.GPT(width=8, depth=2, vocab=10, tied=True), dtype)
    model = zs.shard(_tied10(), config=zs.Config(param_dtype=param_dtype))
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer)
    by_hand = tiny.sgd(reference.masters)
    rows = {0: slice(0, 4), 1: slice(4, 8), 2: slice(8, 10)}[dist.get_rank()]
    for step in range(2):
        batch = tiny.tokens(step, vocab=10)
        reference.backward(tiny.token_loss(reference.model(batch), batch))
        tiny.token_loss(model(batch), batch).backward()
        before = model.embed.weight.to_local().detach().clone()
        by_hand.step()
        optimizer.step()
        by_hand.zero_grad()
        optimizer.zero_grad()
        reference.refresh()
        local = model.embed.weight.to_local()
        assert local.shape[0] == rows.stop - rows.start
        assert (local != before).any(dim=1).all(), "every row of this rank has changed"
        assert_same(local, reference.masters.embed.weight[rows], rtol=BOUND, what=f"rows after step {step}")
    assert model.head.weight is model.embed.weight


def _tied10() -> nn.Module:
    torch.manual_seed(1)
    return tiny.GPT(width=8, depth=2, vocab=10, tied=True)


@distributed(world=2)
def test_b13_no_sync_saves_reductions() -> None:
    """Accumulation 4 with no_sync sends the gradients of each unit once: counted at the transport."""
    model = tiny.gpt()
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer)
    calls = 0
    original = PairwiseExchange.reduce

    def count(self: PairwiseExchange, *args: object):
        nonlocal calls
        calls += 1
        return original(self, *args)

    PairwiseExchange.reduce = count
    try:
        counted = []
        for no_sync in (False, True):
            calls = 0
            for i in range(4):
                with model.no_sync() if no_sync and i < 3 else contextlib.nullcontext():
                    tiny.gpt_loss(model, 0, i).backward()
            counted.append(calls)
    finally:
        PairwiseExchange.reduce = original
    units = zs.stats(model).units
    assert counted == [4 * units, units]


@distributed(world=2)
def test_b13_never_reshard_saves_gathers_under_no_sync() -> None:
    """With reshard=never the weights of the first micro batch serve all of them."""
    model = tiny.gpt()
    zs.shard(model, config=zs.Config(reshard="never"))
    for i in range(4):
        with model.no_sync() if i < 3 else contextlib.nullcontext():
            tiny.gpt_loss(model, 0, i).backward()
    stats = zs.stats(model)
    assert stats.gathers == stats.units
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@distributed(world=2, timeout=120)
def test_b15_accumulation_under_random_delays(no_sync: bool) -> None:
    """50 repetitions; a reduction that races with the next backward into the same buffer would differ."""
    expected = None
    for seed in range(50):
        model = tiny.mlp(16, 3)
        zs.shard(model)
        with _slow_messages(seed, 1e-3) if seed else contextlib.nullcontext():
            for i in range(3):
                with model.no_sync() if no_sync and i < 2 else contextlib.nullcontext():
                    model(tiny.features(i, 16)).square().mean().backward()
        found = [p.grad.to_local() for p in model.parameters()]
        if expected is None:
            expected = found
        assert_same(found, expected, what=f"repetition {seed}")
