"""An exception in the middle of a step, with gathers in flight, and the step after it.

After ``zs.reset`` training goes on exactly as in a run that skipped the batch, and nothing is left over.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_params
from tiny import GPT, adamw, gpt_loss
from torch import Tensor, nn

import zerosharder as zs
from zerosharder.errors import StateError

SETTINGS = {
    "default": {},
    "always": {"reshard": "always"},
    "never": {"reshard": "never"},
    "all-ahead": {"prefetch": "1GiB"},
    "none-ahead": {"prefetch": 0},
    "bf16": {"param_dtype": "bf16"},
}
BAD = 2  # the step that fails


class Trap(nn.Module):
    """Identity; raises when told to, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_error is not None:
            raise self.forward_error
        if self.backward_error is not None and x.requires_grad:
            x = x * 1
            x.register_hook(self._raise)
        return x

    def _raise(self, grad: Tensor) -> Tensor:
        if self.backward_error is not None:
            raise self.backward_error
        return grad


class Fragile(GPT):
    """A trap inside of block 2 of 4."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(width=16, depth=4, **settings)
        self.trap = self.blocks[2].trap = Trap()
        inner = self.blocks[2].up.forward
        self.blocks[2].up.forward = lambda x: self.trap(inner(x))


def _fragile(**settings: Any) -> Fragile:
    torch.manual_seed(7)
    return Fragile(**settings)


def _leftovers(model: nn.Module) -> dict[str, Any]:
    engine = model.__dict__["_zerosharder"].engine
    return {
        "gathered": engine.runtime.pool.in_use,
        "passes": len(engine.tape.passes),
        "frames": engine.is_in_pass,
        "states": {(u.residency.value, u.grad_state.value, u.active) for u in engine.units},
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "phase": engine.phase.value,
    }


CLEAN = {
    "gathered": 0,
    "passes": 0,
    "frames": False,
    "states": {("sharded", "empty", 0)},
    "hooks": None,
    "phase": "idle",
}


def _run(
    model: Fragile,
    settings: dict[str, Any],
    fail: Callable[[Fragile], None] | None,
    steps: int = 5,
) -> tuple[Fragile, dict[str, Tensor]]:
    """Trains; at step BAD ``fail`` runs in place of a step, or the step is skipped."""
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(**settings))
    for step in range(steps):
        if step == BAD:
            if fail is not None:
                fail(model)
                zs.reset(model)
                assert _leftovers(model) == CLEAN
                assert all(p.grad is None for p in model.parameters())
            continue
        gpt_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, full_params(model)


def _in_forward(model: Fragile, error: BaseException | None = None) -> None:
    model.trap.forward_error = error or ValueError("in forward")
    with pytest.raises(type(model.trap.forward_error)):
        gpt_loss(model, BAD)
    model.trap.forward_error = None


def _in_backward(model: Fragile, error: BaseException | None = None) -> None:
    model.trap.backward_error = error or ValueError("in backward")
    loss = gpt_loss(model, BAD)
    with pytest.raises(type(model.trap.backward_error)):
        loss.backward()
    model.trap.backward_error = None


def _between(model: Fragile) -> None:
    loss = gpt_loss(model, BAD)
    del loss


def _in_loss(model: Fragile) -> None:
    """After the forward, with the graph still alive in a traceback's frames."""
    with pytest.raises(ZeroDivisionError):
        logits = model(torch.zeros(1, 8, dtype=torch.long))
        raise ZeroDivisionError(logits)


def _at_the_first_gradient(model: Fragile) -> None:
    loss = gpt_loss(model, BAD)

    def refuse(_: Tensor) -> None:
        raise ValueError("at the top")

    loss.register_hook(refuse)
    with pytest.raises(ValueError, match="at the top"):
        loss.backward()


def _in_a_users_hook(model: Fragile) -> None:
    def refuse(_: Tensor) -> None:
        raise ValueError("in a gradient hook")

    handle = model.head.weight.register_post_accumulate_grad_hook(refuse)
    loss = gpt_loss(model, BAD)
    with pytest.raises(ValueError, match="gradient hook"):
        loss.backward()
    handle.remove()


