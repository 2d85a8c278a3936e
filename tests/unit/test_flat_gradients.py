"""Gradients that steps over flat shards meet: assigned, taken away, kept, summed, none at all."""

from __future__ import annotations

import torch
from harness import distributed
from parity import assert_same
from twins import Twins, factory, whole_of


def _assigned(world: int) -> None:
    for name in ("adamw", "adamw-foreach", "sgd-momentum"):
        twins = Twins(factory(name), world)
        twins.step(0)
        twins.optimizer.zero_grad()
        twins.backward(1)
        for param in twins.model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 2 + 1  # another tensor, as clipping by value out of place
        twins.model.row.grad = None  # taken away from the middle of a run
        twins.model.unused.weight.grad = torch.ones_like(twins.model.unused.weight)  # given by the user alone
        twins.hand_over()
        twins.optimizer.step()
        twins.reference.step()
        twins.assert_equal()
        twins.step(2)
        twins.assert_equal()


def test_gradients_that_the_user_assigned():
    _assigned(1)


@distributed(world=2)
def test_gradients_that_the_user_assigned_on_two_ranks(world: int) -> None:
    _assigned(world)


def _kept(world: int) -> None:
    """zero_grad(set_to_none=False), two backwards for one step, and a gradient of an earlier step kept by the user."""
    twins = Twins(factory("adamw"), world)
    twins.step(0)
    kept = {n: p.grad for n, p in twins.model.named_parameters() if p.grad is not None}
    copies = {n: whole_of(g).clone() for n, g in kept.items()}
    twins.step(1)
    assert_same({n: whole_of(g) for n, g in kept.items()}, copies, what="gradients kept by the user")
    twins.optimizer.zero_grad(set_to_none=False)
    assert all(not whole_of(p.grad).any() for p in twins.model.parameters() if p.grad is not None)
    twins.backward(2)
    twins.backward(3)
    twins.hand_over()
    twins.optimizer.step()
    twins.reference.step()
    twins.assert_equal()


def test_gradients_over_several_backwards():
    _kept(1)


@distributed(world=2)
def test_gradients_over_several_backwards_on_two_ranks(world: int) -> None:
    _kept(world)


@distributed(world=2)
def test_a_step_without_any_gradient_changes_nothing(world: int) -> None:
    for name in ("adamw", "adamw-foreach", "sgd-momentum"):
        twins = Twins(factory(name), world)
        twins.optimizer.step()
        twins.reference.step()
        twins.assert_equal()
        assert not twins.optimizer.state
