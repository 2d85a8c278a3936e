"""Runs of the tiny GPT, sharded and under DDP, that tests of training compare, and what their cases share."""

from __future__ import annotations

import functools

import pytest
from parity import full_params, reference_ddp
from tiny import OPTIMIZERS, gpt, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerosharder as zs

# Of the largest magnitude in each tensor, where sums over ranks may run in another order than DDP's.
BOUND = 1e-6
SIZES = (2, 3, 4)
STEPS = 20

RESHARD = pytest.mark.parametrize("reshard", ["auto", "always", "never"])
CHECKPOINT = pytest.mark.parametrize("checkpoint", [None, "plain", "reentrant"])


def bound(world: int) -> float:
    """Two numbers have the same sum in any order."""
    return 0.0 if world <= 2 else BOUND


def step_bound(optimizer: str) -> float:
    """torch's fused kernels round the body and the tail of a vector differently, and shards end elsewhere."""
    return BOUND if optimizer.endswith("fused") else 0.0


def engine(model: nn.Module):
    """The engine behind a sharded model."""
    return model.__dict__["_zerosharder"].engine


@functools.cache
def under_ddp(optimizer: str, steps: int, tied: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and final weights; once in the life of a worker."""
    model = gpt(tied=tied)
    made = OPTIMIZERS[optimizer](model.parameters())
    losses = train(reference_ddp(model), made, steps)
    return losses, full_params(model)


def sharded(optimizer: str, steps: int, config: zs.Config | None = None, **settings) -> tuple[list, dict]:
    """Losses and final weights of the same training, sharded; `settings` are those of the GPT."""
    model = gpt(**settings)
    made = OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, made, config=config)
    losses = train(model, made, steps)
    return losses, full_params(model)


def plain_tensor(norm: Tensor) -> Tensor:
    """The value of what torch's clipping returns."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
