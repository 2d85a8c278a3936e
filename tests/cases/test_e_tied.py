"""Tied weights, with nothing said about them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import tiny
import torch
import torch.nn.functional as F
from harness import distributed
from parity import assert_same, full_grads, full_params, reference_ddp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zerosharder as zs
from zerosharder.partition import select


def _equal_to_ddp(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: int = 4,
    optimizer: str = "adamw",
    **settings,
) -> nn.Module:
    plain = build()
    by_hand = tiny.OPTIMIZERS[optimizer](plain.parameters())
    expected = tiny.train(reference_ddp(plain), by_hand, steps, loss_of)
    model = build()
    adopted = tiny.OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, adopted, **settings)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_same(tiny.train(model, adopted, steps, loss_of), expected, what="losses")
    assert_same(full_params(model), full_params(plain), what="weights")
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("units", [None, "embed", "head"])
@distributed(world=2)
def test_e1_embedding_and_head(units: str | None, optimizer: str) -> None:
    chosen = None if units is None else [tiny.Block, units]
    model = _equal_to_ddp(lambda: tiny.gpt(tied=True), tiny.gpt_loss, optimizer=optimizer, units=chosen)
    assert model.head.weight is model.embed.weight


@distributed(world=2)
def test_e1_large_tied_weight_is_a_unit_of_its_own() -> None:
    """Above the size at which a leftover is large, it is gathered for each of its two users."""
    before = select.LARGE_NUMEL
    select.LARGE_NUMEL = 1024
    try:
        model = _equal_to_ddp(lambda: tiny.gpt(tied=True), tiny.gpt_loss, units=[tiny.Block, "embed", "head"])
    finally:
        select.LARGE_NUMEL = before
    names = [unit.name for unit in model.__dict__["_zerosharder"].engine.units]
    assert "embed.weight" in names


class Shared(nn.Module):
    """Blocks that share: a whole layer, one weight, one bias."""

    def __init__(self, share: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(4))
        if share == "module":
            self.layers[2] = self.layers[0]
        elif share == "inner module":
            self.layers[2].linear = self.layers[0].linear
        elif share == "weight":
            for layer in self.layers[1:]:
                layer.linear.weight = self.layers[0].linear.weight
        elif share == "bias":
            self.layers[3].linear.bias = self.layers[1].linear.bias
        elif share == "with root":
            self.own = self.layers[1].linear.weight
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.own if self.share == "with root" else x


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("share", ["module", "inner module", "weight", "bias", "with root"])
@distributed(world=2)
def test_e1_blocks_that_share(share: str, checkpoint: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Shared(share)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = tiny.features(step).requires_grad_()
        if checkpoint:
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()
        return model(x).square().mean()

    _equal_to_ddp(build, loss_of)


class Borrowing(nn.Module):
    """The head has no module: it reads the embedding's weight, from the root or from a block."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, 8)
        self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(2))
        self.by = by

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.by == "weight":
            return F.linear(x, self.embed.weight)
        if self.by == "matmul":
            return x @ self.embed.weight.T
        return torch.einsum("blw,vw->blv", x, dict(self.embed.named_parameters())["weight"])


@pytest.mark.parametrize("by", ["weight", "matmul"])
@pytest.mark.parametrize("units", [None, "embed"])
@distributed(world=2)
def test_e1_weight_read_without_a_call(units: str | None, by: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Borrowing(by)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        batch = tiny.tokens(step)
        return tiny.token_loss(model(batch), batch)

    _equal_to_ddp(build, loss_of, units=None if units is None else [tiny.Layer, units])


@distributed(world=2)
def test_e1_untied_after_a_copy() -> None:
    """A deepcopy before shard() keeps its own ties; sharding one leaves the other alone."""
    model = tiny.gpt(tied=True)
    other = copy.deepcopy(model)
    zs.shard(model)
    assert other.head.weight is other.embed.weight
    tiny.gpt_loss(other, 0).backward()
    wrapped = reference_ddp(tiny.gpt(tied=True))
    tiny.gpt_loss(wrapped, 0).backward()
    tiny.gpt_loss(model, 0).backward()
    assert_same(full_grads(model), full_grads(wrapped))


@distributed(world=(1, 2))
def test_e3_state_dict_names_every_alias(world: int) -> None:
    """Both names of a tied weight are in the state dict, which a plain model loads strictly."""
    plain = tiny.gpt(tied=True)
    model = zs.shard(tiny.gpt(tied=True))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert "head.weight" in state and "embed.weight" in state
    whole = {name: v.full_tensor() if world > 1 else v for name, v in state.items()}
    of_torch = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for found in (whole, of_torch):
        torch.manual_seed(99)
        fresh = tiny.GPT(tied=True)
        fresh.load_state_dict(found, strict=True)
        assert_same(full_params(fresh), full_params(plain))
