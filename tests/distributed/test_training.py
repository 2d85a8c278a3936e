"""Sharded fp32 training gives the numbers of DistributedDataParallel, or of a plain loop in a world of one."""

from __future__ import annotations

import functools

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, full_params, reference_ddp
from runs import CHECKPOINT, RESHARD, SIZES, STEPS, bound, sharded, under_ddp
from tiny import OPTIMIZERS, adamw, gpt, gpt_loss, train
from torch import Tensor, nn

import zerosharder as zs


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@distributed(world=SIZES)
def test_gradients_are_those_of_ddp(world: int, tied: bool) -> None:
    plain = gpt(tied=tied)
    wrapped = reference_ddp(plain)
    model = zs.shard(gpt(tied=tied))
    for step in range(3):
        gpt_loss(wrapped, step).backward()
        gpt_loss(model, step).backward()
        assert_same(full_grads(model), full_grads(plain), atol=bound(world), what=f"step {step}")
        with torch.no_grad():
            for p in (*plain.parameters(), *model.parameters()):
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


def _assert_losses_of_ddp(world: int, optimizer: str) -> None:
    expected, weights = under_ddp(optimizer, STEPS)
    losses, found = sharded(optimizer, STEPS)
    assert losses[-1] < 0.95 * losses[0], "it did not train"
    assert_same(losses, expected, atol=bound(world), what="losses")
    if world == 2:
        assert_same(found, weights, what="weights")


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(world=2)
def test_losses_over_20_steps_are_those_of_ddp(optimizer: str) -> None:
    _assert_losses_of_ddp(2, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
@distributed(world=(3, 4))
def test_losses_over_20_steps_are_those_of_ddp_on_more_ranks(world: int, optimizer: str) -> None:
    _assert_losses_of_ddp(world, optimizer)


@distributed(world=SIZES)
def test_two_runs_have_the_same_bits(world: int) -> None:
    one, other = sharded("adamw", 8), sharded("adamw", 8)
    assert_same(one[0], other[0], what="losses")
    assert_same(one[1], other[1], what="weights")


@distributed(world=SIZES)
def test_every_rank_has_the_same_weights(world: int) -> None:
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    train(model, optimizer, 3)
    with zs.full_params(model):
        for name, param in model.named_parameters():
            mine = param.detach().clone()
            of_first = mine.clone()
            dist.broadcast(of_first, 0)
            assert_same(mine, of_first, what=name)


PREFETCH = ["0", "auto", "64KiB", "1GB"]


@CHECKPOINT
@RESHARD
@distributed(world=2)
def test_settings_do_not_change_a_bit(reshard: str, checkpoint: str | None) -> None:
    expected, weights = under_ddp("adamw", 5)
    for prefetch in PREFETCH:
        config = zs.Config(reshard=reshard, prefetch=prefetch)
        losses, found = sharded("adamw", 5, config, checkpoint=checkpoint)
        assert_same(losses, expected, what=f"losses with prefetch {prefetch}")
        assert_same(found, weights, what=f"weights with prefetch {prefetch}")


@functools.cache
def _of_default_settings() -> tuple[list[Tensor], dict[str, Tensor]]:
    return sharded("sgd_momentum", 4, tied=True)


@RESHARD
@distributed(world=3)
def test_settings_do_not_change_a_bit_at_three_ranks(reshard: str) -> None:
    expected, weights = _of_default_settings()
    for prefetch in ("0", "64KiB"):
        config = zs.Config(reshard=reshard, prefetch=prefetch)
        losses, found = sharded("sgd_momentum", 4, config, tied=True)
        assert_same(losses, expected, what=f"losses with prefetch {prefetch}")
        assert_same(found, weights, what=f"weights with prefetch {prefetch}")


@pytest.mark.parametrize("choice", ["blocks", "leaves", "predicate", "one"])
@distributed(world=2)
def test_choice_of_units_does_not_change_a_bit(choice: str) -> None:
    expected, weights = under_ddp("adamw", 5)
    units = {
        "blocks": [tiny.Block],
        "leaves": [nn.Linear, nn.Embedding, nn.LayerNorm],
        "predicate": lambda name, module: name.endswith(("up", "down", "head")),
        "one": ["blocks"],
    }[choice]
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, units=units)
    assert_same(train(model, optimizer, 5), expected, what="losses")
    assert_same(full_params(model), weights, what="weights")


# -- a world of one --


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(world=1)
def test_world_of_one_is_the_plain_loop(optimizer: str) -> None:
    plain = gpt()
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()), STEPS)
    losses, found = sharded(optimizer, STEPS)
    assert_same(losses, expected, what="losses")
    assert_same(found, full_params(plain), what="weights")
