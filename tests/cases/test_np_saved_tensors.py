"""Saved-tensor hooks of other people.

Activation offloading of torch and its likes keeps what autograd saved somewhere else, views of gathered weights
included. Whatever it does and however late, the gradients are those of a run without it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from harness import distributed
from parity import assert_same, full_params
from tiny import GPT, gpt, gpt_loss, rank, sgd
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import zerosharder as zs


def _nothing() -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _delayed() -> AbstractContextManager[Any]:
    """Copies away and back after short waits that differ between ranks."""
    rng = random.Random(rank())

    def pack(t: Tensor) -> Tensor:
        time.sleep(rng.choice((0, 0, 0.0005)))
        return t.detach().clone()

    def unpack(t: Tensor) -> Tensor:
        time.sleep(rng.choice((0, 0, 0.0005)))
        return t.clone()

    return saved_tensors_hooks(pack, unpack)


def _keeping() -> AbstractContextManager[Any]:
    """Keeps the very views, as hooks that only look do: the slots they lie in must rest."""
    return saved_tensors_hooks(lambda t: t, lambda t: t)


OFFLOADS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "delayed": _delayed,
    "keeping": _keeping,
}


def _train(steps: int, around: Callable[[], AbstractContextManager[Any]], model: GPT) -> dict[str, Tensor]:
    optimizer = sgd(model)
    zs.shard(model, optimizer)
    for step in range(steps):
        with around():
            loss = gpt_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    assert zs.stats(model).current_bytes["host"]["gathered"] == 0
    return full_params(model)


@distributed(world=2)
def test_p1_a_hundred_steps_with_random_delays() -> None:
    expected = _train(100, _nothing, gpt(width=16, depth=2))
    assert_same(_train(100, _delayed, gpt(width=16, depth=2)), expected)


@pytest.mark.parametrize("name", list(OFFLOADS))
@distributed(world=2)
def test_p1_hooks_around_the_forward(name: str) -> None:
    expected = _train(3, _nothing, gpt())
    assert_same(_train(3, OFFLOADS[name], gpt()), expected)


@pytest.mark.parametrize("name", list(OFFLOADS))
@distributed(world=2)
def test_p1_hooks_inside_the_model(name: str) -> None:
    """Offloading of some blocks, as trainers do it: the hooks are pushed inside ours."""

    class Offloaded(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            with OFFLOADS[name]():
                return super().forward(tokens)

    torch.manual_seed(7)
    model = Offloaded()
    assert_same(_train(3, _nothing, model), _train(3, _nothing, gpt()))


@pytest.mark.parametrize("checkpoint", ["plain", "reentrant"])
@distributed(world=2)
def test_p1_hooks_around_a_model_that_checkpoints(checkpoint: str) -> None:
    expected = _train(3, _nothing, gpt())
    assert_same(_train(3, torch.autograd.graph.save_on_cpu, gpt(checkpoint=checkpoint)), expected)


@distributed(world=2)
def test_p1_hooks_that_raise_come_out_and_the_next_step_works() -> None:
    model = gpt()
    zs.shard(model)

    def refuse(_: Tensor) -> Tensor:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        with saved_tensors_hooks(refuse, lambda t: t):
            gpt_loss(model, 0)
    zs.reset(model)
    gpt_loss(model, 0).backward()
    plain = zs.shard(gpt())
    gpt_loss(plain, 0).backward()
    assert_same(
        {n: p.grad.full_tensor() for n, p in model.named_parameters()},
        {n: p.grad.full_tensor() for n, p in plain.named_parameters()},
    )


@distributed(world=2)
def test_p1_saved_tensors_are_disabled_and_say_so() -> None:
    """torch can forbid hooks (functorch does); ours must say what that means, not be skipped in silence."""
    model = gpt()
    zs.shard(model)
    with _disabled("not here"):
        with pytest.raises(RuntimeError, match="not here"):
            gpt_loss(model, 0)
    gpt_loss(model, 0).backward()


@contextlib.contextmanager
def _disabled(why: str) -> Iterator[None]:
    with torch.autograd.graph.disable_saved_tensors_hooks(why):
        yield
