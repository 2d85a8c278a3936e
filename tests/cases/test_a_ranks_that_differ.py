"""Ranks that do not run the same modules, or not the same number of times.

A rank that leaves its peers' order gets either the right gradients or a DesyncError on every rank, never a hang.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerosharder as zs
from zerosharder.engine.collectives import PairwiseExchange
from zerosharder.errors import DesyncError

SHORT = zs.Config(timeout=2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, average: bool) -> Tensor:
    loss.backward()
    if average:
        average_grads(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _equal_to_reference(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: int = 3,
    rtol: float = 0.0,
    **settings,
) -> nn.Module:
    """Trains the model of `build` by hand (gradients averaged) and sharded; same losses, same weights."""
    plain = build()
    optimizer = tiny.adamw(plain)
    expected = [_step(plain, optimizer, loss_of(plain, step), True) for step in range(steps)]
    model = build()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer, **settings)
    found = [_step(model, optimizer, loss_of(model, step), False) for step in range(steps)]
    assert_same(found, expected, rtol=rtol, what="losses")
    assert_same(full_params(model), full_params(plain), rtol=rtol, what="weights")
    return model


# -- A1: branches --


class Branches(nn.Module):
    """Two branches of several layers each, one of which runs; or, with `paths`, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.branches = nn.ModuleDict({"a": tiny.MLP(8, 2), "b": tiny.MLP(8, 2)})
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.after(self.branches[branch](torch.tanh(self.before(x))))


def _branches() -> nn.Module:
    torch.manual_seed(3)
    return Branches()


def _branch_loss(model: nn.Module, step: int) -> Tensor:
    return model(tiny.features(step), "ab"[dist.get_rank() % 2]).square().mean()


@pytest.mark.parametrize("reshard", ["auto", "always", "never"])
@pytest.mark.parametrize("units", ["everything", "container"])
@distributed(world=2)
def test_a1_branches_in_one_unit(units: str, reshard: str) -> None:
    """The advice of the error message: what ranks choose between lies in one unit."""
    chosen = {"everything": lambda name, module: name == "before", "container": ["branches"]}[units]
    model = _equal_to_reference(_branches, _branch_loss, units=chosen, config=zs.Config(reshard=reshard))
    assert zs.stats(model).units == 2


@distributed(world=2)
def test_a1_one_rank_skips_a_branch() -> None:
    """Only rank 0 uses the parameters at all; the others reduce zeros."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(8, 8)
            self.sometimes = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.always(x)
            return self.sometimes(x) if dist.get_rank() == 0 else x

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Optional()

    _equal_to_reference(build, lambda model, step: model(tiny.features(step)).square().mean())


class Experts(nn.Module):
    """A layer of experts of which each token takes one; on each rank other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(tiny.MLP(8, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = chosen == number
            out = out.index_add(0, rows.nonzero()[:, 0], self.experts[number](x[rows]) * weights[rows, None])
        return x + out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@distributed(world=2)
def test_a1_mixture_of_experts() -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        return MixtureOfExperts()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step, rows=2)).square().mean()

    model = _equal_to_reference(build, loss_of, steps=5)
    assert zs.stats(model).units > 1, "blocks are units, experts are not"


@distributed(world=2)
def test_a1_outputs_that_only_one_rank_uses() -> None:
    """Both ranks run both units; rank 1 leaves one output out of its loss, so autograd never goes there."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = tiny.MLP(8, 2)
            self.heads = nn.ModuleList(tiny.MLP(8, 2) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.trunk(x)
            return [head(x) for head in self.heads]

    def build() -> nn.Module:
        torch.manual_seed(5)
        return Heads()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        outputs = model(tiny.features(step))
        used = outputs if dist.get_rank() == 0 else outputs[1:2]
        return sum(out.square().mean() for out in used)

    model = _equal_to_reference(build, loss_of, steps=4)
    assert zs.stats(model).units == 6, "two layers, three heads, the root"


@distributed(world=2)
def test_a1_a_rank_without_any_loss() -> None:
    """Rank 1's loss touches the parameters with a factor of zero, as for a padded batch."""
    _equal_to_reference(
        tiny.mlp,
        lambda model, step: model(tiny.features(step)).square().mean() * (1.0 - dist.get_rank()),
    )


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a1_branches_in_units_of_their_own_raise() -> None:
    model = _branches()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer, units=["branches.a", "branches.b"], config=SHORT)
    with pytest.raises(DesyncError) as caught:
        for step in range(3):
            _step(model, optimizer, _branch_loss(model, step), False)
    text = str(caught.value)
    assert "branches.a" in text and "branches.b" in text
    assert "rank 0" in text and "rank 1" in text
    assert 1 - dist.get_rank() in caught.value.culprits


# -- A2, A3: unequal work --


