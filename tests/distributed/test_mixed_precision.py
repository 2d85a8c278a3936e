"""Compute and reduction in bf16 and fp16, with fp32 masters, against a reference by hand."""

from __future__ import annotations

import copy
import functools

import pytest
import tiny
import torch
from harness import distributed
from parity import assert_same, full_grads, full_params
from runs import BOUND, CHECKPOINT, RESHARD, plain_tensor, step_bound
from tiny import OPTIMIZERS, Reference, adamw, gpt, gpt_loss
from torch import Tensor, nn

import zerosharder as zs


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw", "adamw_fused"])
@distributed(world=(2, 3))
def test_bf16(world: int, optimizer: str) -> None:
    reference = Reference(gpt(), torch.bfloat16)
    by_hand = OPTIMIZERS[optimizer](reference.masters.parameters())
    model = gpt()
    made = OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, made, config=zs.Config(param_dtype="bf16"))
    for step in range(6):
        expected = gpt_loss(reference.model, step)
        reference.backward(expected)
        loss = gpt_loss(model, step)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        if not optimizer.endswith("fused"):
            assert_same(loss, expected, what=f"loss of step {step}")
            assert_same(full_grads(model), reference.grads(), what=f"gradients of step {step}")
        for o in (by_hand, made):
            o.step()
            o.zero_grad()
        reference.refresh()
    assert_same(full_params(model), reference.params(), rtol=step_bound(optimizer), what="weights")


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@distributed(world=(2, 3))
def test_reduce_dtype(world: int, param_dtype: str) -> None:
    dtype = torch.bfloat16 if param_dtype == "bf16" else torch.float32
    reference = Reference(gpt(), dtype, wire=torch.bfloat16)
    by_hand = adamw(reference.masters)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype=param_dtype, reduce_dtype="bf16"))
    for step in range(4):
        reference.backward(gpt_loss(reference.model, step))
        gpt_loss(model, step).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert_same(full_grads(model), reference.grads(), what=f"gradients of step {step}")
        for o in (by_hand, optimizer):
            o.step()
            o.zero_grad()
        reference.refresh()
    assert_same(full_params(model), reference.params(), what="weights")


class Poisoned(nn.Module):
    """An MLP and a vector of which one element gets a gradient beyond fp16 where `poison` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny.MLP(16, 3)
        self.tail = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, poison: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.tail * poison


def _poisoned_loss(model: nn.Module, step: int, element: int | None) -> Tensor:
    poison = torch.ones(2)
    if element is not None:
        poison[element] = 6e4  # fits fp16, its product with the scale does not
    out, tail = model(tiny.features(step, 16), poison)
    return out.float().square().mean() + tail.float().sum()


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw", "adamw_fused", "adamw_foreach"])
@distributed(world=(1, 2))
def test_fp16_with_gradient_scaler(world: int, optimizer: str) -> None:
    """Steps 1 and 3 have an infinite gradient, on one rank's shard only; all ranks must skip them."""
    torch.manual_seed(7)
    plain = Poisoned()
    model = copy.deepcopy(plain)
    reference = Reference(plain, torch.float16)
    by_hand = OPTIMIZERS[optimizer](reference.masters.parameters())
    made = OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, made, config=zs.Config(param_dtype="fp16"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    scales = []
    for step in range(8):
        element = {1: 0, 3: 1}.get(step)
        x = _poisoned_loss(functools.partial(_in_half, reference.model), step, element)
        reference.backward(scalers[0].scale(x))
        loss = _poisoned_loss(model, step, element)
        scalers[1].scale(loss).backward()
        assert_same(loss, x, what=f"loss of step {step}")
        before = full_params(model)
        for scaler, o in zip(scalers, (by_hand, made), strict=True):
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        reference.refresh()
        scales.append(scalers[1].get_scale())
        assert scales[-1] == scalers[0].get_scale()
        after = full_params(model)
        if element is not None:
            assert_same(after, before, what=f"weights after the skipped step {step}")
        assert_same(after, reference.params(), rtol=step_bound(optimizer), what=f"weights after step {step}")
    assert scales[1] < scales[0] and scales[3] < scales[2] and scales[-1] > scales[3]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        steps = [o.state[p].get("step") for o, p in ((made, a), (by_hand, b))]
        assert steps[0] == steps[1], "skipped steps are not counted"


def _in_half(model: nn.Module, *args: Tensor) -> object:
    return model(*(a.half() for a in args))


@distributed(world=2)
def test_unscaled_before_clipping() -> None:
    """The usual order with clipping: unscale_, clip, step, update."""
    torch.manual_seed(7)
    plain = Poisoned()
    model = copy.deepcopy(plain)
    reference = Reference(plain, torch.float16)
    by_hand = adamw(reference.masters)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype="fp16"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(4):
        element = 1 if step == 1 else None
        reference.backward(
            scalers[0].scale(_poisoned_loss(functools.partial(_in_half, reference.model), step, element))
        )
        scalers[1].scale(_poisoned_loss(model, step, element)).backward()
        norms = []
        for scaler, o, m in zip(scalers, (by_hand, optimizer), (plain, model), strict=True):
            scaler.unscale_(o)
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        reference.refresh()
        if element is None:
            assert_same(plain_tensor(norms[1]), norms[0], rtol=BOUND, what="norm")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(full_params(model), reference.params(), atol=1e-5, what="weights")


@CHECKPOINT
@RESHARD
@distributed(world=1)
def test_world_of_one_in_bf16(reshard: str, checkpoint: str | None) -> None:
    """Casts need every part of the machinery: slots, gathers, frees, reductions."""
    reference = Reference(gpt(checkpoint=checkpoint), torch.bfloat16)
    by_hand = adamw(reference.masters)
    model = gpt(checkpoint=checkpoint)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype="bf16", reshard=reshard))
    for step in range(6):
        expected = gpt_loss(reference.model, step)
        reference.backward(expected)
        by_hand.step()
        by_hand.zero_grad()
        reference.refresh()
        loss = gpt_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(loss, expected, what=f"loss of step {step}")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert_same(full_params(model), reference.params(), what="weights")