def _twice(model: Fragile) -> None:
    _in_forward(model)
    zs.reset(model)
    _in_backward(model)
    zs.reset(model)
    _in_forward(model)


def _accumulating(model: Fragile) -> None:
    with zs.no_sync(model):
        gpt_loss(model, BAD).backward()
        _in_backward(model)


def _evaluating(model: Fragile) -> None:
    with torch.no_grad():
        _in_forward(model)


WAYS = {
    "forward": _in_forward,
    "backward": _in_backward,
    "between": _between,
    "loss": _in_loss,
    "first-gradient": _at_the_first_gradient,
    "users-hook": _in_a_users_hook,
    "twice": _twice,
    "accumulating": _accumulating,
    "evaluating": _evaluating,
}


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("way", ["forward", "backward"])
@distributed(world=2)
def test_t1_reset_then_as_if_the_batch_had_been_skipped(way: str, settings: str) -> None:
    _, expected = _run(_fragile(), SETTINGS[settings], None)
    _, found = _run(_fragile(), SETTINGS[settings], WAYS[way])
    assert_same(found, expected)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("forward", "backward")])
@distributed(world=2)
def test_t1_wherever_it_happens(way: str) -> None:
    _, expected = _run(_fragile(), {}, None)
    _, found = _run(_fragile(), {}, WAYS[way])
    assert_same(found, expected)


@pytest.mark.parametrize("checkpoint", ["plain", "reentrant"])
@pytest.mark.parametrize("way", ["forward", "backward", "recomputation"])
@distributed(world=2)
def test_t1_with_activation_checkpoints(way: str, checkpoint: str) -> None:
    def in_recomputation(model: Fragile) -> None:
        loss = gpt_loss(model, BAD)
        model.trap.forward_error = ValueError("while recomputing")
        with pytest.raises(ValueError, match="while recomputing"):
            loss.backward()
        model.trap.forward_error = None

    fail = in_recomputation if way == "recomputation" else WAYS[way]
    _, expected = _run(_fragile(checkpoint=checkpoint), {}, None)
    _, found = _run(_fragile(checkpoint=checkpoint), {}, fail)
    assert_same(found, expected)


@pytest.mark.parametrize("way", ["forward", "backward"])
@distributed(world=3)
def test_t1_on_three_ranks(way: str) -> None:
    _, expected = _run(_fragile(), {}, None)
    _, found = _run(_fragile(), {}, WAYS[way])
    assert_same(found, expected, rtol=1e-6)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
@distributed(world=2)
def test_t1_any_kind_of_exception(error: BaseException, way: str) -> None:
    def fail(model: Fragile) -> None:
        (_in_forward if way == "forward" else _in_backward)(model, error)

    _, expected = _run(_fragile(), {}, None)
    _, found = _run(_fragile(), {}, fail)
    assert_same(found, expected)


@distributed(world=2)
def test_t1_the_exception_comes_out_unchanged() -> None:
    model = zs.shard(_fragile())
    error = ValueError("mine")
    for attribute, act in (("forward_error", lambda: gpt_loss(model, 0)), ("backward_error", None)):
        setattr(model.trap, attribute, error)
        loss = act or gpt_loss(model, 0).backward
        with pytest.raises(ValueError) as caught:
            loss()
        assert caught.value is error
        setattr(model.trap, attribute, None)
        zs.reset(model)


@distributed(world=2)
def test_t1_a_failed_forward_needs_no_reset() -> None:
    """Nothing was promised to anybody: the next forward starts afresh."""
    model, _ = _run(_fragile(), {}, None, steps=BAD)
    other, _ = _run(_fragile(), {}, None, steps=BAD)
    _in_forward(model)
    for each in (model, other):
        gpt_loss(each, BAD + 1).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


