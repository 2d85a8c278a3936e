"""State of an optimizer over flat shards: state dicts, state from before shard(), copies and files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import distributed
from parity import assert_same
from torch import nn
from twins import Model, Twins, bound, factory, whole_of

import zerosharder as zs
from zerosharder.optim.shards import local_of


def _round_trip(name: str, world: int) -> None:
    twins = Twins(factory(name), world, grouped=True)
    for step in range(2):
        twins.step(step)
    state = copy.deepcopy(twins.optimizer.state_dict())
    theirs = copy.deepcopy(twins.reference.state_dict())
    assert state["param_groups"] == theirs["param_groups"]
    assert state["state"].keys() == theirs["state"].keys()
    for step in range(2, 4):  # state moves on
        twins.step(step)
    # A copy, because torch's own optimizer goes on with the very tensors it is given.
    twins.optimizer.load_state_dict(copy.deepcopy(state))
    twins.reference.load_state_dict(copy.deepcopy(theirs))
    twins.assert_equal(**bound(name))
    for step in range(4, 6):
        twins.step(step)
        twins.assert_equal(**bound(name))
    for index, saved in theirs["state"].items():  # what was saved did not change with the steps after
        assert_same(
            {k: whole_of(v) for k, v in state["state"][index].items() if v is not None},
            {k: v for k, v in saved.items() if v is not None},
            **bound(name),
        )


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "adamw-amsgrad", "sgd-momentum"])
def test_state_dict_round_trip(name):
    _round_trip(name, 1)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "adamw-amsgrad", "sgd-momentum"])
@distributed(world=2)
def test_state_dict_round_trip_on_two_ranks(name: str, world: int) -> None:
    _round_trip(name, world)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
@distributed(world=2)
def test_an_optimizer_that_has_stepped_before_shard(name: str, world: int) -> None:
    """Its state is cut like its parameters."""
    model, make = Model(), factory(name)
    whole = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    optimizer, reference = make(model.parameters()), make(whole.values())
    torch.manual_seed(5)
    for n, p in model.named_parameters():
        if p.requires_grad and n != "empty":
            p.grad = torch.randn_like(p)
            whole[n].grad = p.grad.clone()
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    zs.shard(model, optimizer)
    for n, p in model.named_parameters():
        for key, value in reference.state.get(whole[n], {}).items():
            assert_same(whole_of(optimizer.state[p][key]), value, what=f"{key} of {n}")
    model(torch.randn(2, 8)).sum().backward()
    for n, p in model.named_parameters():
        whole[n].grad = None if p.grad is None else whole_of(p.grad).clone()
    optimizer.step()
    reference.step()
    assert_same(
        {n: whole_of(p) for n, p in model.named_parameters()}, {n: p.detach() for n, p in whole.items()}
    )


@distributed(world=2)
def test_copies_and_files_of_sharded_tensors(tmp_path: Path, world: int) -> None:
    """deepcopy (the best weights so far) and torch.save of parameters, gradients and state, wherever they lie."""
    twins = Twins(factory("adamw"), world)
    twins.step(0)
    values = {f"model.{k}": v for k, v in twins.model.state_dict().items()}
    for name, param in twins.model.named_parameters():
        values |= {f"param.{name}": param}
        values |= {f"grad.{name}": param.grad} if param.grad is not None else {}
        values |= {f"{key}.{name}": value for key, value in twins.optimizer.state.get(param, {}).items()}
    path = tmp_path / f"rank{torch.distributed.get_rank()}"
    torch.save(values, path)
    loaded = torch.load(path, weights_only=False)
    for name, value in values.items():
        copied = copy.deepcopy(value)
        assert type(copied) is type(value) and copied.requires_grad == value.requires_grad, name
        assert_same(local_of(copied), local_of(value), what=f"copy of {name}")
        assert_same(local_of(loaded[name]), local_of(value), what=f"file of {name}")
    before = {name: local_of(value).detach().clone() for name, value in values.items()}
    copied = copy.deepcopy(values)
    twins.step(1)
    twins.step(2)
    assert_same({n: local_of(v).detach() for n, v in copied.items()}, before, what="copies after more steps")
