"""Several models, forwards and backwards in orders other than one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params, reference_ddp
from runs import BOUND, CHECKPOINT, RESHARD, under_ddp
from tiny import OPTIMIZERS, Reference, adamw, gpt, gpt_loss, train
from torch import Tensor, nn

import zerosharder as zs


def _gan(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return tiny.MLP(8, 2), nn.Sequential(tiny.MLP(8, 3), nn.Linear(8, 1))


def _gan_step(
    g: nn.Module, d: nn.Module, step: int, og: object, od: object, average: Callable[[], object]
) -> list[Tensor]:
    """One step of each player: the discriminator's on a detached sample, the generator's through it."""
    noise, real = tiny.features(step), tiny.features(step + 500) + 1
    fake = g(noise)
    loss_d = nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(fake.detach())).mean()
    loss_d.backward()
    average()
    od.step()
    od.zero_grad()
    og.zero_grad()
    loss_g = nn.functional.softplus(-d(g(noise))).mean()
    loss_g.backward()
    average()
    og.step()
    og.zero_grad()
    od.zero_grad()
    return [loss_d.detach(), loss_g.detach()]


@distributed(world=2)
def test_two_models_each_with_an_optimizer() -> None:
    expected, found = [], []
    g, d = _gan(3)
    og, od = adamw(g), adamw(d)

    def average() -> None:
        average_grads(g)
        average_grads(d)

    for step in range(6):
        expected += _gan_step(g, d, step, og, od, average)
    reference = [full_params(g), full_params(d)]
    g, d = _gan(3)
    og, od = adamw(g), adamw(d)
    zs.shard(g, og)
    zs.shard(d, od)
    for step in range(6):
        found += _gan_step(g, d, step, og, od, lambda: None)
    assert_same(found, expected, what="losses")
    assert_same(full_params(g), reference[0], what="generator")
    assert_same(full_params(d), reference[1], what="discriminator")


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
@distributed(world=2)
def test_two_models_with_one_optimizer(optimizer: str, when: str) -> None:
    """An encoder and a decoder trained together, the optimizer built before, between or after the two calls."""

    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return tiny.MLP(8, 2), tiny.MLP(8, 3)

    def run(a: nn.Module, b: nn.Module, o: torch.optim.Optimizer, average: bool) -> list[Tensor]:
        losses = []
        for step in range(6):
            x = tiny.features(step)
            loss = (b(a(x)) - x).square().mean()
            loss.backward()
            if average:
                average_grads(a)
                average_grads(b)
            o.step()
            o.zero_grad()
            losses.append(loss.detach())
        return losses

    a, b = build()
    expected = run(a, b, OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()]), average=True)
    reference = [full_params(a), full_params(b)]
    a, b = build()
    o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()]) if when == "before" else None
    zs.shard(a, o)
    if when == "between":
        o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()])
        zs.shard(a, o)
    zs.shard(b, o)
    if when == "after":
        o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()])
        zs.shard(a, o)
        zs.shard(b, o)
    assert_same(run(a, b, o, average=False), expected, what="losses")
    assert_same(full_params(a), reference[0], what="first model")
    assert_same(full_params(b), reference[1], what="second model")


@RESHARD
@distributed(world=2)
def test_evaluation_between_steps(reshard: str) -> None:
    expected, weights = under_ddp("adamw", 5)
    plain = gpt()
    by_hand = adamw(plain)
    wrapped = reference_ddp(plain)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))
    losses = []
    for step in range(5):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                model.eval()
                assert_same(
                    gpt_loss(model, 100 + step), gpt_loss(plain, 100 + step), what=f"evaluation {step}"
                )
                model.train()
        losses += train(model, optimizer, 1, first=step)
        train(wrapped, by_hand, 1, first=step)
    assert_same(losses, expected, what="losses")
    assert_same(full_params(model), weights, what="weights")


@pytest.mark.parametrize(
    "order", ["older first", "newer first", "together", "only the older", "only the newer"]
)
@CHECKPOINT
@distributed(world=2)
def test_backwards_after_several_forwards(checkpoint: str | None, order: str) -> None:
    def run(model: nn.Module, backward: Callable[[Tensor], None]) -> None:
        one, two = gpt_loss(model, 0), gpt_loss(model, 1)
        if order == "older first":
            backward(one)
            backward(two)
        elif order == "newer first":
            backward(two)
            backward(one)
        elif order == "together":
            backward(one + two)
        else:
            backward(one if order == "only the older" else two)

    reference = Reference(gpt(checkpoint=checkpoint))
    run(reference.model, reference.backward)
    model = zs.shard(gpt(checkpoint=checkpoint))
    run(model, Tensor.backward)
    bound = BOUND if order == "together" else 0.0
    assert_same(full_grads(model), reference.grads(), rtol=bound)
    # Nothing of it is left: a normal step follows.
    for p in model.parameters():
        p.grad = None
    for p in reference.masters.parameters():
        p.grad = None
    reference.backward(gpt_loss(reference.model, 2))
    gpt_loss(model, 2).backward()
    assert_same(full_grads(model), reference.grads(), what="the step after")


@RESHARD
@distributed(world=2)
def test_backward_twice_through_a_kept_graph(reshard: str) -> None:
    reference = Reference(gpt())
    expected = gpt_loss(reference.model, 0)
    reference.backward(expected, retain_graph=True)
    reference.backward(expected)
    model = zs.shard(gpt(), config=zs.Config(reshard=reshard))
    loss = gpt_loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(full_grads(model), reference.grads())


@distributed(world=2)
def test_gradients_by_autograd_grad_of_the_input() -> None:
    """torch.autograd.grad with respect to an input needs weights in the backward and leaves none a gradient."""
    x = tiny.features(0).requires_grad_()
    (expected,) = torch.autograd.grad(tiny.mlp()(x).square().sum(), x)
    model = zs.shard(tiny.mlp())
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert_same(found, expected)
    assert all(p.grad is None for p in model.parameters())


@distributed(world=2)
def test_input_gradient_then_normal_step() -> None:
    plain = tiny.mlp()
    model = zs.shard(tiny.mlp())
    x = tiny.features(0).requires_grad_()
    torch.autograd.grad(model(x).square().sum(), x)
    model(tiny.features(1)).square().sum().backward()
    plain(tiny.features(1)).square().sum().backward()
    average_grads(plain)
    assert_same(full_grads(model), full_grads(plain))