@distributed(world=2)
def test_t1_a_failed_backward_needs_a_reset_and_the_message_says_so() -> None:
    model = zs.shard(_fragile())
    _in_backward(model)
    for _ in range(2):
        with pytest.raises(StateError, match=r"did not finish.*zerosharder\.reset\(model\)"):
            gpt_loss(model, 0)
    zs.reset(model)
    gpt_loss(model, 0).backward()


@distributed(world=2)
def test_t1_reset_of_a_model_that_needs_none_changes_nothing() -> None:
    model = zs.shard(_fragile())
    zs.reset(model)
    zs.reset(model)
    gpt_loss(model, 0).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in grads)
    zs.reset(model)
    assert all(p.grad is None for p in model.parameters()), "gradients go; that is documented"


@pytest.mark.parametrize("way", ["forward", "backward"])
@distributed(world=2)
def test_t1_twenty_failures_leak_nothing(way: str) -> None:
    """Neither slots, nor tensors, nor threads: all of it is counted."""
    model, _ = _run(_fragile(), {"prefetch": "1GiB"}, None)
    pool = model.__dict__["_zerosharder"].engine.runtime.pool

    def fail_once() -> None:
        WAYS[way](model)
        zs.reset(model)

    for _ in range(3):
        fail_once()
    gc.collect()
    slots, tensors = pool.nbytes, _live_bytes()
    for _ in range(20):
        fail_once()
    gc.collect()
    assert pool.in_use == 0 and pool.nbytes <= slots
    assert _live_bytes() <= tensors


def _live_bytes() -> int:
    """Bytes of all storages that Python can reach, each counted once."""
    found = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.layout is torch.strided:
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@distributed(world=2)
def test_t1_outputs_of_a_failed_pass_cannot_be_used_after_a_reset() -> None:
    """Their graph belongs to a pass that is gone: an error, or right gradients, and no hang."""
    model = zs.shard(_fragile())
    loss = gpt_loss(model, 0)
    zs.reset(model)
    expected = zs.shard(_fragile())
    gpt_loss(expected, 0).backward()
    try:
        loss.backward()
    except StateError:
        zs.reset(model)
        gpt_loss(model, 0).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@distributed(world=2)
def test_t1_an_exception_in_the_optimizer_step() -> None:
    model = _fragile()
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    failing = itertools.count()

    def refuse(*_: Any) -> None:
        if next(failing) == 1:
            raise ValueError("step")

    optimizer.register_step_pre_hook(refuse)
    for step in range(3):
        gpt_loss(model, step).backward()
        if step == 1:
            with pytest.raises(ValueError, match="step"):
                optimizer.step()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    other = _fragile()
    reference = adamw(other)
    zs.shard(other, reference)
    for step in (0, 2):
        gpt_loss(other, step).backward()
        reference.step()
        reference.zero_grad()
    assert_same(full_params(model), full_params(other))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_t1_in_a_world_of_one(dtype):
    model, found = _run_alone(dtype, True)
    _, expected = _run_alone(dtype, False)
    assert_same(found, expected)


def _run_alone(dtype: str, fails: bool) -> tuple[Fragile, dict[str, Tensor]]:
    model = _fragile()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype=dtype))
    for step in range(4):
        if step == BAD:
            for way in ("forward", "backward") if fails else ():
                WAYS[way](model)
                zs.reset(model)
                assert all(p.grad is None for p in model.parameters())
            continue
        gpt_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, {n: p.detach().clone() for n, p in model.named_parameters()}


@distributed(world=2)
def test_t1_an_exception_inside_full_params() -> None:
    model = zs.shard(_fragile())
    before = full_params(model)
    with pytest.raises(ValueError), zs.full_params(model, write=True):
        with torch.no_grad():
            model.head.weight.zero_()
        raise ValueError
    assert _leftovers(model) == CLEAN
    gpt_loss(model, 0).backward()
    assert_same(full_params(model), before, what="a write that an exception ended is not taken over")
    assert dist.get_world_size() == 2
