"""Several forwards before a backward, other entry points, passes that stop half way."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params, reference_ddp
from tiny import Reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerosharder as zs
from zerosharder import errors as zs_errors

BOUND = 1e-6
RESHARD = pytest.mark.parametrize("reshard", ["auto", "always", "never"])


# -- G2: two forwards, one backward, checkpoints around sharded children --


class Wrapped(nn.Module):
    """Groups of blocks; the group is checkpointed, the blocks in it are units."""

    def __init__(self, mode: str, nested: bool) -> None:
        super().__init__()
        self.groups = nn.ModuleList(tiny.MLP(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 8)
        self.mode = mode
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = self._checkpointed(self._group if self.nested else group, group, x)
        return self.head(x)

    def _group(self, group: nn.Module, x: Tensor) -> Tensor:
        for layer in group.layers:
            x = self._checkpointed(layer, None, x)
        return group.project(x)

    def _checkpointed(self, function: Callable[..., Tensor], group: nn.Module | None, x: Tensor) -> Tensor:
        args = (group, x) if self.nested and group is not None else (x,)
        if self.mode == "off":
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.mode == "reentrant")


def _preferences(model: nn.Module, step: int) -> Tensor:
    """The loss of DPO: chosen and rejected go through the same model before one backward."""
    chosen = model(tiny.features(step).requires_grad_()).sum()
    rejected = model(tiny.features(step + 50).requires_grad_()).sum()
    return -nn.functional.logsigmoid(chosen - rejected)


@RESHARD
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("mode", ["off", "plain", "reentrant"])
@distributed(world=2)
def test_g2_two_forwards_one_backward(mode: str, nested: bool, reshard: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Wrapped(mode, nested)

    plain = build()
    model = build()
    zs.shard(model, units=[tiny.Layer], config=zs.Config(reshard=reshard))
    for step in range(3):
        _preferences(plain, step).backward()
        average_grads(plain)
        _preferences(model, step).backward()
        assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what=f"step {step}")
        plain.zero_grad()
        model.zero_grad()
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


class Patterned(nn.Module):
    """Layers named by letters, called as `pattern` says; what stands between bars is one checkpoint."""

    def __init__(self, pattern: str, mode: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: tiny.Layer(8) for name in sorted(set(pattern) - {"|"})})
        self.head = nn.Linear(8, 8)
        self.groups = pattern.split("|")
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            if self.mode == "off":
                x = self._run(group, x)
            else:
                x = checkpoint(self._run, group, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)

    def _run(self, group: str, x: Tensor) -> Tensor:
        for name in group:
            x = self.layers[name](x)
        return x


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@pytest.mark.parametrize(
    "pattern",
    ["A|B|C", "ABC", "AB|CD", "AS|BS", "ASA|B", "B|ASA", "AAB|ABA", "ABAB|AB", "A|A|A", "AA|AA", "SAS|SBS|C"],
)
@distributed(world=2)
def test_g2_checkpoints_of_groups_that_share_units(pattern: str, mode: str) -> None:
    """One forward, then two, before a backward; units used in several checkpoints and several times in one."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Patterned(pattern, mode)

    plain, model = build(), build()
    zs.shard(model)
    for step in range(4):
        for net in (plain, model):
            if step % 2:
                _preferences(net, step).backward()
            else:
                net(tiny.features(step).requires_grad_()).square().mean().backward()
        average_grads(plain)
        # Sums over several uses come in another order where a reentrant checkpoint makes each use a backward.
        bound = BOUND if step % 2 or len(set(pattern)) < len(pattern) else 0.0
        assert_same(full_grads(model), full_grads(plain), atol=bound, what=f"step {step}")
        plain.zero_grad()
        model.zero_grad()
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


ONE_UNIT = [("A|B|C", mode) for mode in ("off", "plain", "reentrant")]
SEVERAL = [(pattern, "off") for pattern in ("AB|CD", "ABC|DEF", "ABCDEF", "AS|BS")]
RECOMPUTED = [("ABCDEF", "plain"), ("AB|CD", "reentrant")]


@pytest.mark.parametrize(("pattern", "mode"), ONE_UNIT + SEVERAL)
@distributed(world=2, timeout=20)
def test_g2_an_output_that_one_rank_leaves_out(pattern: str, mode: str) -> None:
    """Rank 1's loss knows one of two forwards."""
    _leave_one_out(pattern, mode)


@pytest.mark.parametrize(("pattern", "mode"), RECOMPUTED)
@distributed(world=2, timeout=40, expect_pool_loss=True)
def test_g2_recomputing_several_units_on_one_rank_raises(pattern: str, mode: str) -> None:
    """The same through a checkpoint of several units: only one rank runs their forward again."""
    with pytest.raises(zs_errors.DesyncError, match="rank 1"):
        _leave_one_out(pattern, mode)


