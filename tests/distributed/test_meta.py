"""Models built on the meta device: values, ties, mixtures, and how much memory a rank needs while they become real.

Buffers of such models are in cases/test_j_meta_buffers.py.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_params, reference_ddp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerosharder as zs
from zerosharder.errors import ShardError


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _initialised(model: nn.Module, modules: list[str]) -> nn.Module:
    """A copy of `model` with memory, its `modules` initialised in this order by reset_parameters."""
    real = copy.deepcopy(model).to_empty(device="cpu")
    for name in modules:
        real.get_submodule(name).reset_parameters()
    return real


class Seeded(nn.Linear):
    """Draws its values from a seed of its own, so that they do not depend on what was drawn before."""

    def __init__(self, n: int, seed: int) -> None:
        self.seed = seed
        super().__init__(n, n)

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=generator))
            self.bias.copy_(torch.randn(self.bias.shape, generator=generator))


class Scale(nn.Module):
    """A parameter and no way to initialise it."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


# -- values --


@distributed(world=(1, 2, 3))
def test_values_are_those_of_the_same_initialisation_unsharded(world: int) -> None:
    """reset_parameters of each module, with rank 0's seed: units in order, root first, and their modules in order."""
    plain = _on_meta(tiny.MLP)
    torch.manual_seed(5)
    expected = full_params(_initialised(plain, ["project", *(f"layers.{i}.linear" for i in range(3))]))
    torch.manual_seed(5 + tiny.rank())
    model = zs.shard(_on_meta(tiny.MLP))
    assert not any(p.is_meta for p in model.parameters())
    assert_same(full_params(model), expected)


@distributed(world=2)
def test_values_that_do_not_depend_on_an_order_are_those_of_an_eager_build() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Seeded(8, i) for i in range(4)), nn.LayerNorm(8))

    eager = build()
    for units in (None, [Seeded], ["2", "0"]):
        model = zs.shard(_on_meta(build), units=units)
        assert_same(full_params(model), full_params(eager), what=str(units))


@distributed(world=2)
def test_training_afterwards_is_that_of_the_same_weights_unsharded() -> None:
    """With the optimizer built from the meta model, and from the sharded one; one parameter stays frozen."""

    def build() -> nn.Module:
        model = _on_meta(tiny.MLP)
        model.project.bias.requires_grad_(False)
        return model

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step)).square().mean()

    torch.manual_seed(5)
    plain = _initialised(build(), ["project", *(f"layers.{i}.linear" for i in range(3))])
    expected = tiny.train(reference_ddp(plain), tiny.adamw(plain), 4, loss_of)
    for late in (False, True):
        torch.manual_seed(5)
        model = build()
        optimizer = None if late else tiny.adamw(model)
        zs.shard(model, optimizer)
        if optimizer is None:
            optimizer = tiny.adamw(model)
            zs.shard(model, optimizer)
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["project.bias"]
        assert_same(tiny.train(model, optimizer, 4, loss_of), expected, what=f"losses, late={late}")
        assert_same(full_params(model), full_params(plain), what=f"weights, late={late}")


@distributed(world=2)
def test_dtypes_and_attributes_of_meta_parameters_stay() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
        model[0].weight.note = "mine"
        return model

    model = zs.shard(_on_meta(build))
    assert [p.dtype for p in model.parameters()] == 2 * [torch.float32] + 2 * [torch.bfloat16]
    assert model[0].weight.note == "mine"


@distributed(world=2)
def test_values_loaded_afterwards_replace_the_initial_ones() -> None:
    eager = tiny.mlp()
    model = zs.shard(_on_meta(tiny.MLP))
    model.load_state_dict(eager.state_dict())
    assert_same(full_params(model), full_params(eager))


# -- mixtures --


@distributed(world=2)
def test_modules_with_values_keep_them_beside_modules_on_meta() -> None:
    model = nn.Sequential(tiny.Layer(8), _on_meta(lambda: tiny.Layer(8)), tiny.Layer(8), nn.Linear(8, 8))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
    assert len(before) == 6
    zs.shard(model, units=[tiny.Layer])
    found = full_params(model)
    if dist.get_rank() == 0:  # the values of rank 0 win
        assert_same({n: found[n] for n in before}, before)
    fresh = found["1.linear.weight"]
    assert fresh.isfinite().all() and fresh.unique().numel() == 64


def test_a_parameter_with_values_keeps_them_beside_one_on_meta_in_its_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.ones_(model[0].weight)
    model[0].bias = nn.Parameter(torch.empty(8, device="meta"))
    zs.shard(model)
    assert_same(full_params(model)["0.weight"], torch.ones(8, 8))


@distributed(world=3)
def test_rank_0_has_values_and_the_others_build_on_meta() -> None:
    eager = tiny.mlp()
    model = tiny.mlp() if dist.get_rank() == 0 else _on_meta(tiny.MLP)
    optimizer = tiny.sgd(model)
    zs.shard(model, optimizer)
    assert_same(full_params(model), full_params(eager))
    model(tiny.features(0)).square().mean().backward()
    optimizer.step()


@distributed(world=2, timeout=30, env={"ZEROSHARDER_TIMEOUT": "2"})
def test_values_of_rank_0_need_no_initialisation_on_the_others() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Scale())

    model = build() if dist.get_rank() == 0 else _on_meta(build)
    zs.shard(model)
    assert_same(full_params(model)["1.factor"], torch.ones(8))


# -- ties --


