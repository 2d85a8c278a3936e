"""Frozen parameters, and parameters that get no gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp
from harness import distributed
from parity import assert_same, full_grads, full_params, reference_ddp
from tiny import Reference
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import zerosharder as zs

BOUND = 1e-6


def _freeze(model: nn.Module, what: str) -> nn.Module:
    """Freezes every second parameter, whole blocks, or all but the head."""
    for number, (name, param) in enumerate(model.named_parameters()):
        if what == "every second":
            param.requires_grad_(number % 2 == 0)
        elif what == "blocks":
            param.requires_grad_(not name.startswith(("blocks.0", "blocks.1", "embed")))
        elif what == "all but the head":
            param.requires_grad_(name.startswith("head"))
    return model


@pytest.mark.parametrize("given", ["all", "trained"])
@pytest.mark.parametrize("what", ["every second", "blocks", "all but the head"])
@distributed(world=2)
def test_f1_frozen_parameters_stay(what: str, given: str) -> None:
    """The optimizer gets all parameters, or the trained ones only; frozen ones keep every bit."""
    frozen_before = {n: p.detach().clone() for n, p in tiny.gpt().named_parameters()}

    def params(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if given == "all" or p.requires_grad]

    plain = _freeze(tiny.gpt(), what)
    expected = tiny.train(reference_ddp(plain), tiny.OPTIMIZERS["adamw"](params(plain)), 4)
    model = _freeze(tiny.gpt(), what)
    optimizer = tiny.OPTIMIZERS["adamw"](params(model))
    zs.shard(model, optimizer)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert_same(tiny.train(model, optimizer, 4), expected, what="losses")
    found = full_params(model)
    assert_same(found, full_params(plain), what="weights")
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert_same(found[name], frozen_before[name], what=name)
            assert param.grad is None and param not in optimizer.state
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()), "frozen parameters are in the state dict too"


@distributed(world=2)
def test_f1_frozen_weights_come_back_from_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """torch.distributed.checkpoint, into a model of another seed; training goes on as if nothing had happened."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _freeze(tiny.GPT(tied=True), "every second")
        optimizer = tiny.adamw(model)
        return zs.shard(model, optimizer)

    model, optimizer = build(1)
    tiny.train(model, optimizer, 2)
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path)
    expected = tiny.train(model, optimizer, 2, first=2)
    other, its = build(2)
    state = dict(zip(names, get_state_dict(other, its), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(tiny.train(other, its, 2, first=2), expected, what="losses")
    assert_same(full_params(other), full_params(model), what="weights")


@distributed(world=2)
def test_f1_a_unit_that_is_all_frozen_sends_no_gradient() -> None:
    model = _freeze(tiny.gpt(), "blocks")
    zs.shard(model)
    tiny.gpt_loss(model, 0).backward()
    reduced = {e.unit for e in model.__dict__["_zerosharder"].engine.runtime.log if e.kind == "reduce"}
    assert reduced == {"blocks.2", ""}


@pytest.mark.parametrize("when", ["shard then compile", "compile then shard"])
@distributed(world=2, timeout=120)
def test_f3_compiled_blocks_with_a_frozen_linear(when: str) -> None:
    def build() -> nn.Module:
        model = tiny.mlp(8, 3)
        model.layers[1].linear.requires_grad_(False)
        return model

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(tiny.features(step)).square().mean()

    def compile_layers(model: nn.Module) -> None:
        for layer in model.layers:
            layer.compile(backend="aot_eager")

    plain = build()
    expected = tiny.train(reference_ddp(plain), tiny.adamw(plain), 3, loss_of)
    model = build()
    optimizer = tiny.adamw(model)
    if when == "compile then shard":
        compile_layers(model)
    zs.shard(model, optimizer)
    if when == "shard then compile":
        compile_layers(model)
    assert_same(tiny.train(model, optimizer, 3, loss_of), expected, rtol=BOUND, what="losses")
    assert_same(full_params(model), full_params(plain), rtol=BOUND, what="weights")


def _set_frozen(frozen: bool, *models: nn.Module) -> None:
    for model in models:
        for name, param in model.named_parameters():
            if name.startswith("blocks.1"):
                param.requires_grad_(not frozen)


@pytest.mark.parametrize("first_frozen", [True, False], ids=["unfreeze", "freeze"])
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@distributed(world=2)
def test_f4_frozen_state_changes_between_steps(param_dtype: str, first_frozen: bool) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[param_dtype]
    reference = Reference(tiny.gpt(), dtype)
    by_hand = tiny.adamw(reference.masters)
    model = tiny.gpt()
    optimizer = tiny.adamw(model)
    _set_frozen(first_frozen, model, reference.masters, reference.model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype=param_dtype))
    for step in range(4):
        _set_frozen(first_frozen == (step % 2 == 0), model, reference.masters, reference.model)
        reference.backward(tiny.gpt_loss(reference.model, step))
        tiny.gpt_loss(model, step).backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        assert_same(full_grads(model), reference.grads(), what=f"gradients of step {step}")
        for o in (by_hand, optimizer):
            o.step()
            o.zero_grad()
        reference.refresh()
    assert_same(full_params(model), reference.params(), what="weights")


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@distributed(world=2)
def test_f4_unfrozen_between_forward_and_backward(param_dtype: str) -> None:
    """As in torch: what was frozen in the forward gets no gradient from it, and everything in the next."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[param_dtype]
    reference = Reference(tiny.gpt(), dtype)
    model = tiny.gpt()
    _set_frozen(True, model, reference.masters, reference.model)
    zs.shard(model, config=zs.Config(param_dtype=param_dtype))
    expected, loss = tiny.gpt_loss(reference.model, 0), tiny.gpt_loss(model, 0)
    _set_frozen(False, model, reference.masters, reference.model)
    reference.backward(expected)
    loss.backward()
    assert_same(full_grads(model), reference.grads(), what="the backward of the frozen forward")
    assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("blocks.1"))
    reference.backward(tiny.gpt_loss(reference.model, 1))
    tiny.gpt_loss(model, 1).backward()
    assert_same(full_grads(model), reference.grads(), what="the next")


@distributed(world=2)
def test_f4_frozen_between_forward_and_backward() -> None:
    """The reverse: whatever torch does with a gradient for a leaf frozen meanwhile, all ranks get through."""
    model = zs.shard(tiny.gpt())
    loss = tiny.gpt_loss(model, 0)
    _set_frozen(True, model)
    loss.backward()
    reference = Reference(tiny.gpt())
    reference.backward(tiny.gpt_loss(reference.model, 0))
    expected = {n: None if n.startswith("blocks.1") else g for n, g in reference.grads().items()}
    assert_same(full_grads(model), expected)
    model.zero_grad()
    _set_frozen(False, model)
    tiny.gpt_loss(model, 0).backward()
    assert_same(full_grads(model), reference.grads(), what="after it was unfrozen again")


class Unused(nn.Module):
    """An MLP with a submodule (a unit, a part of the root) that runs only when told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(3))
        self.extra = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, everything: bool) -> Tensor:
        for layer in self.layers if everything else self.layers[:2]:
            x = layer(x)
        return self.extra(x) * self.scale if everything else x


