"""The tables of legal transitions, pair by pair, and a real unit driven out of order."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import zerosharder as zs
from zerosharder.engine.state import (
    GRAD_TRANSITIONS,
    RESIDENCY_TRANSITIONS,
    GradState,
    Residency,
    check_grad,
    check_residency,
)
from zerosharder.engine.unit import Unit
from zerosharder.errors import StateError

# Written out a second time, so that a change of a table is a change of this file too.
LEGAL_RESIDENCY = {("sharded", "gathering"), ("gathering", "gathered"), ("gathered", "sharded")}
LEGAL_GRAD = {
    ("empty", "local"),
    ("local", "local"),
    ("empty", "reducing"),
    ("local", "reducing"),
    ("reducing", "empty"),
}


def test_the_tables_are_frozen():
    assert {(a.value, b.value) for a, b in RESIDENCY_TRANSITIONS} == LEGAL_RESIDENCY
    assert {(a.value, b.value) for a, b in GRAD_TRANSITIONS} == LEGAL_GRAD
    assert {s.value for s in Residency} == {"sharded", "gathering", "gathered"}
    assert {s.value for s in GradState} == {"empty", "local", "reducing"}


@pytest.mark.parametrize("now, then", list(product(Residency, Residency)), ids=lambda s: s.value)
def test_residency(now, then):
    if (now.value, then.value) in LEGAL_RESIDENCY:
        assert check_residency("blocks.3", now, then) is then
    else:
        with pytest.raises(StateError, match=rf"'blocks\.3'.*from {now.value} to {then.value}"):
            check_residency("blocks.3", now, then)


@pytest.mark.parametrize("now, then", list(product(GradState, GradState)), ids=lambda s: s.value)
def test_gradient(now, then):
    if (now.value, then.value) in LEGAL_GRAD:
        assert check_grad("blocks.3", now, then) is then
    else:
        with pytest.raises(StateError, match=rf"'blocks\.3'.*from {now.value} to {then.value}"):
            check_grad("blocks.3", now, then)


# -- a real unit: a world of one with bf16 compute has the whole machinery and needs no process group


def _unit() -> Unit:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    (unit,) = (u for u in model._zerosharder.engine.units if u.params)
    return unit


def _to(unit: Unit, state: Residency) -> None:
    if state is not Residency.SHARDED:
        unit.issue_gather()
    if state is Residency.GATHERED:
        unit.wait_gather()
    assert unit.residency is state


def test_a_unit_goes_round():
    unit = _unit()
    for _ in range(3):
        _to(unit, Residency.GATHERED)
        whole = unit.params[0].leaf
        assert whole.dtype is torch.bfloat16 and not whole.isnan().any()
        unit.free()
        assert unit.residency is Residency.SHARDED and unit.params[0].leaf.isnan().all()
    assert unit.runtime.pool.in_use == 0


def test_a_unit_freed_on_its_way_takes_its_messages_first():
    unit = _unit()
    _to(unit, Residency.GATHERING)
    unit.free()
    assert unit.residency is Residency.SHARDED and unit.runtime.pool.in_use == 0


@pytest.mark.parametrize(
    "state, method",
    [
        (Residency.SHARDED, "wait_gather"),
        (Residency.SHARDED, "free"),
        (Residency.GATHERING, "issue_gather"),
        (Residency.GATHERED, "issue_gather"),
        (Residency.GATHERED, "wait_gather"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.value,
)
def test_out_of_order(state, method):
    unit = _unit()
    _to(unit, state)
    in_use = unit.runtime.pool.in_use
    with pytest.raises(StateError, match=state.value):
        getattr(unit, method)()
    assert unit.residency is state and unit.runtime.pool.in_use == in_use, (
        "a refused call must change nothing"
    )


def test_reductions_out_of_order():
    unit = _unit()
    with pytest.raises(StateError, match="from empty to empty"):
        unit.finish_reduce()
    assert unit.grad_state is GradState.EMPTY
    unit.note_grad()
    unit.note_grad()
    assert unit.grad_state is GradState.LOCAL
    with pytest.raises(StateError, match="from local to empty"):
        unit.finish_reduce()
    assert unit.grad_state is GradState.LOCAL
    unit.start_reduce()
    assert unit.grad_state is GradState.REDUCING
    unit.finish_reduce()
    assert unit.grad_state is GradState.EMPTY
    assert unit.runtime.pool.in_use == 0


def test_a_second_reduction_adds_to_the_first():
    unit = _unit()
    param = unit.params[0]
    for _ in range(2):
        param.leaf.grad = torch.ones(param.layout.shape, dtype=torch.bfloat16)
        unit.note_grad()
        unit.start_reduce()
        with pytest.raises(StateError, match="from reducing to reducing"):
            unit.start_reduce()
        unit.wait_reduce()
        assert unit.grad_state is GradState.REDUCING
        assert unit.finish_reduce() == [param]
    assert torch.equal(param.sharded.grad, torch.full(param.layout.shape, 2.0))
    assert unit.runtime.pool.in_use == 0


def test_a_unit_without_gradients_reduces_zeros_and_sets_none():
    unit = _unit()
    unit.start_reduce()
    assert unit.finish_reduce() == []
    assert all(p.sharded.grad is None for p in unit.params)


class _Nosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with zs.full_params(self):
            return self.linear(x)


def test_full_params_inside_a_pass_is_refused_and_leaves_nothing_behind():
    model = _Nosy()
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    with pytest.raises(StateError, match=r"full_params\(\) inside a forward pass"):
        model(torch.ones(1, 4))
    with zs.full_params(model):
        assert not model.linear.weight.isnan().any()
    assert zs.stats(model).current_bytes["host"]["gathered"] == 0


@pytest.mark.parametrize("function", [zs.reset, zs.stats, zs.no_sync, zs.full_params])
def test_a_plain_model_is_refused_by_name(function):
    with pytest.raises(StateError, match=r"Linear is not sharded; call zerosharder\.shard"):
        with function(nn.Linear(2, 2)):
            pass


def test_register_forward_method_on_a_plain_model():
    with pytest.raises(StateError, match="Linear is not sharded"):
        zs.register_forward_method(nn.Linear(2, 2), "forward")
