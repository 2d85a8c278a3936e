"""Steps over flat shards against torch's own optimizer on the whole parameters, fed with the same gradients.

Every case runs in a world of one with bf16 compute, which has the whole machinery and no process group, and on two
ranks. Default and foreach steps must give the same bits; fused ones may differ by the last one, because torch's own
kernel rounds the ends of a tensor that do not fill a vector differently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import distributed
from parity import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerosharder as zs
from zerosharder.optim.flat import BLOCK
from zerosharder.optim.shards import local_of

Optimizer = torch.optim.Optimizer
STEPS = 4

CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adamw-not-foreach": (torch.optim.AdamW, {"foreach": False}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw-amsgrad-foreach": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "adamw-amsgrad-fused": (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    "adamw-maximize": (torch.optim.AdamW, {"maximize": True}),
    "adamw-maximize-foreach": (torch.optim.AdamW, {"maximize": True, "foreach": True}),
    "adamw-decay": (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3}),
    "adamw-lr-tensor": (torch.optim.AdamW, {"lr": torch.tensor(2e-3)}),
    "adam": (torch.optim.Adam, {}),
    "adam-decay": (torch.optim.Adam, {"weight_decay": 0.3}),
    "adam-decoupled": (torch.optim.Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "adam-decoupled-foreach": (
        torch.optim.Adam,
        {"weight_decay": 0.3, "decoupled_weight_decay": True, "foreach": True},
    ),
    "adam-amsgrad-maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adam-fused": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-foreach": (torch.optim.SGD, {"foreach": True}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-momentum-foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "sgd-momentum-fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "sgd-fused": (torch.optim.SGD, {"fused": True}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd-dampening-decay": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd-maximize": (torch.optim.SGD, {"maximize": True, "weight_decay": 0.1}),
    "sgd-nesterov-maximize-foreach": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "maximize": True, "foreach": True},
    ),
}


class Model(nn.Module):
    """Direct and packed parameters, a scalar, an empty one, one row, a frozen one, one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(8, 8501)  # more than one block of the plain step, and no multiple of a vector
        self.down = nn.Linear(8501, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.row = nn.Parameter(torch.randn(1, 8))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        h = (
            self.norm(self.down(torch.tanh(self.up(x)))) * self.scale
            + self.row
            + self.frozen.sum()
            + self.empty.sum()
        )
        return h * self.sometimes if extra else h


def _factory(name: str) -> Callable[..., Optimizer]:
    kind, options = CASES[name]
    return lambda params, **more: kind(params, **{"lr": 1e-2, **copy.deepcopy(options), **more})


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    """Two groups that interleave in the flat shard, and an empty one."""
    return [
        {"params": params[::2], "lr": 3e-2, "note": "mine"},
        {"params": [], "lr": 1.0},
        {"params": params[1::2], "weight_decay": 0.2},
    ]


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each sharded tensor; one collective for all of them."""
    if not any(isinstance(t, DTensor) for t in tensors.values()):
        return {name: t.detach().clone() for name, t in tensors.items()}
    parts: list[dict[str, Tensor]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, {name: local_of(t).detach() for name, t in tensors.items()})
    return {n: torch.cat([part[n] for part in parts]) if t.dim() else parts[0][n] for n, t in tensors.items()}


def _rows(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of ``whole``, cut as ``like`` is."""
    if not isinstance(like, DTensor) or not whole.dim():
        return whole
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    chunks = torch.chunk(whole, world) if whole.shape[0] else ()
    return chunks[rank] if rank < len(chunks) else whole[:0]


class Twins:
    """A sharded model with its optimizer, and whole parameters with torch's own."""

    def __init__(
        self, make: Callable[..., Optimizer], world: int, grouped: bool = False, late: bool = False
    ) -> None:
        self.world = world
        self.model = Model()
        names = [name for name, _ in self.model.named_parameters()]
        self.whole = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad)
            for name, p in self.model.named_parameters()
        }
        config = zs.Config(param_dtype="bf16") if world == 1 else None
        arrange = _groups if grouped else list
        if late:
            zs.shard(self.model, config=config)
        self.optimizer = make(arrange(list(self.model.parameters())))
        zs.shard(self.model, self.optimizer, config=config)
        self.reference = make(arrange(list(self.whole.values())))
        assert [name for name, _ in self.model.named_parameters()] == names

    def backward(self, step: int) -> None:
        rank = torch.distributed.get_rank() if self.world > 1 else 0
        torch.manual_seed(100 * step + rank)
        out = self.model(torch.randn(2, 8), extra=step % 2 == 1)
        (out.float() ** 2).sum().backward()

    def hand_over(self) -> None:
        grads = _gather({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
        for name, param in self.whole.items():
            param.grad = grads.get(name)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.hand_over()
        self.optimizer.step()
        self.reference.step()

    def assert_equal(self, **bound: float) -> None:
        found, expected = {}, {}
        for name, param in self.model.named_parameters():
            whole = self.whole[name]
            found[name], expected[name] = local_of(param).detach(), _rows(whole.detach(), param)
            mine, theirs = self.optimizer.state.get(param, {}), self.reference.state.get(whole, {})
            assert mine.keys() == theirs.keys(), (name, mine.keys(), theirs.keys())
            for key, value in theirs.items():
                if value is not None:
                    found[f"{key} of {name}"], expected[f"{key} of {name}"] = (
                        local_of(mine[key]),
                        _rows(value, mine[key]),
                    )
        assert_same(found, expected, **bound)
        assert not [k for k in self.optimizer.state if not any(k is p for p in self.model.parameters())], (
            "foreign keys"
        )


def _bound(name: str) -> dict[str, float]:
    return {"rtol": 1e-6, "atol": 2e-7} if "fused" in name else {}


def _run(name: str, world: int, **how: bool) -> None:
    twins = Twins(_factory(name), world, **how)
    for step in range(STEPS):
        # torch's own fused SGD fails on a parameter whose first gradient comes later than that of the others
        twins.step(step if name != "sgd-momentum-fused" else 2 * step)
        twins.assert_equal(**_bound(name))


@pytest.mark.parametrize("name", CASES)
def test_alone(name):
    _run(name, 1)


@pytest.mark.parametrize("name", CASES)
@distributed(world=2)
def test_on_two_ranks(name: str, world: int) -> None:
    _run(name, world)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum", "sgd-nesterov"])
def test_groups_alone(name):
    _run(name, 1, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum", "sgd-nesterov"])
@distributed(world=2)
def test_groups_on_two_ranks(name: str, world: int) -> None:
    _run(name, world, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-foreach"])
@distributed(world=2)
def test_built_after_the_model_was_sharded(name: str, world: int) -> None:
    _run(name, world, late=True, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
@distributed(world=3)
def test_on_three_ranks(name: str, world: int) -> None:
    _run(name, world)


# -- the step really is over flat shards


def _lengths(optimizer: Optimizer, act: Callable[[], None]) -> list[int]:
    """Lengths of the tensors that the functional step got."""
    seen: list[int] = []
    original = optimizer._init_group

    def spy(group: dict[str, Any], *lists: Any) -> Any:
        result = original(group, *lists)
        seen.extend(p.numel() for p in lists[0])
        return result

    optimizer._init_group = spy
    act()
    optimizer._init_group = original
    return seen


@pytest.mark.parametrize("name", ["adamw-foreach", "sgd-momentum-foreach"])
def test_neighbours_are_stepped_as_one(name):
    twins = Twins(_factory(name), 1)
    twins.backward(0)
    lengths = _lengths(twins.optimizer, twins.optimizer.step)
    # Runs end where a parameter got no gradient, and around the scalar, which is replicated.
    assert len([n for n in lengths if n]) <= 5 and max(lengths) > 2 * 8 * 8501


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_the_plain_step_runs_over_blocks(name):
    twins = Twins(_factory(name), 1)
    twins.backward(0)
    lengths = _lengths(twins.optimizer, twins.optimizer.step)
    assert max(lengths) == BLOCK


# -- gradients


def _assigned(world: int) -> None:
    for name in ("adamw", "adamw-foreach", "sgd-momentum"):
        twins = Twins(_factory(name), world)
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
    twins = Twins(_factory("adamw"), world)
    twins.step(0)
    kept = {n: p.grad for n, p in twins.model.named_parameters() if p.grad is not None}
    copies = {n: _whole(g).clone() for n, g in kept.items()}
    twins.step(1)
    assert_same({n: _whole(g) for n, g in kept.items()}, copies, what="gradients kept by the user")
    twins.optimizer.zero_grad(set_to_none=False)
    assert all(not _whole(p.grad).any() for p in twins.model.parameters() if p.grad is not None)
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
        twins = Twins(_factory(name), world)
        twins.optimizer.step()
        twins.reference.step()
        twins.assert_equal()
        assert not twins.optimizer.state


# -- state dicts


def _round_trip(name: str, world: int) -> None:
    twins = Twins(_factory(name), world, grouped=True)
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
    twins.assert_equal(**_bound(name))
    for step in range(4, 6):
        twins.step(step)
        twins.assert_equal(**_bound(name))
    for index, saved in theirs["state"].items():  # what was saved did not change with the steps after
        assert_same(
            {k: _whole(v) for k, v in state["state"][index].items() if v is not None},
            {k: v for k, v in saved.items() if v is not None},
            **_bound(name),
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
    model, make = Model(), _factory(name)
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
            assert_same(_whole(optimizer.state[p][key]), value, what=f"{key} of {n}")
    model(torch.randn(2, 8)).sum().backward()
    for n, p in model.named_parameters():
        whole[n].grad = None if p.grad is None else _whole(p.grad).clone()
    optimizer.step()
    reference.step()
    assert_same(
        {n: _whole(p) for n, p in model.named_parameters()}, {n: p.detach() for n, p in whole.items()}
    )


@distributed(world=2)
def test_copies_and_files_of_sharded_tensors(tmp_path: Path, world: int) -> None:
    """deepcopy (the best weights so far) and torch.save of parameters, gradients and state, wherever they lie."""
    twins = Twins(_factory("adamw"), world)
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


# -- schedulers, scalers, hooks, closures


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
    twins = Twins(_factory("adamw"), world, grouped=True)
    _scheduled(twins, _schedule(twins.optimizer), _schedule(twins.reference))


@distributed(world=2)
def test_a_scheduler_attached_before(world: int) -> None:
    attached = []

    def make(params: Any) -> Optimizer:
        optimizer = _factory("adamw")(params)
        attached.append(_schedule(optimizer))
        return optimizer

    twins = Twins(make, world, grouped=True)
    _scheduled(twins, *attached)


@distributed(world=2)
def test_grad_scaler_skips_on_every_rank_what_overflows_on_one(world: int) -> None:
    twins = Twins(_factory("adamw"), world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    rank = torch.distributed.get_rank()
    for step in range(5):
        twins.optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        x = torch.randn(2, 8)
        if step == 2 and rank == 1:
            x[0, 0] = float("inf")
        before = {n: _whole(p).clone() for n, p in twins.model.named_parameters()}
        scaler.scale((twins.model(x) ** 2).sum()).backward()
        scaler.unscale_(twins.optimizer)
        twins.hand_over()
        scaler.step(twins.optimizer)
        scaler.update()
        if step == 2:
            after = {n: _whole(p) for n, p in twins.model.named_parameters()}
            assert_same(after, before, what="a step that overflowed")
            assert scaler.get_scale() == 64.0, "doubled by two good steps, halved by this one"
        else:
            twins.reference.step()
            twins.assert_equal()


@distributed(world=2)
def test_grad_scaler_of_a_fused_step(world: int) -> None:
    """A fused step unscales by itself, from optimizer.grad_scale and optimizer.found_inf."""
    twins = Twins(_factory("adamw-fused"), world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        twins.optimizer.zero_grad()
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        scaler.scale((twins.model(torch.randn(2, 8)) ** 2).sum()).backward()
        for name, param in twins.model.named_parameters():
            twins.whole[name].grad = None if param.grad is None else _whole(param.grad) / 64.0
        scaler.step(twins.optimizer)
        scaler.update()
        twins.reference.step()
        twins.assert_equal(rtol=1e-6)


def test_hooks_and_closures():
    twins = Twins(_factory("adamw"), 1)
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


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"])
@distributed(world=2)
def test_a_rank_that_holds_no_row(name: str, world: int) -> None:
    """Rank 1 holds nothing of the first parameter, and of none that neighbours it in a run."""
    model = nn.Module()
    for key, shape in (("one", (1, 3)), ("scalar", ()), ("none", (0, 2)), ("other", ()), ("last", (1,))):
        model.register_parameter(key, nn.Parameter(torch.ones(shape)))
    model.forward = lambda x: sum((p * x).sum() for p in model.parameters())
    whole = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer, reference = _factory(name)(model.parameters()), _factory(name)(whole)
    zs.shard(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor(float(step + 1))).backward()
        for p, q in zip(model.parameters(), whole, strict=True):
            q.grad = _whole(p.grad).clone()
        optimizer.step()
        reference.step()
    assert_same([_whole(p) for p in model.parameters()], [q.detach() for q in whole], atol=1e-6)
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
    optimizer = _factory(name)(model.parameters())
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
            q.grad = _whole(p.grad).clone()
        optimizer.step()
        reference.step()
    assert_same([_whole(p) for p in params], [q.detach() for q in whole])


@distributed(world=2)
def test_an_optimizer_never_passed_is_adopted_at_its_first_step(world: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    zs.shard(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert_same(_whole(model.weight), before - 1.0)


def test_adoption_twice_changes_nothing():
    twins = Twins(_factory("adamw"), 1)
    twins.step(0)
    for _ in range(2):
        assert zs.shard(twins.model, twins.optimizer) == (twins.model, twins.optimizer)
    twins.step(1)
    twins.assert_equal()
