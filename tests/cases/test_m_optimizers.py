"""The user's optimizer, groups and scheduler stay theirs; other optimizers work or say why."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, full_params
from tiny import features, mlp
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

import zerosharder as zs
from zerosharder.errors import OptimizerError


class Lion(Optimizer):
    """As users write one: elementwise, with a state of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                update = (state["momentum"] * group["beta"] + p.grad * (1 - group["beta"])).sign()
                p.add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - group["beta"])
        return loss


class MyAdamW(torch.optim.AdamW):
    """A subclass may do anything in its step."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


def _compare(make: Callable[[Iterable[Any]], Optimizer], steps: int = 4, rtol: float = 0.0) -> nn.Module:
    """Against the same optimizer on whole parameters, fed with the same gradients."""
    plain, model = mlp(), mlp()
    reference, optimizer = make(plain.parameters()), make(model.parameters())
    zs.shard(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        model(features(step)).pow(2).mean().backward()
        for p, g in zip(plain.parameters(), full_grads(model).values(), strict=True):
            p.grad = g.clone()
        optimizer.step()
        reference.step()
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()}, rtol=rtol)
    return model


# -- M1: the groups of the user --


def _grouped(model: nn.Module) -> Optimizer:
    decayed = [p for p in model.layers.parameters() if p.dim() > 1]
    biases = [p for p in model.layers.parameters() if p.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.3, "name": "matrices", "tags": ["a", "b"]},
        {"params": [], "lr": 7.0},
        {"params": biases, "lr": 0.01, "weight_decay": 0.0, "max_norm": 1.5},
    ]
    return torch.optim.AdamW(groups, lr=0.1)  # model.project is left out on purpose


@pytest.mark.parametrize("order", ["before", "after", "both"])
@distributed(world=2)
def test_m1_groups_stay_what_they_were(order: str) -> None:
    plain, model = mlp(), mlp()
    expected = [{k: v for k, v in g.items() if k != "params"} for g in _grouped(plain).param_groups]
    names = [
        [n for p in g["params"] for n, q in plain.named_parameters() if q is p]
        for g in _grouped(plain).param_groups
    ]
    if order == "before":
        optimizer = _grouped(model)
        dicts = list(optimizer.param_groups)
        zs.shard(model, optimizer)
    else:
        zs.shard(model)
        optimizer = _grouped(model)
        dicts = list(optimizer.param_groups)
        if order == "both":
            zs.shard(model, optimizer)
    assert [a is b for a, b in zip(optimizer.param_groups, dicts, strict=True)] == [True] * 3
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == expected
    of = {id(p): n for n, p in model.named_parameters()}
    assert [[of[id(p)] for p in g["params"]] for g in optimizer.param_groups] == names
    before = full_params(model)
    model(features(0)).sum().backward()
    optimizer.step()
    after = full_params(model)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {n for group in names for n in group}, "the projection belongs to nobody's group"


@distributed(world=2)
def test_m1_two_optimizers_for_one_model() -> None:
    plain, model = mlp(), mlp()

    def make(m: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.AdamW(m.layers.parameters(), lr=0.01),
            torch.optim.SGD(m.project.parameters(), lr=0.1),
        ]

    references, optimizers = make(plain), make(model)
    for optimizer in optimizers:
        zs.shard(model, optimizer)
    for step in range(3):
        model.zero_grad()
        model(features(step)).pow(2).mean().backward()
        for p, g in zip(plain.parameters(), full_grads(model).values(), strict=True):
            p.grad = g.clone()
        for each in (*references, *optimizers):
            each.step()
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()})


# -- M2: the learning rate that is logged is the one that is used --


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "one-cycle": lambda o: OneCycleLR(o, 0.5, total_steps=20, cycle_momentum=False),
    "warm-up": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda step: (step + 1) / 3), CosineAnnealingLR(o, 10)], milestones=[3]
    ),
}


def _lr_used(model: nn.Module, optimizer: Optimizer) -> float:
    """SGD on a gradient of one moves each weight by the learning rate."""
    before = full_params(model)["project.bias"]
    model.zero_grad()
    model(features(0)).sum().backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return float((before - full_params(model)["project.bias"]).mean())


@pytest.mark.parametrize("name", list(SCHEDULES))
@distributed(world=2)
def test_m2_a_scheduler_attached_before(name: str) -> None:
    plain = mlp()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected, curve = SCHEDULES[name](reference), []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULES[name](optimizer)
    zs.shard(model, optimizer)
    for _ in range(8):
        logged = scheduler.get_last_lr()[0]
        curve.append(logged)
        assert math.isclose(_lr_used(model, optimizer), logged, rel_tol=1e-4, abs_tol=1e-6)
        assert scheduler.get_last_lr() == expected.get_last_lr()
        scheduler.step()
        reference.step()
        expected.step()
    assert len(set(curve)) > 4


@distributed(world=2)
def test_m2_resumed_from_state_dicts() -> None:
    def build() -> tuple[nn.Module, Optimizer, LambdaLR]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = SCHEDULES["lambda"](optimizer)
        zs.shard(model, optimizer)
        return model, optimizer, scheduler

    def steps(parts: tuple[nn.Module, Optimizer, LambdaLR], numbers: range) -> list[float]:
        model, optimizer, scheduler = parts
        curve = []
        for step in numbers:
            curve.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
            model(features(step)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
        return curve

    whole = build()
    curve = steps(whole, range(6))
    first = build()
    head = steps(first, range(3))
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = build()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert head + steps(second, range(3, 6)) == curve
    assert_same(full_params(second[0]), full_params(whole[0]))


# -- M4: any optimizer --


@distributed(world=2)
def test_m4_a_user_class() -> None:
    _compare(lambda p: Lion(p, lr=0.01))


@distributed(world=2)
def test_m4_a_subclass_whose_step_does_more() -> None:
    _compare(lambda p: MyAdamW(p, lr=0.01))


ELEMENTWISE: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("name", list(ELEMENTWISE))
@distributed(world=2)
def test_m4_elementwise_optimizers_of_torch(name: str) -> None:
    _compare(ELEMENTWISE[name], rtol=1e-6)


@distributed(world=2)
def test_m4_a_closure() -> None:
    plain, model = mlp(), mlp()
    optimizer = Lion(model.parameters())
    zs.shard(model, optimizer)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(features(0)).pow(2).mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [1] and math.isfinite(loss)
    assert_same(loss.detach(), plain(features(0)).pow(2).mean().detach())


@distributed(world=2)
def test_m4_lbfgs_works_or_says_why() -> None:
    """It flattens all gradients into one vector: what is a sum over a rank's rows is not a sum over all."""
    plain, model = mlp(), mlp()
    data = features(0, of=0)  # the same on every rank, so that plain and sharded gradients agree

    def run(m: nn.Module, optimizer: Optimizer) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = m(data).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(2):
            loss = optimizer.step(closure)
        return float(loss)

    expected = run(plain, torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    try:
        zs.shard(model, optimizer)
    except OptimizerError as refused:
        assert "LBFGS" in str(refused)
        return
    found = run(model, optimizer)
    assert math.isclose(found, expected, rel_tol=1e-4)
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-4)


