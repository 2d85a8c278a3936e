"""Invariants 1 to 5 and 7 of the design, under random delays and poisoned memory.

Each rank sleeps at random before and after every message and every exchange of a slot, with seeds of its own; what it
sends is read from memory late, by another thread; a slot is filled with NaN when it is given back and again when it is
lent. Whatever reads memory too early, too late, or after it was given away then reads NaN; whatever depends on timing
takes another order. Twenty steps must give the bits of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerosharder as zs
from zerosharder.engine.collectives import PairwiseExchange, _Exchange
from zerosharder.engine.slots import Slot, SlotPool

STEPS = 20
SENDERS = 64  # threads; more than messages of a unit, so that the oldest message is never behind others


class _Late:
    """A message that a thread sends; what `dist.Work` is to the engine."""

    def __init__(self, sent: Future[None]) -> None:
        self.wait = sent.result


class _LateGroup:
    """A process group whose messages read their buffer some time after `send` has returned."""

    def __init__(self, group: dist.ProcessGroup, senders: ThreadPoolExecutor, rng: random.Random) -> None:
        self._group, self._senders, self._rng = group, senders, rng
        self.recv = group.recv

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> object:
        if self._rng.random() < 0.5:
            return self._group.send(tensors, peer, tag)
        seconds = self._rng.random() * 3e-3

        def send() -> None:
            time.sleep(seconds)
            self._group.send(tensors, peer, tag).wait()

        return _Late(self._senders.submit(send))


@contextlib.contextmanager
def disturbed(seed: int, seconds: float = 1.5e-3, poison: bool = True) -> Iterator[dict[str, int]]:
    """Delays and poison on this rank; yields how often each was at work."""
    rng = random.Random(7919 * seed + dist.get_rank())
    done = {"delays": 0, "poisoned": 0}
    saved: list[tuple[type, str, Callable[..., object]]] = []

    def late() -> None:
        done["delays"] += 1
        if rng.random() < 0.5:
            time.sleep(rng.random() * seconds)

    def delay(owner: type, name: str) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))

        @functools.wraps(original)
        def delayed(*args: object, **kwargs: object) -> object:
            late()
            result = original(*args, **kwargs)
            late()
            return result

        setattr(owner, name, delayed)

    def send_late(owner: type, name: str) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))

        @functools.wraps(original)
        def through_late_group(self: PairwiseExchange, *args: object) -> object:
            attribute = f"_{name}_group"
            group = getattr(self, attribute)
            setattr(self, attribute, _LateGroup(group, senders, rng))
            try:
                return original(self, *args)
            finally:
                setattr(self, attribute, group)

        setattr(owner, name, through_late_group)

    def fill(slot: Slot) -> None:
        if not slot.is_referenced:  # somebody else's view must stay readable
            slot.tensor.fill_(0xFF)  # NaN in fp32, bf16 and fp16
            done["poisoned"] += 1

    senders = ThreadPoolExecutor(SENDERS)
    for name in ("gather", "reduce"):
        delay(PairwiseExchange, name)
        send_late(PairwiseExchange, name)
    for name in ("wait", "release"):
        delay(_Exchange, name)
    acquire, release = SlotPool.acquire, SlotPool.release
    saved += [(SlotPool, "acquire", acquire), (SlotPool, "release", release)]

    def poisoned_acquire(self: SlotPool, nbytes: int) -> Slot:
        late()
        slot = acquire(self, nbytes)
        if poison:
            assert not slot.is_referenced, "a slot is lent that somebody still looks at"
            fill(slot)
        return slot

    def poisoned_release(self: SlotPool, slot: Slot) -> None:
        if poison:
            fill(slot)
        release(self, slot)
        late()

    SlotPool.acquire, SlotPool.release = poisoned_acquire, poisoned_release
    try:
        yield done
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)
        senders.shutdown()


# -- models with a habit --


class KeepsWeight(torch.autograd.Function):
    """x @ weight.T, whose context holds a view of the weight on its own, without save_for_backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()[:, :]
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(KeepsWeight.apply(self.linear(x), self.weight))