def _leave_one_out(pattern: str, mode: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Patterned(pattern, mode)

    plain, model = build(), build()
    zs.shard(model, config=zs.Config(timeout=3))
    for left_out in (0, 1):
        for net in (plain, model):
            losses = [net(tiny.features(i).requires_grad_()).square().mean() for i in range(2)]
            if dist.get_rank() == 1:
                del losses[left_out]
            sum(losses).backward()
            del losses
        average_grads(plain)
        assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what=f"forward {left_out} left out")
        plain.zero_grad()
        model.zero_grad()


@distributed(world=2)
def test_g2_with_a_frozen_reference_model() -> None:
    """DPO whole: a second sharded model, frozen, under no_grad, in between."""

    def run(model: nn.Module, reference: nn.Module, optimizer: torch.optim.Optimizer, average: bool) -> list:
        losses = []
        for step in range(3):
            a, b = tiny.features(step), tiny.features(step + 50)
            chosen = model(a).sum()
            with torch.no_grad():
                base = reference(a).sum() - reference(b).sum()
            loss = -nn.functional.logsigmoid(chosen - model(b).sum() - base)
            loss.backward()
            if average:
                average_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain, frozen = tiny.mlp(), tiny.mlp().requires_grad_(False)
    expected = run(plain, frozen, tiny.adamw(plain), True)
    model, frozen = tiny.mlp(), tiny.mlp().requires_grad_(False)
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer)
    zs.shard(frozen)
    assert_same(run(model, frozen, optimizer, False), expected, rtol=BOUND)
    assert_same(full_params(frozen), full_params(tiny.mlp()), what="the frozen model")


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@distributed(world=2)
def test_g2_the_whole_model_in_a_checkpoint(mode: str) -> None:
    plain = tiny.mlp()
    model = zs.shard(tiny.mlp())
    for step in range(3):
        for net in (plain, model):
            x = tiny.features(step).requires_grad_()
            checkpoint(net, x, use_reentrant=mode == "reentrant").square().mean().backward()
        average_grads(plain)
        assert_same(full_grads(model), full_grads(plain), what=f"step {step}")
        plain.zero_grad()
        model.zero_grad()
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


@distributed(world=2)
def test_g2_output_fed_back() -> None:
    """The model's output is its next input (recurrence over a whole sharded model), five times."""
    plain = tiny.mlp()
    model = zs.shard(tiny.mlp())
    for net in (plain, model):
        x = tiny.features(0)
        for _ in range(5):
            x = net(x)
        x.square().mean().backward()
    average_grads(plain)
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND)


# -- G5: other entry points --


class Retriever(nn.Module):
    """`encode` only calls blocks; `score` also reads what the module owns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(tiny.MLP(8, 2) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def encode(self, x: Tensor, tower: int) -> Tensor:
        return self.towers[tower](x)

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.encode(a, 0) * self.encode(b, 1)).sum(-1) * self.temperature

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.score(a, b).square().mean()


def _retriever() -> nn.Module:
    torch.manual_seed(3)
    return Retriever()


@pytest.mark.parametrize("entry", ["call", "forward", "encode", "score", "bound", "block"])
@distributed(world=2)
def test_g5_entry_points(entry: str) -> None:
    plain, model = _retriever(), _retriever()
    zs.shard(model)
    if entry in ("score", "encode"):
        zs.register_forward_method(model, entry)

    def loss_of(net: nn.Module, step: int) -> Tensor:
        a, b = tiny.features(step), tiny.features(step + 50)
        if entry == "call":
            return net(a, b)
        if entry == "forward":
            return net.forward(a, b)
        if entry == "bound":
            method = net.forward
            return method(a, b)
        if entry == "score":
            return net.score(a, b).square().mean()
        if entry == "block":
            return net.towers[1](a).square().mean()
        return (net.encode(a, 0) * net.encode(b, 1)).square().mean()

    for step in range(3):
        expected, loss = loss_of(plain, step), loss_of(model, step)
        assert_same(loss, expected, what=f"loss of step {step}")
        expected.backward()
        loss.backward()
        average_grads(plain)
        assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what=f"gradients of step {step}")
        plain.zero_grad()
        model.zero_grad()


@distributed(world=2)
def test_g5_encode_without_registration() -> None:
    """A method that only calls blocks needs none."""
    plain, model = _retriever(), _retriever()
    zs.shard(model)
    x = tiny.features(0)
    assert_same(model.encode(x, 0), plain.encode(x, 0))
    with torch.no_grad():
        assert_same(model.encode(x, 1), plain.encode(x, 1))


# -- G6: passes that stop half way --


@RESHARD
@distributed(world=2)
def test_g6_forward_without_backward(reshard: str) -> None:
    plain = tiny.gpt()
    by_hand = tiny.adamw(plain)
    wrapped = reference_ddp(plain)
    model = tiny.gpt()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))
    for step in range(3):
        kept = tiny.gpt_loss(model, 60 + step)  # no backward for it, and it stays alive
        tiny.gpt_loss(model, 70 + step)
        model.eval()
        with torch.no_grad():
            assert_same(tiny.gpt_loss(model, 80), tiny.gpt_loss(plain, 80), what="evaluation")
        model.train()
        expected = tiny.train(wrapped, by_hand, 1, first=step)
        assert_same(tiny.train(model, optimizer, 1, first=step), expected, what=f"step {step}")
        del kept
    assert_same(full_params(model), full_params(plain), what="weights")
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


@distributed(world=2)
def test_g6_backward_through_a_part() -> None:
    """Only an intermediate output goes into the loss: units behind it get no gradient and are given back."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(4))

        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for layer in self.layers:
                x = layer(x)
                found.append(x)
            return found

    torch.manual_seed(1)
    plain = Two()
    model = copy.deepcopy(plain)
    zs.shard(model)
    for step, used in enumerate((1, 3, 0, 2)):
        plain(tiny.features(step))[used].square().mean().backward()
        average_grads(plain)
        model(tiny.features(step))[used].square().mean().backward()
        assert_same(full_grads(model), full_grads(plain), what=f"output {used}")
        assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(world=2)