@distributed(world=2)
def test_m4_foreign_or_wrong_optimizers_are_named() -> None:
    model = zs.shard(mlp())
    with pytest.raises(
        OptimizerError, match=r"AdamW holds none of the model's parameters.*\(8, 8\).*model\.parameters"
    ):
        zs.shard(model, torch.optim.AdamW(mlp().parameters()))
    with pytest.raises(OptimizerError, match="Optimizer as its second argument, got list"):
        zs.shard(model, list(model.parameters()))


# -- M6: optimizers that need whole matrices --


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Parameter(torch.randn(8, 4))
        self.b = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:  # [rows, 4]
        return (x @ self.a.t()).tanh()[:, :5] @ self.b


def _matrix_optimizer(make: Callable[[Iterable[Any]], Optimizer], rtol: float) -> None:
    plain, model = Matrices(), Matrices()
    reference, optimizer = make(plain.parameters()), make(model.parameters())
    zs.shard(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(features(step, width=4)).pow(2).sum().backward()
        for p, g in zip(plain.parameters(), full_grads(model).values(), strict=True):
            p.grad = g.clone()
        optimizer.step()
        reference.step()
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()}, rtol=rtol)


@distributed(world=(2, 4))
def test_m6_muon(world: int) -> None:
    """Orthogonalisation in bf16: the bound is a few of its ulps."""
    _matrix_optimizer(lambda p: torch.optim.Muon(p, lr=0.02), rtol=2e-2)


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop", "LBFGS"])
@distributed(world=2)
def test_m4_what_torch_cannot_step_on_shards_is_refused_by_name(kind: str) -> None:
    model = Matrices()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    with pytest.raises(OptimizerError, match=f"{kind} cannot step on sharded parameters"):
        zs.shard(model, optimizer)


@distributed(world=2)
def test_m6_ranks_agree_after_a_matrix_optimizer() -> None:
    model = Matrices()
    optimizer = torch.optim.Muon(model.parameters())
    zs.shard(model, optimizer)
    model(features(0, width=4)).pow(2).sum().backward()
    optimizer.step()
    mine = torch.cat([p.flatten() for p in full_params(model).values()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert_same(mine, theirs)
