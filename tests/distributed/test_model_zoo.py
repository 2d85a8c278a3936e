"""Architectures that people wrote, sharded with the one line and nothing else, train as they do under DDP.

`pytest tests/distributed/test_model_zoo.py -rP` prints a row for each: seconds, and whether all bits are the same.
"""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import distributed, note
from parity import assert_same, average_grads, full_params, is_bitwise, reference_ddp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zoo.architecture import Architecture

STEPS = 3
BOUND = 1e-6  # relative to the largest magnitude in each tensor


# One of each way in which transformers' layers hand their weights to a checkpoint: the recomputation calls the class's
# forward, not the module.
CHECKPOINTED = ["llama", "gpt2", "mixtral", "bert", "modernbert", "t5", "vit", "wav2vec2", "whisper"]


@pytest.mark.parametrize("name", list(zoo.ZOO))
@distributed(world=2, timeout=120, env={"ZEROSHARDER_TIMEOUT": "20"})
def test_architecture(name: str) -> None:
    _compare(zoo.ZOO[name])


@pytest.mark.parametrize("name", CHECKPOINTED)
@distributed(world=2, timeout=120, env={"ZEROSHARDER_TIMEOUT": "20"})
def test_architecture_with_activation_checkpointing(name: str) -> None:
    make = zoo.ZOO[name].make

    def checkpointed() -> nn.Module:
        model = make()
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable()
        return model

    _compare(dataclasses.replace(zoo.ZOO[name], make=checkpointed, ddp=False))


def _compare(arch: Architecture) -> None:
    import zerosharder as zs

    start = time.perf_counter()
    model = arch.build()
    optimizer = _adamw(model)
    wrapped = reference_ddp(model) if arch.ddp else model
    expected_losses = _train(arch, wrapped, optimizer, average=not arch.ddp)
    expected = full_params(wrapped)
    del model, wrapped, optimizer
    between = time.perf_counter()

    model = arch.build()
    optimizer = _adamw(model)
    zs.shard(model, optimizer)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    losses = _train(arch, model, optimizer)
    found = full_params(model)
    end = time.perf_counter()

    bits = (
        "same bits"
        if is_bitwise([*losses, *found.values()], [*expected_losses, *expected.values()])
        else "close"
    )
    row = f"{arch.name:20s} {arch.kind:22s} {bits}"
    if dist.get_rank() == 0:
        print(f"{row:54s} {between - start:5.2f} s reference  {end - between:5.2f} s sharded")
        if bits == "close":
            note(f"model zoo: {row}")
    assert_same(losses, expected_losses, rtol=BOUND, what=f"{arch.name}, losses")
    assert_same(found, expected, rtol=BOUND, what=f"{arch.name}, parameters after {STEPS} steps")


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=False)


def _train(
    arch: Architecture, model: nn.Module, optimizer: torch.optim.Optimizer, average: bool = False
) -> list[Tensor]:
    """The loss of each step on this rank."""
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        loss = arch.loss(model, arch.inputs(step, dist.get_rank()))
        loss.backward()
        if average:
            average_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_zoo_is_wide() -> None:
    kinds = {arch.kind for arch in zoo.ZOO.values()}
    assert len(zoo.ZOO) >= 28
    assert kinds >= {
        "decoder",
        "encoder",
        "encoder-decoder",
        "moe",
        "state-space",
        "vision",
        "audio",
        "unet",
        "weight sharing",
    }
