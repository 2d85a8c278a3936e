"""Meshes: shards inside, replicas across, and a part of the ranks."""

from __future__ import annotations

import pytest
import tiny
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, reference_ddp
from runs import BOUND, under_ddp
from tiny import OPTIMIZERS, gpt, gpt_loss, train
from torch.distributed.device_mesh import init_device_mesh

import zerosharder as zs


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])
@distributed(world=4)
def test_hsdp(shape: tuple[int, int]) -> None:
    expected, weights = under_ddp("sgd_momentum", 10)
    model = gpt()
    optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    zs.shard(model, optimizer, mesh=mesh)
    assert_same(train(model, optimizer, 10), expected, rtol=BOUND, what="losses")
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    assert_same(found, weights, rtol=BOUND, what="weights")
    for name, full in found.items():
        of_first = full.clone()
        dist.broadcast(of_first, 0)
        assert_same(full, of_first, what=f"{name} is the same on all replicas")


@distributed(world=4)
def test_hsdp_gradients() -> None:
    plain = gpt()
    wrapped = reference_ddp(plain)
    mesh = init_device_mesh("cpu", (2, 2))
    model = zs.shard(gpt(), mesh=mesh)
    for i in range(2):  # the second adds to the first
        gpt_loss(wrapped, 0, i).backward()
        gpt_loss(model, 0, i).backward()
        assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what=f"backward {i}")


@distributed(world=4)
def test_shard_over_half_of_the_ranks() -> None:
    """A 1-D mesh over some ranks: two independent jobs side by side, each equal to one of two ranks."""
    halves = [[0, 1], [2, 3]]
    meshes = [dist.DeviceMesh("cpu", half) for half in halves]
    side = dist.get_rank() // 2
    model = zs.shard(gpt(), mesh=meshes[side])
    gpt_loss(model, 0).backward()
    mine = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    plain = gpt()
    for rank in halves[side]:
        batch = tiny.tokens(0, of=rank)
        tiny.token_loss(plain(batch), batch).backward()
    assert_same(mine, {name: p.grad / 2 for name, p in plain.named_parameters()}, rtol=BOUND)
