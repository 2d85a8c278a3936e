"""Sharded training gives the numbers of DistributedDataParallel, of a plain loop, or of a reference by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, average_grads, full_grads, full_params, reference_ddp
from tiny import OPTIMIZERS, Reference, adamw, gpt, gpt_loss, sgd, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerosharder as zs
from zerosharder.errors import ShardError

BOUND = (
    1e-6  # of the largest magnitude in each tensor, where sums over ranks may run in another order than DDP's
)
SIZES = (2, 3, 4)
STEPS = 20


def _bound(world: int) -> float:
    return 0.0 if world <= 2 else BOUND


def _step_bound(optimizer: str) -> float:
    """torch's fused kernels round the body and the tail of a vector differently, and shards end elsewhere."""
    return BOUND if optimizer.endswith("fused") else 0.0


def _engine(model: nn.Module):
    return model.__dict__["_zerosharder"].engine


@functools.cache
def _under_ddp(optimizer: str, steps: int, tied: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and final weights; once in the life of a worker."""
    model = gpt(tied=tied)
    made = OPTIMIZERS[optimizer](model.parameters())
    losses = train(reference_ddp(model), made, steps)
    return losses, full_params(model)


def _sharded(optimizer: str, steps: int, config: zs.Config | None = None, **settings) -> tuple[list, dict]:
    model = gpt(**settings)
    made = OPTIMIZERS[optimizer](model.parameters())
    zs.shard(model, made, config=config)
    losses = train(model, made, steps)
    return losses, full_params(model)


# -- fp32 against DDP --


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@distributed(world=SIZES)
def test_gradients_are_those_of_ddp(world: int, tied: bool) -> None:
    plain = gpt(tied=tied)
    wrapped = reference_ddp(plain)
    model = zs.shard(gpt(tied=tied))
    for step in range(3):
        gpt_loss(wrapped, step).backward()
        gpt_loss(model, step).backward()
        assert_same(full_grads(model), full_grads(plain), atol=_bound(world), what=f"step {step}")
        with torch.no_grad():
            for p in (*plain.parameters(), *model.parameters()):
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(world=SIZES)
def test_losses_over_20_steps_are_those_of_ddp(world: int, optimizer: str) -> None:
    expected, weights = _under_ddp(optimizer, STEPS)
    losses, found = _sharded(optimizer, STEPS)
    assert losses[-1] < 0.95 * losses[0], "it did not train"
    assert_same(losses, expected, rtol=_bound(world), what="losses")
    if world == 2:
        assert_same(found, weights, what="weights")


@distributed(world=SIZES)
def test_two_runs_have_the_same_bits(world: int) -> None:
    one, other = _sharded("adamw", 8), _sharded("adamw", 8)
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
RESHARD = pytest.mark.parametrize("reshard", ["auto", "always", "never"])
CHECKPOINT = pytest.mark.parametrize("checkpoint", [None, "plain", "reentrant"])


@CHECKPOINT
@RESHARD
@distributed(world=2)
def test_settings_do_not_change_a_bit(reshard: str, checkpoint: str | None) -> None:
    expected, weights = _under_ddp("adamw", 5)
    for prefetch in PREFETCH:
        config = zs.Config(reshard=reshard, prefetch=prefetch)
        losses, found = _sharded("adamw", 5, config, checkpoint=checkpoint)
        assert_same(losses, expected, what=f"losses with prefetch {prefetch}")
        assert_same(found, weights, what=f"weights with prefetch {prefetch}")


@functools.cache
def _of_default_settings() -> tuple[list[Tensor], dict[str, Tensor]]:
    return _sharded("sgd_momentum", 4, tied=True)


@RESHARD
@distributed(world=3)
def test_settings_do_not_change_a_bit_at_three_ranks(reshard: str) -> None:
    expected, weights = _of_default_settings()
    for prefetch in PREFETCH:
        config = zs.Config(reshard=reshard, prefetch=prefetch)
        losses, found = _sharded("sgd_momentum", 4, config, tied=True)
        assert_same(losses, expected, what=f"losses with prefetch {prefetch}")
        assert_same(found, weights, what=f"weights with prefetch {prefetch}")


@pytest.mark.parametrize("choice", ["blocks", "leaves", "predicate", "one"])
@distributed(world=2)
def test_choice_of_units_does_not_change_a_bit(choice: str) -> None:
    expected, weights = _under_ddp("adamw", 5)
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
    losses, found = _sharded(optimizer, STEPS)
    assert_same(losses, expected, what="losses")
    assert_same(found, full_params(plain), what="weights")


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


# -- mixed precision --


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
    assert_same(full_params(model), reference.params(), rtol=_step_bound(optimizer), what="weights")


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
        assert_same(after, reference.params(), rtol=_step_bound(optimizer), what=f"weights after step {step}")
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
            assert_same(_plain(norms[1]), norms[0], rtol=BOUND, what="norm")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(full_params(model), reference.params(), atol=1e-5, what="weights")


def _plain(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# -- accumulation and clipping --


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("micro", [1, 3])
@distributed(world=(2, 3))
def test_gradient_accumulation(world: int, micro: int, no_sync: bool, param_dtype: str) -> None:
    reference = Reference(gpt(), torch.bfloat16 if param_dtype == "bf16" else torch.float32)
    by_hand = adamw(reference.masters)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(param_dtype=param_dtype))
    units = sum(unit.wants_grad for unit in _engine(model).units)
    for step in range(3):
        before = zs.stats(model).reduces
        for i in range(micro):
            last = i == micro - 1
            expected = gpt_loss(reference.model, step, i) / micro
            if no_sync and not last:
                reference.accumulate(expected)
            else:
                reference.backward(expected)
            with model.no_sync() if no_sync and not last else nullcontext():
                loss = gpt_loss(model, step, i) / micro
                loss.backward()
            assert_same(loss, expected, what=f"loss {step}.{i}")
            if no_sync and not last:
                assert all(p.grad is None for p in model.parameters())
        assert zs.stats(model).reduces - before == units * (1 if no_sync else micro)
        assert_same(full_grads(model), reference.grads(), what=f"gradients of step {step}")
        for o in (by_hand, optimizer):
            o.step()
            o.zero_grad()
        reference.refresh()
    assert_same(full_params(model), reference.params(), what="weights")


@distributed(world=2)
def test_no_sync_is_that_of_ddp() -> None:
    plain = gpt()
    wrapped = reference_ddp(plain)
    model = zs.shard(gpt())
    for net, no_sync in ((wrapped, wrapped.no_sync), (model, functools.partial(zs.no_sync, model))):
        with no_sync():
            for i in range(2):
                gpt_loss(net, 0, i).backward()
        gpt_loss(net, 0, 2).backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(world=2)
def test_no_sync_around_the_forward_alone_still_reduces() -> None:
    """What counts is where the backward runs."""
    reference = Reference(gpt())
    reference.backward(gpt_loss(reference.model, 0))
    model = zs.shard(gpt())
    with model.no_sync():
        loss = gpt_loss(model, 0)
    loss.backward()
    assert_same(full_grads(model), reference.grads())


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=SIZES)
def test_clipping_by_torch(world: int, p: float) -> None:
    """More of it in cases/test_h_norms.py."""
    plain, model = gpt(tied=True), gpt(tied=True)
    wrapped = reference_ddp(plain)
    zs.shard(model)
    gpt_loss(wrapped, 0).backward()
    gpt_loss(model, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=p)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=p)
    assert_same(_plain(found), expected, rtol=BOUND, what="norm")
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what="clipped gradients")


@distributed(world=2)
def test_clipped_training() -> None:
    plain, model = gpt(), gpt()
    by_hand, optimizer = adamw(plain), adamw(model)
    wrapped = reference_ddp(plain)
    zs.shard(model, optimizer)
    losses = []
    for net, o in ((wrapped, by_hand), (model, optimizer)):
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, net.parameters(), 0.1)
        losses.append(train(net, o, STEPS, after_backward=clip))
    assert_same(losses[1], losses[0], rtol=BOUND)


# -- HSDP --


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])
@distributed(world=4)
def test_hsdp(shape: tuple[int, int]) -> None:
    expected, weights = _under_ddp("sgd_momentum", 10)
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


# -- several models, several forwards --


def _gan(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return tiny.MLP(8, 2), nn.Sequential(tiny.MLP(8, 3), nn.Linear(8, 1))


def _gan_step(
    g: nn.Module, d: nn.Module, step: int, og: object, od: object, average: Callable[[], object]
) -> list[Tensor]:
    """One step of each player: the discriminator's on a detached sample, the generator's through it."""
    noise, real = tiny.features(step), tiny.features(step + 500) + 1
    fake = g(noise)
    loss_d = nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(fake.detach())).mean()
    loss_d.backward()
    average()
    od.step()
    od.zero_grad()
    og.zero_grad()
    loss_g = nn.functional.softplus(-d(g(noise))).mean()
    loss_g.backward()
    average()
    og.step()
    og.zero_grad()
    od.zero_grad()
    return [loss_d.detach(), loss_g.detach()]


@distributed(world=2)
def test_two_models_each_with_an_optimizer() -> None:
    expected, found = [], []
    g, d = _gan(3)
    og, od = adamw(g), adamw(d)

    def average() -> None:
        average_grads(g)
        average_grads(d)

    for step in range(6):
        expected += _gan_step(g, d, step, og, od, average)
    reference = [full_params(g), full_params(d)]
    g, d = _gan(3)
    og, od = adamw(g), adamw(d)
    zs.shard(g, og)
    zs.shard(d, od)
    for step in range(6):
        found += _gan_step(g, d, step, og, od, lambda: None)
    assert_same(found, expected, what="losses")
    assert_same(full_params(g), reference[0], what="generator")
    assert_same(full_params(d), reference[1], what="discriminator")


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
@distributed(world=2)
def test_two_models_with_one_optimizer(optimizer: str, when: str) -> None:
    """An encoder and a decoder trained together, the optimizer built before, between or after the two calls."""

    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return tiny.MLP(8, 2), tiny.MLP(8, 3)

    def run(a: nn.Module, b: nn.Module, o: torch.optim.Optimizer, average: bool) -> list[Tensor]:
        losses = []
        for step in range(6):
            x = tiny.features(step)
            loss = (b(a(x)) - x).square().mean()
            loss.backward()
            if average:
                average_grads(a)
                average_grads(b)
            o.step()
            o.zero_grad()
            losses.append(loss.detach())
        return losses

    a, b = build()
    expected = run(a, b, OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()]), average=True)
    reference = [full_params(a), full_params(b)]
    a, b = build()
    o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()]) if when == "before" else None
    zs.shard(a, o)
    if when == "between":
        o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()])
        zs.shard(a, o)
    zs.shard(b, o)
    if when == "after":
        o = OPTIMIZERS[optimizer]([*a.parameters(), *b.parameters()])
        zs.shard(a, o)
        zs.shard(b, o)
    assert_same(run(a, b, o, average=False), expected, what="losses")
    assert_same(full_params(a), reference[0], what="first model")
    assert_same(full_params(b), reference[1], what="second model")


@RESHARD
@distributed(world=2)
def test_evaluation_between_steps(reshard: str) -> None:
    expected, weights = _under_ddp("adamw", 5)
    plain = gpt()
    by_hand = adamw(plain)
    wrapped = reference_ddp(plain)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))
    losses = []
    for step in range(5):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                model.eval()
                assert_same(
                    gpt_loss(model, 100 + step), gpt_loss(plain, 100 + step), what=f"evaluation {step}"
                )
                model.train()
        losses += train(model, optimizer, 1, first=step)
        train(wrapped, by_hand, 1, first=step)
    assert_same(losses, expected, what="losses")
    assert_same(full_params(model), weights, what="weights")


@pytest.mark.parametrize(
    "order", ["older first", "newer first", "together", "only the older", "only the newer"]
)
@CHECKPOINT
@distributed(world=2)
def test_backwards_after_several_forwards(checkpoint: str | None, order: str) -> None:
    def run(model: nn.Module, backward: Callable[[Tensor], None]) -> None:
        one, two = gpt_loss(model, 0), gpt_loss(model, 1)
        if order == "older first":
            backward(one)
            backward(two)
        elif order == "newer first":
            backward(two)
            backward(one)
        elif order == "together":
            backward(one + two)
        else:
            backward(one if order == "only the older" else two)

    reference = Reference(gpt(checkpoint=checkpoint))
    run(reference.model, reference.backward)
    model = zs.shard(gpt(checkpoint=checkpoint))
    run(model, Tensor.backward)
    bound = BOUND if order == "together" else 0.0
    assert_same(full_grads(model), reference.grads(), rtol=bound)
    # Nothing of it is left: a normal step follows.
    for p in model.parameters():
        p.grad = None
    for p in reference.masters.parameters():
        p.grad = None
    reference.backward(gpt_loss(reference.model, 2))
    gpt_loss(model, 2).backward()
    assert_same(full_grads(model), reference.grads(), what="the step after")


@RESHARD
@distributed(world=2)
def test_backward_twice_through_a_kept_graph(reshard: str) -> None:
    reference = Reference(gpt())
    expected = gpt_loss(reference.model, 0)
    reference.backward(expected, retain_graph=True)
    reference.backward(expected)
    model = zs.shard(gpt(), config=zs.Config(reshard=reshard))
    loss = gpt_loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(full_grads(model), reference.grads())


@distributed(world=2)
def test_gradients_by_autograd_grad_of_the_input() -> None:
    """torch.autograd.grad with respect to an input needs weights in the backward and leaves none a gradient."""
    x = tiny.features(0).requires_grad_()
    (expected,) = torch.autograd.grad(tiny.mlp()(x).square().sum(), x)
    model = zs.shard(tiny.mlp())
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert_same(found, expected)
    assert all(p.grad is None for p in model.parameters())


@distributed(world=2)
def test_input_gradient_then_normal_step() -> None:
    plain = tiny.mlp()
    model = zs.shard(tiny.mlp())
    x = tiny.features(0).requires_grad_()
    torch.autograd.grad(model(x).square().sum(), x)
    model(tiny.features(1)).square().sum().backward()
    plain(tiny.features(1)).square().sum().backward()
    average_grads(plain)
    assert_same(full_grads(model), full_grads(plain))


# -- what else a script does --


@distributed(world=(1, 2, 3))
def test_full_params_reads(world: int) -> None:
    _, weights = _under_ddp("adamw", 3)
    model = gpt()
    optimizer = adamw(model)
    zs.shard(model, optimizer)
    train(model, optimizer, 3)
    sharded = list(model.parameters())
    with zs.full_params(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        # Ranks may run different numbers of forwards in here.
        with torch.no_grad():
            for i in range(1 + dist.get_rank()):
                gpt_loss(model, 50 + i)
    if world <= 2:
        assert_same(found, weights)
    assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
    assert_same(full_params(model), found)


@distributed(world=(1, 2, 3))
def test_full_params_writes(world: int) -> None:
    plain = gpt()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5).add_(torch.arange(p.shape[0]).view(-1, *[1] * (p.dim() - 1)) * 1e-3)
    model = gpt()
    optimizer = sgd(model)
    zs.shard(model, optimizer)
    with zs.full_params(model), torch.no_grad():
        kept = full_params(model)
        for p in model.parameters():
            p.mul_(0.5)
    if world > 1:  # a world of one has no second copy
        assert_same(full_params(model), kept, what="write=False")
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    with zs.full_params(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(torch.arange(p.shape[0]).view(-1, *[1] * (p.dim() - 1)) * 1e-3)
    assert_same(full_params(model), full_params(plain), what="write=True")
    expected = train(reference_ddp(plain), sgd(plain), 2)
    assert_same(train(model, optimizer, 2), expected, rtol=_bound(world), what="training after it")


class Encoder(nn.Module):
    """Entry points besides forward, which read what the module itself owns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.body = tiny.MLP(8, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).sum(-1)


@distributed(world=2)
def test_register_forward_method() -> None:
    torch.manual_seed(2)
    plain = Encoder()
    model = copy.deepcopy(plain)
    zs.shard(model)
    zs.register_forward_method(model, "encode")
    for step in range(3):
        x = tiny.features(step)
        for method in ("encode", "forward"):
            expected = getattr(plain, method)(x)
            found = getattr(model, method)(x)
            assert_same(found, expected, what=method)
            expected.square().mean().backward()
            found.square().mean().backward()
            average_grads(plain)
            assert_same(full_grads(model), full_grads(plain), what=f"{method}, step {step}")
            plain.zero_grad()
            model.zero_grad()
    with pytest.raises(ShardError, match="decode"):
        zs.register_forward_method(model, "decode")


# -- counters --


def _counted(reshard: str, prefetch: str, optimizer_steps: int = 4):
    """Gathers, reductions and frees of one step once the order is known, and the units."""
    model = gpt()
    optimizer = adamw(model)
    units = [tiny.Block, nn.Embedding]
    zs.shard(model, optimizer, units=units, config=zs.Config(reshard=reshard, prefetch=prefetch))
    train(model, optimizer, optimizer_steps)
    before = zs.stats(model)
    train(model, optimizer, 1, first=optimizer_steps)
    after = zs.stats(model)
    return model, before, after


@pytest.mark.parametrize("prefetch", ["0", "auto", "1GB"])
@distributed(world=2)
def test_counters_of_a_step(prefetch: str) -> None:
    """Closed form. Units: embedding, whose backward reads no weight, three blocks, and the root.

    always: all in the forward, all but the embedding again in the backward. auto: the root and the last block stay.
    """
    once = 5
    twice = 2 * once - 1
    for reshard, gathers in (("always", twice), ("auto", twice - 2), ("never", once)):
        model, before, after = _counted(reshard, prefetch)
        assert after.units == once
        assert after.gathers - before.gathers == gathers, reshard
        assert after.frees - before.frees == gathers, reshard
        assert after.reduces - before.reduces == once, reshard
        assert (after.passes - before.passes, after.backwards - before.backwards) == (1, 1)
        assert after.deviations == 0
        assert (after.prefetched > before.prefetched) == (prefetch != "0"), reshard
        assert after.parameters == sum(p.numel() for p in model.parameters())
        log = list(_engine(model).runtime.log)
        assert sum(event.kind == "gather" for event in log) == after.gathers
        assert sum(event.kind == "reduce" for event in log) == after.reduces


@distributed(world=(2, 3))
def test_counted_bytes(world: int) -> None:
    """Bytes received in a step: (W - 1) / W of each gather and of each gradient, apart from padding."""
    model, before, after = _counted("never", "0")
    numel = sum(p.numel() for p in model.parameters())
    for what in ("gather", "reduce"):
        found = after.bytes_received[what] - before.bytes_received[what]
        exact = 4 * numel * (world - 1) / world
        assert exact <= found <= 1.2 * exact + 5 * 4096 * 4, (what, found, exact)


@CHECKPOINT
@distributed(world=2)
def test_one_reduction_for_each_unit_in_a_backward(checkpoint: str | None) -> None:
    """Also for a unit that is used several times, and however many outputs and parameters get a gradient."""
    model = gpt(shared=True, checkpoint=checkpoint, tied=True)
    optimizer = adamw(model)
    zs.shard(model, optimizer, units=[tiny.Block])
    for step in range(3):
        before = zs.stats(model)
        train(model, optimizer, 1, first=step)
        after = zs.stats(model)
        assert after.units == 2
        assert after.reduces - before.reduces == 2
    kinds = [(event.kind, event.unit) for event in _engine(model).runtime.log if event.kind == "reduce"]
    assert kinds == [("reduce", "blocks.0"), ("reduce", "")] * 3


@CHECKPOINT
@distributed(world=2)
def test_backward_frees_in_time(checkpoint: str | None) -> None:
    """From the log: in the backward of a block nothing but that block and the root is gathered."""
    model = gpt(depth=5, checkpoint=checkpoint)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(prefetch=0, reshard="always"))
    train(model, optimizer, 3)
    gathered: set[str] = set()
    for event in _engine(model).runtime.log:
        if event.kind == "gather":
            gathered.add(event.unit)
            assert len(gathered - {""}) <= 1, gathered
        elif event.kind == "free":
            gathered.remove(event.unit)
    assert not gathered


