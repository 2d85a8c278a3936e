"""Shards of odd layouts: a rank without rows, scalars, several models, adoption late or twice."""

from __future__ import annotations

import pytest
import torch
from harness import distributed
from parity import assert_same
from torch import nn
from twins import Twins, factory, whole_of

import zerosharder as zs


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"])
@distributed(world=2)
def test_a_rank_that_holds_no_row(name: str, world: int) -> None:
    """Rank 1 holds nothing of the first parameter, and of none that neighbours it in a run."""
    model = nn.Module()
    for key, shape in (("one", (1, 3)), ("scalar", ()), ("none", (0, 2)), ("other", ()), ("last", (1,))):
        model.register_parameter(key, nn.Parameter(torch.ones(shape)))
    model.forward = lambda x: sum((p * x).sum() for p in model.parameters())
    whole = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer, reference = factory(name)(model.parameters()), factory(name)(whole)
    zs.shard(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor(float(step + 1))).backward()
        for p, q in zip(model.parameters(), whole, strict=True):
            q.grad = whole_of(p.grad).clone()
        optimizer.step()
        reference.step()
    assert_same([whole_of(p) for p in model.parameters()], [q.detach() for q in whole], atol=1e-6)
    for p, q in zip(model.parameters(), whole, strict=True):
        assert optimizer.state[p].get("step") == reference.state[q].get("step")


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-momentum-fused"])
@distributed(world=2)
def test_replicas_of_a_scalar_stay_the_same(name: str, world: int) -> None:
    """Ranks hold different numbers of rows, so a scalar among them lies in different lanes of a vector kernel."""
    torch.manual_seed(1)
    model = nn.Module()
    for i in range(40):
        model.register_parameter(f"row{i}", nn.Parameter(torch.randn(2 * i + 1)))
        model.register_parameter(f"scalar{i}", nn.Parameter(torch.randn(())))
    model.forward = lambda x: sum((p * x).sin().sum() for p in model.parameters())
    optimizer = factory(name)(model.parameters())
    zs.shard(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.tensor(1.0 + step + torch.distributed.get_rank())).backward()
        optimizer.step()
    mine = torch.stack([p.to_local() for n, p in model.named_parameters() if n.startswith("scalar")]).detach()
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    assert_same(mine, theirs, what="scalars of this rank and of rank 0")


@distributed(world=2)
def test_one_optimizer_over_two_models_and_a_plain_tensor(world: int) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(9, 5), nn.Linear(5, 3)]
    extra = nn.Parameter(torch.ones(4))
    whole = [
        nn.Parameter(p.detach().clone()) for p in [*models[0].parameters(), *models[1].parameters(), extra]
    ]
    zs.shard(models[0])
    zs.shard(models[1])
    params = [*models[0].parameters(), *models[1].parameters(), extra]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for model in models:
        zs.shard(model, optimizer)
    reference = torch.optim.AdamW(whole, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (models[1](models[0](torch.randn(2, 9))).sum() + (extra**2).sum()).backward()
        for p, q in zip(params, whole, strict=True):
            q.grad = whole_of(p.grad).clone()
        optimizer.step()
        reference.step()
    assert_same([whole_of(p) for p in params], [q.detach() for q in whole])


@distributed(world=2)
def test_an_optimizer_never_passed_is_adopted_at_its_first_step(world: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    zs.shard(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert_same(whole_of(model.weight), before - 1.0)


def test_adoption_twice_changes_nothing():
    twins = Twins(factory("adamw"), 1)
    twins.step(0)
    for _ in range(2):
        assert zs.shard(twins.model, twins.optimizer) == (twins.model, twins.optimizer)
    twins.step(1)
    twins.assert_equal()
