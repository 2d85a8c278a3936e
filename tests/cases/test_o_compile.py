"""torch.compile and sharding, in either order. The same bits as eager, no recompilation."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from harness import distributed
from parity import assert_same, full_grads, full_params
from tiny import GPT, adamw, features, gpt, gpt_loss, mlp, sgd, train
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import zerosharder as zs

SMALL = {"width": 16, "depth": 2}


def _compile_blocks(model: GPT, backend: object) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def _replace_blocks(model: GPT, backend: object) -> None:
    """The other spelling: a wrapper takes the block's place in the list."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


def _compile_model(model: GPT, backend: object) -> None:
    model.compile(backend=backend)


WAYS = {"blocks": _compile_blocks, "wrapped-blocks": _replace_blocks, "model": _compile_model}


def _expected(steps: int, **settings: object) -> tuple[list[Tensor], list[Tensor]]:
    model = gpt(**SMALL, **settings)
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    losses = train(model, optimizer, steps)
    return losses, list(full_params(model).values())


def _run(
    way: str, order: str, backend: object, steps: int, **settings: object
) -> tuple[list[Tensor], list[Tensor]]:
    model = gpt(**SMALL, **settings)
    if order == "compile-first":
        WAYS[way](model, backend)
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    if order == "shard-first":
        WAYS[way](model, backend)
    losses = train(model, optimizer, steps)
    return losses, list(full_params(model).values())


@pytest.mark.parametrize("order", ["compile-first", "shard-first"])
@pytest.mark.parametrize("way", list(WAYS))
@distributed(world=2, timeout=120)
def test_o1_parity_and_no_recompilation(way: str, order: str) -> None:
    counter = CompileCounterWithBackend("eager")
    expected = _expected(4)
    found = _run(way, order, counter, 4)
    assert_same(found[0], expected[0], what="losses")
    assert_same(found[1], expected[1], what="weights")
    assert counter.frame_count > 0, "nothing was compiled"
    # Compilation happens in the first step (blocks share their code), once more if a size becomes dynamic.
    again = counter.frame_count
    assert again <= (2 if way != "model" else 12), again


@distributed(world=2, timeout=120)
def test_o1_nothing_is_compiled_after_warm_up() -> None:
    model = gpt(**SMALL)
    counter = CompileCounterWithBackend("eager")
    _compile_blocks(model, counter)
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    train(model, optimizer, 2)
    warm = counter.frame_count
    train(model, optimizer, 4, first=2)
    with torch.no_grad():
        gpt_loss(model, 0)
    train(model, optimizer, 2, first=6)
    assert counter.frame_count - warm <= 1, (warm, counter.frame_count)


@pytest.mark.parametrize("order", ["compile-first", "shard-first"])
@distributed(world=2, timeout=120)
def test_o1_aot_autograd(order: str) -> None:
    """The backward is a compiled graph, too, and what it saves are the weights it was given."""
    expected = _expected(3)
    found = _run("blocks", order, "aot_eager", 3)
    assert_same(found[0], expected[0], what="losses")
    assert_same(found[1], expected[1], what="weights")


@pytest.mark.parametrize("checkpoint", ["plain", "reentrant"])
@distributed(world=2, timeout=120)
def test_o1_compiled_blocks_inside_checkpoints(checkpoint: str) -> None:
    expected = _expected(3, checkpoint=checkpoint)
    found = _run("blocks", "compile-first", "aot_eager", 3, checkpoint=checkpoint)
    assert_same(found[0], expected[0], what="losses")
    assert_same(found[1], expected[1], what="weights")


@distributed(world=2, timeout=240)
def test_o1_inductor() -> None:
    """Generated C++ code sums in another order, so the bound is not zero."""
    expected = mlp(16, 2)
    model = mlp(16, 2)
    for layer in model.layers:
        layer.compile(backend="inductor")
    optimizer, reference = sgd(model), sgd(expected)
    zs.shard(model, optimizer)
    zs.shard(expected, reference)
    for step in range(3):
        for m, o in ((model, optimizer), (expected, reference)):
            m(features(step, width=16)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    assert_same(full_params(model), full_params(expected), rtol=1e-5)


@distributed(world=2, timeout=120)
def test_o1_under_no_sync_and_with_a_frozen_layer() -> None:
    """F3's neighbour: a frozen linear inside a compiled block."""

    def run(backend: str | None) -> dict[str, Tensor | None]:
        model = gpt(**SMALL)
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].qkv.requires_grad_(False)
        if backend:
            _compile_blocks(model, backend)
        zs.shard(model)
        with zs.no_sync(model):
            gpt_loss(model, 0).backward()
        gpt_loss(model, 1).backward()
        return full_grads(model)

    expected = run(None)
    assert expected["blocks.0.up.weight"] is None and expected["blocks.0.up.bias"] is not None
    assert_same(run("aot_eager"), expected)


@distributed(world=2, timeout=120)
def test_o1_wrapped_keys_are_torchs_own() -> None:
    """torch.compile(block) adds _orig_mod to names; sharding adds nothing."""
    model = gpt(**SMALL)
    names = list(model.state_dict())
    zs.shard(model)
    assert list(model.state_dict()) == names
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert [n.removeprefix("_orig_mod.") for n in compiled.state_dict()] == names
    gpt_loss(compiled, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