@RESHARD
@CHECKPOINT
@distributed(world=2)
def test_steady_state_allocates_nothing(checkpoint: str | None, reshard: str) -> None:
    from zerosharder.engine import slots
    from zerosharder.offload import memory

    model = gpt(checkpoint=checkpoint)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard=reshard))

    def step(number: int) -> None:
        with model.no_sync():
            gpt_loss(model, number, 1).backward()
        train(model, optimizer, 1, first=number)
        with torch.no_grad():
            gpt_loss(model, number, 2)

    for number in range(3):
        step(number)
    runtime = _engine(model).runtime
    settled = runtime.pool.nbytes
    original = memory.host_buffer

    def refuse(nbytes: int) -> Tensor:
        raise AssertionError(f"{nbytes} bytes are allocated in steady state")

    slots.host_buffer = memory.host_buffer = refuse
    try:
        for number in range(3, 12):
            step(number)
            assert runtime.pool.nbytes == settled
            assert runtime.pool.in_use == 0
    finally:
        slots.host_buffer = memory.host_buffer = original


@distributed(world=2)
def test_memory_is_a_share_of_the_model() -> None:
    """Between steps a rank holds its rows of weights and gradients; the largest pool is two units and staging."""
    model = gpt(depth=9)
    optimizer = adamw(model)
    zs.shard(model, optimizer, config=zs.Config(reshard="always"))
    train(model, optimizer, 3)
    stats = zs.stats(model)
    nbytes = 4 * stats.parameters
    host = stats.current_bytes["host"]
    assert host["gathered"] == 0
    for role in ("shards", "gradients"):
        assert nbytes / 2 <= host[role] <= nbytes / 2 * 1.25 + 7 * 8192, role
    largest = max(unit.nbytes for unit in _engine(model).units)
    assert stats.peak_bytes["host"]["gathered"] < 6 * largest < nbytes
