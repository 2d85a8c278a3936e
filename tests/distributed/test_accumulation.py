"""Gradient accumulation, no_sync and clipping."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from harness import distributed
from parity import assert_same, full_grads, full_params, reference_ddp
from runs import BOUND, SIZES, STEPS, engine, plain_tensor
from tiny import Reference, adamw, gpt, gpt_loss, train

import zerosharder as zs


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("micro", "no_sync"), [(1, False), (3, False), (3, True)], ids=["1", "3-sync", "3-no_sync"]
)
@distributed(world=(2, 3))
def test_gradient_accumulation(world: int, micro: int, no_sync: bool, param_dtype: str) -> None:
    reference = Reference(gpt(), torch.bfloat16 if param_dtype == "bf16" else torch.float32)
    by_hand = adamw(reference.masters)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype=param_dtype))
    units = sum(unit.wants_grad for unit in engine(model).units)
    for step in range(3):
        before = zs.stats(model).reduces
        for i in range(micro):
            last = i == micro - 1
            expected = gpt_loss(reference.model, step, i) / micro
            if no_sync and not last:
                reference.accumulate(expected)
            else:
                reference.backward(expected)
            with model.no_sync() if no_sync and not last else nullcontext():
                loss = gpt_loss(model, step, i) / micro
                loss.backward()
            assert_same(loss, expected, what=f"loss {step}.{i}")
            if no_sync and not last:
                assert all(p.grad is None for p in model.parameters())
        assert zs.stats(model).reduces - before == units * (1 if no_sync else micro)
        assert_same(full_grads(model), reference.grads(), what=f"gradients of step {step}")
        for o in (by_hand, optimizer):
            o.step()
            o.zero_grad()
        reference.refresh()
    assert_same(full_params(model), reference.params(), what="weights")


@distributed(world=2)
def test_no_sync_is_that_of_ddp() -> None:
    plain = gpt()
    wrapped = reference_ddp(plain)
    model = zs.shard(gpt())
    for net, no_sync in ((wrapped, wrapped.no_sync), (model, functools.partial(zs.no_sync, model))):
        with no_sync():
            for i in range(2):
                gpt_loss(net, 0, i).backward()
        gpt_loss(net, 0, 2).backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(world=2)
def test_no_sync_around_the_forward_alone_still_reduces() -> None:
    """What counts is where the backward runs."""
    reference = Reference(gpt())
    reference.backward(gpt_loss(reference.model, 0))
    model = zs.shard(gpt())
    with model.no_sync():
        loss = gpt_loss(model, 0)
    loss.backward()
    assert_same(full_grads(model), reference.grads())


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=SIZES)
def test_clipping_by_torch(world: int, p: float) -> None:
    """More of it in cases/test_h_norms.py."""
    plain, model = gpt(tied=True), gpt(tied=True)
    wrapped = reference_ddp(plain)
    zs.shard(model)
    gpt_loss(wrapped, 0).backward()
    gpt_loss(model, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=p)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=p)
    assert_same(plain_tensor(found), expected, rtol=BOUND, what="norm")
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what="clipped gradients")


@distributed(world=2)
def test_clipped_training() -> None:
    plain, model = gpt(), gpt()
    by_hand, optimizer = adamw(plain), adamw(model)
    wrapped = reference_ddp(plain)
    zs.shard(model, optimizer)
    losses = []
    for net, o in ((wrapped, by_hand), (model, optimizer)):
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, net.parameters(), 0.1)
        losses.append(train(net, o, STEPS, after_backward=clip))
    assert_same(losses[1], losses[0], rtol=BOUND)