@distributed(world=2)
def test_a2_evaluation_on_unequal_batches() -> None:
    """full_params is the helper for uneven inputs: forwards inside need no other rank."""
    plain = tiny.gpt()
    by_hand = tiny.adamw(plain)
    model = tiny.gpt()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer)
    for step in range(3):
        expected = _step(plain, by_hand, tiny.gpt_loss(plain, step), True)
        assert_same(_step(model, optimizer, tiny.gpt_loss(model, step), False), expected, what=f"step {step}")
        with zs.full_params(model), torch.no_grad():
            for batch in range(3 - dist.get_rank()):
                found = tiny.gpt_loss(model, 100 + batch)
                assert_same(found, tiny.gpt_loss(plain, 100 + batch), what=f"evaluation {batch}")
        assert not any(unit.active for unit in model.__dict__["_zerosharder"].engine.units)
    assert_same(full_params(model), full_params(plain), what="weights")


@pytest.mark.parametrize("checkpoint", [None, "plain", "reentrant"])
@pytest.mark.parametrize("extra", ["before", "after"])
@distributed(world=2)
def test_a3_padding_forwards_outside_of_the_loss(extra: str, checkpoint: str | None) -> None:
    """Rank 0 has two chunks, rank 1 one and a padding forward that its loss does not know."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        losses = [tiny.gpt_loss(model, step, chunk) for chunk in range(2)]
        if dist.get_rank() == 1:
            del losses[0 if extra == "before" else 1]
        return sum(losses)

    model = _equal_to_reference(lambda: tiny.gpt(checkpoint=checkpoint), loss_of, steps=4, rtol=1e-6)
    runtime = model.__dict__["_zerosharder"].engine.runtime
    assert runtime.pool.in_use == 0, "the padding forward's weights are given back"
    counters = zs.stats(model)
    assert counters.gathers == counters.frees


@distributed(world=2)
def test_a3_forwards_whose_backward_never_comes() -> None:
    """An evaluation that forgot no_grad: passes pile up, are dropped, and cost no memory."""
    model = tiny.mlp()
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer)
    engine = model.__dict__["_zerosharder"].engine
    for step in range(150):
        model(tiny.features(step))
    assert engine.runtime.pool.in_use <= sum(unit.nbytes for unit in engine.units)
    model(tiny.features(0)).square().mean().backward()
    assert engine.runtime.pool.in_use == 0
    plain = tiny.mlp()
    plain(tiny.features(0)).square().mean().backward()
    average_grads(plain)
    assert_same(full_grads(model), full_grads(plain))
    assert len(engine.tape.passes) < 150


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a3_a_forward_that_only_one_rank_runs_raises() -> None:
    model = zs.shard(tiny.mlp(), config=SHORT)
    model(tiny.features(0)).sum().backward()
    with pytest.raises(DesyncError) as caught:
        if dist.get_rank() == 1:
            with torch.no_grad():
                model(tiny.features(1))
        for step in range(3):
            model(tiny.features(step)).sum().backward()
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


# -- A5: LayerDrop --


class Dropping(nn.Module):
    """Residual blocks, of which the given ones are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tiny.MLP(8, 1) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor, run_all: bool = False) -> Tensor:
        for block, kept in zip(self.blocks, keep.tolist(), strict=True):
            if run_all:
                x = x + block(x) * kept
            elif kept:
                x = x + block(x)
        return self.head(x)


def _dropping() -> nn.Module:
    torch.manual_seed(6)
    return Dropping()


def _kept(step: int, of: int) -> Tensor:
    return torch.rand(4, generator=torch.Generator().manual_seed(100 * step + of)) > 0.5


@distributed(world=2)
def test_a5_layer_drop_in_one_unit() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step), _kept(step, dist.get_rank())).square().mean()

    # The blocks are left to the root, which runs even where a rank drops all of them.
    _equal_to_reference(_dropping, loss_of, steps=20, units=["head"])


@distributed(world=2)
def test_a5_layer_drop_that_runs_every_block() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step), _kept(step, dist.get_rank()), run_all=True).square().mean()

    _equal_to_reference(_dropping, loss_of, steps=20)


