"""What works with an optimizer: schedulers, scalers, hooks, closures, later groups."""

from __future__ import annotations

from typing import Any

import torch
from harness import distributed
from parity import assert_same
from torch import Tensor
from twins import Optimizer, Twins, factory, whole_of


def _scheduled(twins: Twins, scheduler: Any, other: Any) -> None:
    assert scheduler.optimizer is twins.optimizer
    for step in range(3):
        twins.step(step)
        twins.assert_equal()
        scheduler.step()
        other.step()
        assert (
            scheduler.get_last_lr() == other.get_last_lr() == [g["lr"] for g in twins.optimizer.param_groups]
        )


def _schedule(optimizer: Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


@distributed(world=2)
def test_a_scheduler_attached_after(world: int) -> None:
    twins = Twins(factory("adamw"), world, grouped=True)
    _scheduled(twins, _schedule(twins.optimizer), _schedule(twins.reference))


@distributed(world=2)
def test_a_scheduler_attached_before(world: int) -> None:
    attached = []

    def make(params: Any) -> Optimizer:
        optimizer = factory("adamw")(params)
        attached.append(_schedule(optimizer))
        return optimizer

    twins = Twins(make, world, grouped=True)
    _scheduled(twins, *attached)


@distributed(world=2)
def test_grad_scaler_skips_on_every_rank_what_overflows_on_one(world: int) -> None:
    twins = Twins(factory("adamw"), world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    rank = torch.distributed.get_rank()
    for step in range(5):
        twins.optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        x = torch.randn(2, 8)
        if step == 2 and rank == 1:
            x[0, 0] = float("inf")
        before = {n: whole_of(p).clone() for n, p in twins.model.named_parameters()}
        scaler.scale((twins.model(x) ** 2).sum()).backward()
        scaler.unscale_(twins.optimizer)
        twins.hand_over()
        scaler.step(twins.optimizer)
        scaler.update()
        if step == 2:
            after = {n: whole_of(p) for n, p in twins.model.named_parameters()}
            assert_same(after, before, what="a step that overflowed")
            assert scaler.get_scale() == 64.0, "doubled by two good steps, halved by this one"
        else:
            twins.reference.step()
            twins.assert_equal()


@distributed(world=2)
def test_grad_scaler_of_a_fused_step(world: int) -> None:
    """A fused step unscales by itself, from optimizer.grad_scale and optimizer.found_inf."""
    twins = Twins(factory("adamw-fused"), world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        twins.optimizer.zero_grad()
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        scaler.scale((twins.model(torch.randn(2, 8)) ** 2).sum()).backward()
        for name, param in twins.model.named_parameters():
            twins.whole[name].grad = None if param.grad is None else whole_of(param.grad) / 64.0
        scaler.step(twins.optimizer)
        scaler.update()
        twins.reference.step()
        twins.assert_equal(rtol=1e-6)


def test_hooks_and_closures():
    twins = Twins(factory("adamw"), 1)
    calls = []
    twins.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    twins.optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        calls.append("closure")
        twins.optimizer.zero_grad()
        out = twins.model(torch.ones(2, 8)).float().pow(2).sum()
        out.backward()
        twins.hand_over()
        return out

    loss = twins.optimizer.step(closure)
    twins.reference.step()
    assert loss.item() > 0 and calls == ["pre", "closure", "post"]
    twins.assert_equal()


def test_a_group_added_later():
    twins = Twins(lambda params: torch.optim.AdamW(list(params)[:4], lr=1e-2), 1)
    twins.step(0)
    for optimizer, params in (
        (twins.optimizer, twins.model.parameters()),
        (twins.reference, twins.whole.values()),
    ):
        optimizer.add_param_group({"params": list(params)[4:], "lr": 0.1})
    for step in (1, 2):
        twins.step(step)
        twins.assert_equal()