def _unused() -> nn.Module:
    torch.manual_seed(2)
    return Unused()


def _loss(model: nn.Module, step: int, everything: Callable[[int], bool]) -> Tensor:
    return model(tiny.features(step), everything(step)).square().mean()


@pytest.mark.parametrize("optimizer", list(tiny.OPTIMIZERS))
@distributed(world=2)
def test_f6_unused_on_all_ranks(optimizer: str) -> None:
    """No gradient (None, not zeros), no optimizer state, no weight decay."""
    loss_of = functools.partial(_loss, everything=lambda step: False)
    plain = _unused()
    expected = tiny.train(reference_ddp(plain), tiny.OPTIMIZERS[optimizer](plain.parameters()), 3, loss_of)
    model = _unused()
    adopted = tiny.OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, adopted)
    loss_of(model, 0).backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == {
        "layers.2.linear.weight",
        "layers.2.linear.bias",
        "extra.weight",
        "extra.bias",
        "scale",
    }
    model.zero_grad()
    assert_same(tiny.train(model, adopted, 3, loss_of), expected, what="losses")
    assert_same(full_params(model), full_params(plain), what="weights")
    for name, param in model.named_parameters():
        assert not (name in without and adopted.state.get(param)), name


@pytest.mark.parametrize("optimizer", list(tiny.OPTIMIZERS))
@distributed(world=2)
def test_f7_used_late(optimizer: str) -> None:
    """Three steps without, then with: its own step count and moments begin there."""
    loss_of = functools.partial(_loss, everything=lambda step: step >= 3)
    plain = _unused()
    by_hand = tiny.OPTIMIZERS[optimizer](plain.parameters())
    model = _unused()
    adopted = tiny.OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, adopted)
    wrapped = reference_ddp(plain)
    for step in range(7):
        expected = tiny.train(wrapped, by_hand, 1, loss_of, first=step)
        assert_same(tiny.train(model, adopted, 1, loss_of, first=step), expected, what=f"step {step}")
    assert_same(full_params(model), full_params(plain), what="weights")
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        mine, ref = adopted.state.get(a, {}), by_hand.state.get(b, {})
        assert set(mine) == set(ref)
        for key, value in mine.items():
            if isinstance(value, Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                # torch's fused kernel rounds the last elements of a tensor otherwise than those before them.
                bound = BOUND if optimizer == "adamw_fused" else 0.0
                assert_same(whole, ref[key], rtol=bound, what=key)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
@distributed(world=2)
def test_f7_saved_and_loaded_before_the_first_use(optimizer: str) -> None:
    """A parameter without state is none in the state dicts, and begins after the load as without it."""
    loss_of = functools.partial(_loss, everything=lambda step: step >= 3)
    plain = _unused()
    expected = tiny.train(reference_ddp(plain), tiny.OPTIMIZERS[optimizer](plain.parameters()), 6, loss_of)
    saved: list[dict] = []
    for first in (0, 3):
        torch.manual_seed(2 + first)
        model = Unused()
        adopted = tiny.OPTIMIZERS[optimizer](model.parameters())
        zs.shard(model, adopted)
        for part, state in zip((model, adopted), saved, strict=bool(saved)):
            part.load_state_dict(state)
        losses = tiny.train(model, adopted, 3, loss_of, first=first)
        assert_same(losses, expected[first : first + 3], what=f"losses from step {first}")
        saved = copy.deepcopy([model.state_dict(), adopted.state_dict()])
    assert_same(full_params(model), full_params(plain), what="weights")


@distributed(world=2)
def test_f7_used_now_and_then() -> None:
    loss_of = functools.partial(_loss, everything=lambda step: step in (1, 4, 5))
    plain = _unused()
    expected = tiny.train(reference_ddp(plain), tiny.adamw(plain), 8, loss_of)
    model = _unused()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer)
    assert_same(tiny.train(model, optimizer, 8, loss_of), expected, what="losses")
    assert_same(full_params(model), full_params(plain), what="weights")


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=(1, 2, 3))
def test_f8_clipping_with_an_unused_parameter(world: int, p: float) -> None:
    loss_of = functools.partial(_loss, everything=lambda step: False)
    plain, model = _unused(), _unused()
    wrapped = reference_ddp(plain)
    zs.shard(model)
    loss_of(wrapped, 0).backward()
    loss_of(model, 0).backward()
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=p, error_if_nonfinite=True)
        for m in (plain, model)
    ]
    found = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
    assert_same(found, norms[0], rtol=BOUND, what="norm")
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what="clipped")
