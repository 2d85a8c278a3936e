"""What a script does besides steps: whole parameters, methods besides forward."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params, reference_ddp
from runs import bound, under_ddp
from tiny import adamw, gpt, gpt_loss, sgd, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerosharder as zs
from zerosharder.errors import ShardError


@distributed(world=(1, 2, 3))
def test_full_params_reads(world: int) -> None:
    _, weights = under_ddp("adamw", 3)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    train(model, optimizer, 3)
    sharded = list(model.parameters())
    with zs.full_params(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        # Ranks may run different numbers of forwards in here.
        with torch.no_grad():
            for i in range(1 + dist.get_rank()):
                gpt_loss(model, 50 + i)
    if world <= 2:
        assert_same(found, weights)
    assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
    assert_same(full_params(model), found)


@distributed(world=(1, 2, 3))
def test_full_params_writes(world: int) -> None:
    plain = gpt()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5).add_(torch.arange(p.shape[0]).view(-1, *[1] * (p.dim() - 1)) * 1e-3)
    model = gpt()
    optimizer = sgd(model)
    zs.shard(model, optimizer)
    with zs.full_params(model), torch.no_grad():
        kept = full_params(model)
        for p in model.parameters():
            p.mul_(0.5)
    if world > 1:  # a world of one has no second copy
        assert_same(full_params(model), kept, what="write=False")
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    with zs.full_params(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(torch.arange(p.shape[0]).view(-1, *[1] * (p.dim() - 1)) * 1e-3)
    assert_same(full_params(model), full_params(plain), what="write=True")
    expected = train(reference_ddp(plain), sgd(plain), 2)
    assert_same(train(model, optimizer, 2), expected, rtol=bound(world), what="training after it")


class Encoder(nn.Module):
    """Entry points besides forward, which read what the module itself owns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.body = tiny.MLP(8, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).sum(-1)


@distributed(world=2)
def test_register_forward_method() -> None:
    torch.manual_seed(2)
    plain = Encoder()
    model = copy.deepcopy(plain)
    zs.shard(model)
    zs.register_forward_method(model, "encode")
    for step in range(3):
        x = tiny.features(step)
        for method in ("encode", "forward"):
            expected = getattr(plain, method)(x)
            found = getattr(model, method)(x)
            assert_same(found, expected, what=method)
            expected.square().mean().backward()
            found.square().mean().backward()
            average_grads(plain)
            assert_same(full_grads(model), full_grads(plain), what=f"{method}, step {step}")
            plain.zero_grad()
            model.zero_grad()
    with pytest.raises(ShardError, match="decode"):
        zs.register_forward_method(model, "decode")