def test_g6_exception_then_reset(where: str) -> None:
    """All ranks leave a pass by an exception; after reset the next step is as if it had not been."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            raise ArithmeticError("boom")

    model = tiny.mlp(8, 4)
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer)
    tiny.train(model, optimizer, 2, _mlp_loss)

    def explode(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        if where == "forward":
            raise ArithmeticError("boom")
        return Bomb.apply(args[0])

    handle = model.layers[2].register_forward_pre_hook(explode)
    with pytest.raises(ArithmeticError):
        _mlp_loss(model, 5).backward()
    handle.remove()
    zs.reset(model)
    found = tiny.train(model, optimizer, 3, _mlp_loss, first=2)
    plain = tiny.mlp(8, 4)
    expected = tiny.train(reference_ddp(plain), tiny.adamw(plain), 5, _mlp_loss)
    assert_same(found, expected[2:], what="losses")
    assert_same(full_params(model), full_params(plain), what="weights")
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


def _mlp_loss(model: nn.Module, step: int) -> Tensor:
    return model(tiny.features(step)).square().mean()


@RESHARD
@distributed(world=2)
def test_g6_weights_changed_while_a_pass_is_open(reshard: str) -> None:
    """A step between a forward whose backward never comes and the next forward: that one sees the new weights."""
    plain = tiny.mlp()
    by_hand = tiny.sgd(plain)
    wrapped = reference_ddp(plain)
    model = tiny.mlp()
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))
    _mlp_loss(wrapped, 0).backward()
    _mlp_loss(model, 0).backward()
    kept = _mlp_loss(model, 1)
    by_hand.step()
    optimizer.step()
    assert_same(_mlp_loss(model, 2), _mlp_loss(plain, 2), what="after the step")
    with torch.no_grad():
        assert_same(_mlp_loss(model, 3), _mlp_loss(plain, 3), what="without gradients")
        for net in (plain, model):
            for p in net.parameters():
                p.mul_(0.5)  # by hand, without an optimizer
    assert_same(_mlp_loss(model, 2), _mlp_loss(plain, 2), what="after a change by hand")
    del kept


@RESHARD
@distributed(world=2)
def test_g6_weights_changed_under_no_sync(reshard: str) -> None:
    """reshard=never keeps weights gathered from one micro batch to the next, but not changed ones."""
    plain, model = tiny.mlp(), tiny.mlp()
    zs.shard(model, config=zs.Config(reshard=reshard))
    with zs.no_sync(model):
        _mlp_loss(model, 0).backward()
        with torch.no_grad():
            for net in (plain, model):
                for p in net.parameters():
                    p.mul_(0.5)
        assert_same(_mlp_loss(model, 2), _mlp_loss(plain, 2))


@distributed(world=2)
def test_g6_weights_changed_between_forward_and_backward() -> None:
    """As torch does, with the unit's name: a saved weight that an optimizer step changed is not used."""
    reference = Reference(tiny.mlp())
    model = tiny.mlp()
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer)
    _mlp_loss(model, 0).backward()
    loss = _mlp_loss(model, 1)
    optimizer.step()
    with pytest.raises(zs.errors.StateError, match="modified between the forward"):
        loss.backward()
    zs.reset(model)
    optimizer.zero_grad()
    reference.backward(_mlp_loss(reference.model, 0))
    tiny.sgd(reference.masters).step()
    reference.masters.zero_grad()
    reference.refresh()
    reference.backward(_mlp_loss(reference.model, 2))
    _mlp_loss(model, 2).backward()
    assert_same(full_grads(model), reference.grads(), what="after the reset")