@pytest.mark.parametrize("prefetch", ["0", "1GB"])
@pytest.mark.parametrize("reshard", ["auto", "always", "never"])
@distributed(world=2)
def test_a5_layer_drop_alike_on_all_ranks(reshard: str, prefetch: str) -> None:
    """The order changes in every step, in the same way everywhere: what was gathered ahead is let go."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step), _kept(step, 0)).square().mean()

    config = zs.Config(reshard=reshard, prefetch=prefetch)
    model = _equal_to_reference(_dropping, loss_of, steps=20, config=config)
    assert zs.stats(model).deviations > 0
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a5_layer_drop_of_units_raises() -> None:
    model = zs.shard(_dropping(), config=SHORT)
    keep = torch.tensor([True, dist.get_rank() == 0, True, dist.get_rank() == 1])
    with pytest.raises(DesyncError) as caught:
        for step in range(20):
            model(tiny.features(step), keep).square().mean().backward()
    assert "blocks.1" in str(caught.value) or "blocks.2" in str(caught.value)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


# -- A7, A9: collectives that some ranks leave out --


@contextlib.contextmanager
def _others_wait() -> None:
    """Rank 0 acts alone; the others wait for it outside of every collective."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        yield
        store.set("rank 0 is through", "yes")
    else:
        yield
        store.wait(["rank 0 is through"])


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a7_full_params_on_one_rank() -> None:
    model = zs.shard(tiny.mlp(), config=SHORT)
    model(tiny.features(0)).sum().backward()
    with _others_wait():
        if dist.get_rank() == 0:
            with pytest.raises(DesyncError) as caught, zs.full_params(model):
                pass
            text = str(caught.value)
            assert "full_params" in text and "Every rank must" in text
            assert caught.value.culprits == (1,)
            assert "rank 1" in text and "not waiting" in text
            assert "store.wait" in text or "_others_wait" in text, "where rank 1 is"


@distributed(world=2, timeout=30, expect_pool_loss=True)
def test_a7_shard_on_one_rank() -> None:
    """The other rank made the model and never calls shard()."""
    zs.shard(tiny.mlp(), config=SHORT)
    with _others_wait():
        if dist.get_rank() == 0:
            with pytest.raises(DesyncError, match="rank 1"):
                zs.shard(tiny.mlp(), config=SHORT)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@distributed(world=2, timeout=40, expect_pool_loss=True)
def test_a9_a_skipped_gather(direction: str) -> None:
    """Rank 1 leaves out one gather; every rank reports rank, unit and state within the timeout."""
    _skip_a_gather(direction)


@distributed(world=3, timeout=40, expect_pool_loss=True)
def test_a9_a_skipped_gather_on_three_ranks() -> None:
    _skip_a_gather("forward")


def _skip_a_gather(direction: str) -> None:
    model = zs.shard(tiny.mlp(8, 3), config=zs.Config(timeout=2, prefetch=0, reshard="always"))
    engine = model.__dict__["_zerosharder"].engine
    for step in range(2):
        model(tiny.features(step)).sum().backward()
    victim = next(unit for unit in engine.units if unit.name == "layers.1")
    gathers = 0
    original = PairwiseExchange.gather

    def skip_one(self: PairwiseExchange, parts, tag):
        nonlocal gathers
        if tag == engine.runtime.tag(victim.index):
            gathers += 1
            if dist.get_rank() == 1 and gathers == (1 if direction == "forward" else 2):
                return original(self, [], tag)
        return original(self, parts, tag)

    PairwiseExchange.gather = skip_one
    try:
        with pytest.raises(DesyncError) as caught:
            for step in range(5):
                model(tiny.features(step)).sum().backward()
    finally:
        PairwiseExchange.gather = original
    text = str(caught.value)
    for rank in range(dist.get_world_size()):
        assert f"rank {rank}" in text
    assert "layers." in text and "order so far" in text
    assert direction in text, "the state each rank is in"
    assert caught.value.culprits


@distributed(world=2, timeout=40, expect_pool_loss=True)
def test_a9_a_skipped_reduction() -> None:
    model = zs.shard(tiny.mlp(8, 3), config=SHORT)
    original = PairwiseExchange.reduce
    calls = 0

    def skip_one(self: PairwiseExchange, parts, dtype, tag):
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 2:
            return original(self, [], dtype, tag)
        return original(self, parts, dtype, tag)

    PairwiseExchange.reduce = skip_one
    try:
        with pytest.raises(DesyncError) as caught:
            for step in range(5):
                model(tiny.features(step)).sum().backward()
    finally:
        PairwiseExchange.reduce = original
    assert "reduce" in str(caught.value) and "layers." in str(caught.value)


@distributed(world=2, timeout=40, expect_pool_loss=True)
def test_a9_a_rank_that_leaves() -> None:
    """Rank 1's script ends early (an exception of its own); rank 0 is told, with rank 1's name."""
    model = zs.shard(tiny.mlp(8, 3), config=SHORT)
    model(tiny.features(0)).sum().backward()
    with _others_wait():
        if dist.get_rank() == 0:
            with pytest.raises(DesyncError) as caught:
                model(tiny.features(1)).sum().backward()
            assert caught.value.culprits == (1,)


# -- A11: the device is the group's --


@distributed(world=2)
def test_a11_device_of_the_group() -> None:
    """A gloo group on a machine that says it has an accelerator: the model stays on the CPU."""
    before = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        model = zs.shard(tiny.mlp())
    finally:
        torch.cuda.is_available = before
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
    model(tiny.features(0)).square().mean().backward()
    plain = copy.deepcopy(tiny.mlp())
    plain(tiny.features(0)).square().mean().backward()
    average_grads(plain)
    assert_same(full_grads(model), full_grads(plain))