class Returning(nn.Module):
    """Gives its weight to the caller, as an embedding does that shares it with a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.linear.weight


class Stack(nn.Module):
    """Layers of one class, whose returned weights (if any) the parent uses after the layer's forward."""

    def __init__(self, layer: type[nn.Module], depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for layer in self.layers:
            out = layer(x)
            if isinstance(out, tuple):
                out, weight = out
                self.kept.append(weight)
            x = out
        for weight in self.kept:
            x = x + 0.1 * torch.sin(x @ weight)
        return x


def _stack(layer: type[nn.Module]) -> Stack:
    torch.manual_seed(9)
    return Stack(layer)


def _square(model: nn.Module, step: int) -> Tensor:
    return model(tiny.features(step, 16)).square().mean()


def _on_cpu(model: nn.Module, step: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return tiny.gpt_loss(model, step)


def _accumulating(model: nn.Module, step: int) -> Tensor:
    with zs.no_sync(model):
        tiny.gpt_loss(model, step, 1).backward()
    return tiny.gpt_loss(model, step)


def _crossing(model: nn.Module, step: int) -> Tensor:
    """Two forwards, an evaluation between them, one backward here and one in the loop."""
    first = tiny.gpt_loss(model, step, 1)
    with torch.no_grad():
        tiny.gpt_loss(model, step, 2)
    second = tiny.gpt_loss(model, step)
    first.backward()
    return second


HABITS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "plain": (tiny.gpt, tiny.gpt_loss),
    "tied": (functools.partial(tiny.gpt, tied=True), tiny.gpt_loss),
    "checkpoint": (functools.partial(tiny.gpt, checkpoint="plain"), tiny.gpt_loss),
    "reentrant checkpoint": (functools.partial(tiny.gpt, checkpoint="reentrant"), tiny.gpt_loss),
    "shared block": (functools.partial(tiny.gpt, shared=True), tiny.gpt_loss),
    "shared, checkpoint": (functools.partial(tiny.gpt, shared=True, checkpoint="reentrant"), tiny.gpt_loss),
    "custom function": (functools.partial(_stack, Custom), _square),
    "returned weight": (functools.partial(_stack, Returning), _square),
    "save_on_cpu": (tiny.gpt, _on_cpu),
    "no_sync": (tiny.gpt, _accumulating),
    "several forwards": (tiny.gpt, _crossing),
}


def _run(habit: str, config: zs.Config, steps: int = STEPS, **settings) -> list[Tensor]:
    """Losses, then gradients of the last step, then weights."""
    build, loss_of = HABITS[habit]
    model = build()
    optimizer = tiny.adamw(model)
    zs.shard(model, optimizer, config=config, **settings)
    losses = tiny.train(model, optimizer, steps, loss_of)
    loss_of(model, steps).backward()
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    if isinstance(model, Stack):
        model.kept = []
    assert model.__dict__["_zerosharder"].engine.runtime.pool.in_use == 0
    return [*losses, *grads, *full_params(model).values()]


@functools.cache
def _undisturbed(habit: str, dtype: str) -> list[Tensor]:
    """Computed once in the life of a worker, without prefetching."""
    return _run(habit, zs.Config(prefetch=0, param_dtype=dtype))


@pytest.mark.parametrize(("reshard", "prefetch"), [("always", "auto"), ("auto", "1GB")])
@pytest.mark.parametrize("habit", list(HABITS))
@distributed(world=2)
def test_delays_and_poison_change_no_bit(habit: str, reshard: str, prefetch: str) -> None:
    expected = _undisturbed(habit, "fp32")
    with disturbed(seed=1) as done:
        found = _run(habit, zs.Config(reshard=reshard, prefetch=prefetch))
    assert done["delays"] > 10 * STEPS and done["poisoned"] > 2 * STEPS
    assert all(bool(t.isfinite().all()) for t in expected)
    assert_same(found, expected)


@pytest.mark.parametrize("habit", ["plain", "reentrant checkpoint", "no_sync"])
@distributed(world=2)
def test_delays_and_poison_in_bf16(habit: str) -> None:
    """Gradients in flight are 16 bits wide, sums that wait are not."""
    expected = _undisturbed(habit, "bf16")
    with disturbed(seed=2):
        assert_same(_run(habit, zs.Config(param_dtype="bf16", prefetch="1GB")), expected)


@pytest.mark.parametrize("habit", ["plain", "several forwards"])
@distributed(world=3)
def test_delays_and_poison_on_three_ranks(habit: str) -> None:
    """With three ranks messages of one pair overtake those of another."""
    expected = _undisturbed(habit, "fp32")
    with disturbed(seed=3):
        assert_same(_run(habit, zs.Config(reshard="never", prefetch="1GB")), expected)


@distributed(world=4)
def test_delays_and_poison_on_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    expected = _run("plain", zs.Config(prefetch=0), steps=6, mesh=mesh)
    with disturbed(seed=5):
        assert_same(_run("plain", zs.Config(prefetch="1GB"), steps=6, mesh=mesh), expected)


@distributed(world=2)
def test_a_slow_rank_changes_no_bit() -> None:
    """One rank is late everywhere, then the other."""
    expected = _undisturbed("plain", "fp32")
    for slow in range(2):
        with disturbed(seed=6, seconds=4e-3 if dist.get_rank() == slow else 0.0):
            assert_same(_run("plain", zs.Config()), expected, what=f"rank {slow} is slow")


@pytest.mark.parametrize(
    "habit", ["custom function", "returned weight", "save_on_cpu", "reentrant checkpoint"]
)
@distributed(world=2)
def test_habits_give_the_gradients_of_plain_training(habit: str) -> None:
    """Delayed and undelayed runs could agree on something wrong: against the model without sharding."""
    build, loss_of = HABITS[habit]
    plain, model = build(), build()
    zs.shard(model)
    with disturbed(seed=8):
        for step in range(3):
            loss_of(plain, step).backward()
            average_grads(plain)
            loss_of(model, step).backward()
            assert_same(full_grads(model), full_grads(plain), what=f"step {step}")
            plain.zero_grad()
            model.zero_grad()


@distributed(world=2)
def test_a_returned_weight_keeps_its_value() -> None:
    """A view of a gathered weight that the user keeps: the slot rests, others get new ones, the value stays."""
    model = _stack(Returning)
    zs.shard(model, config=zs.Config(reshard="always"))
    pool = model.__dict__["_zerosharder"].engine.runtime.pool
    with disturbed(seed=9):
        with torch.no_grad():
            model(tiny.features(0, 16))
        kept = [weight.detach()[:] for weight in model.kept]
        model.kept = []
        for step in range(5):
            _square(model, step).backward()
            model.kept = []
        for weight, whole in zip(kept, _stack(Returning).layers, strict=True):
            assert_same(weight, whole.linear.weight)
        held = pool.nbytes
        kept.clear()
        for step in range(5):
            _square(model, step).backward()
            model.kept = []
        assert pool.nbytes <= held, "slots that rested are used again"


@distributed(world=2)
def test_two_models_at_once() -> None:
    """Messages of one model are never taken for those of another that has the same units."""

    def run() -> list[Tensor]:
        models = [tiny.gpt(), tiny.gpt()]
        optimizers = [tiny.adamw(m) for m in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            zs.shard(model, optimizer, config=zs.Config(prefetch="1GB"))
        found = []
        for step in range(8):
            losses = [tiny.gpt_loss(model, step, i) for i, model in enumerate(models)]
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found += [loss.detach() for loss in losses]
        return [*found, *(p for m in models for p in full_params(m).values())]

    expected = run()
    with disturbed(seed=10):
        assert_same(run(), expected)


@distributed(world=2)
def test_order_of_messages_does_not_depend_on_timing_or_gradients() -> None:
    """Invariant 1: the same gathers and reductions in the same order on both ranks, whatever each one's loss uses."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(tiny.MLP(8, 1) for _ in range(4))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [checkpoint(layer, x, use_reentrant=False) for layer in self.layers]

    torch.manual_seed(1)
    model = Heads()
    zs.shard(model, config=zs.Config(prefetch="1GB"))
    with disturbed(seed=11):
        for step in range(6):
            outputs = model(tiny.features(step))
            used = outputs if dist.get_rank() == 0 else [outputs[step % 4]]
            sum(out.sum() for out in used).backward()
    mine = [
        (e.kind, e.unit)
        for e in model.__dict__["_zerosharder"].engine.runtime.log
        if e.kind in ("gather", "reduce")
    ]
    orders: list[object] = [None, None]
    dist.all_gather_object(orders, mine)
    assert orders[0] == orders[1]
    assert len(mine) > 6 * 8