@distributed(world=2)
def test_a_tied_weight_stays_tied_and_gets_the_values_of_its_first_owner() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = Seeded(8, 1), Seeded(8, 2), nn.Linear(8, 8, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    for units in (None, ["middle"], ["last"]):
        model = zs.shard(_on_meta(Tied), units=units)
        assert model.last.weight is model.first.weight
        assert_same(full_params(model), full_params(Tied()), what=str(units))
        model(torch.ones(2, 8)).sum().backward()
        assert model.last.weight.grad is model.first.weight.grad is not None


def test_a_tied_weight_keeps_its_first_owners_values_when_the_second_has_a_bias() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Seeded(8, 1), nn.Linear(8, 8)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    model = zs.shard(_on_meta(Tied))
    assert_same(full_params(model)["first.weight"], full_params(Seeded(8, 1))["weight"])


# -- what nobody can initialise --


@distributed(world=(1, 2))
def test_modules_without_an_initialisation_are_named_with_the_fix(world: int) -> None:
    """Every such parameter of the unit, on every rank, and nothing that has an initialisation."""
    model = _on_meta(lambda: nn.Sequential(nn.Linear(8, 8), Scale(), nn.Sequential(Scale(), nn.LayerNorm(8))))
    with pytest.raises(ShardError) as caught:
        zs.shard(model)
    message = str(caught.value)
    assert "1.factor" in message and "2.0.factor" in message
    assert "0.weight" not in message and "2.1" not in message
    assert "reset_parameters" in message and "_init_weights" in message and "to_empty" in message


@distributed(world=2)
def test_an_initialisation_by_the_model_counts_and_the_nearest_one_wins() -> None:
    """_init_weights of an ancestor, the convention of transformers, before reset_parameters."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Scale):
                nn.init.constant_(module.factor, 3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner, self.scale = nn.Linear(8, 8), Inner(), Scale()

        def _init_weights(self, module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, 7.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.inner(self.linear(x)))

    found = full_params(zs.shard(_on_meta(Outer)))
    assert {n: p.unique().tolist() for n, p in found.items()} == {
        "linear.weight": [7.0],
        "linear.bias": [7.0],
        "inner.scale.factor": [3.0],
        "scale.factor": [7.0],
    }


# -- transformers --


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=8,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def _gpt2_loss(model: nn.Module, step: int) -> Tensor:
    ids = tiny.tokens(step)
    return model(input_ids=ids, labels=ids).loss


@distributed(world=2)
def test_gpt2_of_transformers() -> None:
    """Constants are those of an eager build, the head stays tied, and it trains as the same weights do under DDP."""
    eager = _gpt2()
    model = _on_meta(_gpt2)
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer)
    assert model.lm_head.weight is model.transformer.wte.weight
    found = full_params(model)
    constant = {n: p.detach() for n, p in eager.named_parameters() if p.unique().numel() == 1}
    assert len(constant) > 8 * 6
    assert_same({n: found[n] for n in constant}, constant)
    for name in ("transformer.wte.weight", "transformer.h.3.attn.c_attn.weight"):
        assert 0.018 < found[name].std() < 0.022, name
    eager.load_state_dict(found | {"lm_head.weight": found["transformer.wte.weight"]})
    expected = tiny.train(reference_ddp(eager), tiny.adamw(eager), 3, _gpt2_loss)
    assert_same(tiny.train(model, optimizer, 3, _gpt2_loss), expected, what="losses")
    assert_same(full_params(model), full_params(eager), what="weights")


def test_gpt2_projections_into_the_residual_are_scaled_by_the_depth() -> None:
    """GPT2's _init_weights sets these weights when it is given the attention and the MLP, their parents."""
    model = zs.shard(_on_meta(_gpt2))
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight"):
        assert 0.004 < model.get_parameter(name).std() < 0.006, "0.02 / sqrt(2 * 8)"


# -- memory --


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operators returned and that are alive, now and at most, looked at after each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            # The storage of a DTensor is that of its local tensor.
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    weakref.finalize(storage, self.sizes.pop, key, None)
                self.sizes[key] = storage.nbytes()  # again: a storage may have been resized
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result

    @property
    def now(self) -> int:
        return sum(self.sizes.values())


WIDE, DEPTH = 128, 16


@distributed(world=(2, 4))
def test_a_rank_never_holds_more_than_its_shard_and_one_unit(world: int) -> None:
    """Also rank 0, which sends the others their rows: one peer's at a time."""
    torch.manual_seed(0)
    model = _on_meta(lambda: tiny.MLP(WIDE, DEPTH))
    total = sum(4 * p.numel() for p in model.parameters())
    unit = 4 * (WIDE * WIDE + WIDE)
    with LiveBytes() as live:
        zs.shard(model)
    shard = total / world
    slack = 64 * 1024 + (DEPTH + 1) * 8192  # alignment of each flat buffer, messages
    assert live.peak <= shard + unit + unit / world + slack < 0.8 * total, (live.peak, shard, unit)
    assert shard <= live.now <= shard + slack, (live.now, shard)


@distributed(world=2)
def test_whole_parameters_of_a_model_with_values_are_given_back() -> None:
    """Also those that somebody keeps."""
    with LiveBytes() as live:
        model = tiny.MLP(WIDE, DEPTH)
        kept = list(model.parameters())
        zs.shard(model, torch.optim.AdamW(kept))
    total = sum(4 * p.numel() for p in model.parameters())
    assert total / 2 <= live.now <= 0.7 * total < live.peak, (live.now, live.peak, total)
    assert len(kept) == 2 * (DEPTH + 1)
