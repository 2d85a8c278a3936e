"""Shapes and strides that do not divide, and messages of odd lengths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, full_params
from tiny import mean_over_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerosharder as zs


class Odd(nn.Module):
    """One parameter for each shape of the row: scalar, [1], empty, fewer rows than ranks, transposed, strided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.flat_empty = nn.Parameter(torch.randn(4, 0))
        self.column = nn.Parameter(torch.randn(3, 1))
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(3, 4).clone())
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.deep = nn.Parameter(torch.randn(2, 3, 1, 2, 1))
        self.prime = nn.Linear(13, 17)

    def forward(self, x: Tensor) -> Tensor:  # [rows, 13]
        h = torch.tanh(self.prime(x)).sum(-1) * self.scalar + self.one
        h = (
            h
            + self.column.sum() ** 2
            + (self.transposed**3).sum()
            + (self.strided.sin() * self.expanded.sum()).sum()
        )
        h = (
            h
            + self.conv(x[:1, :12].reshape(1, 3, 2, 2).repeat(1, 1, 2, 2)).pow(2).mean()
            + self.deep.cos().sum()
        )
        return h + self.empty.sum() + self.flat_empty.sum()


def _data(step: int, width: int = 13) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _expected_grads(model: nn.Module, loss: Tensor, wire: torch.dtype | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    grads = {name: mean_over_ranks(p.grad, p, wire) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
    return grads


# -- L1 --


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@distributed(world=(2, 4))
def test_l1_shapes_that_do_not_divide(world: int, optimizer: str) -> None:
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    }[optimizer]
    plain, model = Odd(), Odd()
    reference, made = make(plain.parameters()), make(model.parameters())
    zs.shard(model, made)
    for step in range(4):
        x = _data(step)
        expected = _expected_grads(plain, plain(x).sum())
        made.zero_grad()
        model(x).sum().backward()
        assert_same(full_grads(model), expected, rtol=1e-6, what=f"step {step}")
        made.step()
        reference.step()
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-5)


@distributed(world=4)
def test_l1_every_parameter_is_cut_as_torch_cuts_it() -> None:
    plain, model = Odd(), Odd()
    zs.shard(model)
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(param, DTensor) and param.shape == whole.shape, name
        local = param.to_local().detach()
        if not whole.dim():
            assert_same(local, whole.detach())
            continue
        chunks = list(whole.detach().chunk(4)) if whole.shape[0] else []
        chunks += [whole.detach()[:0]] * (4 - len(chunks))
        assert_same(local.contiguous(), chunks[dist.get_rank()].contiguous(), what=name)


@distributed(world=4)
def test_l1_strides_that_the_forward_relies_on_come_back() -> None:
    """Inside a forward a transposed weight is as it was: the same strides, the same kernels, the same bits."""
    plain = Odd()
    seen = {}

    class Spy(Odd):
        def forward(self, x: Tensor) -> Tensor:
            seen.update({n: p.stride() for n, p in self.named_parameters()})
            return super().forward(x)

    model = Spy()
    zs.shard(model)
    x = _data(0)
    assert_same(model(x).detach(), plain(x).detach())
    # The order of the dimensions in memory is kept; gaps between elements are not.
    for name in ("transposed", "conv.weight"):
        assert seen[name] == dict(plain.named_parameters())[name].stride(), name


@distributed(world=4)
def test_l1_whole_values_go_in_and_come_out() -> None:
    """What resharding needs: whole state dicts of a plain model load, and whole values come out, bit for bit."""
    torch.manual_seed(dist.get_rank())
    plain, model = Odd(), zs.shard(Odd())
    for p in plain.parameters():
        nn.init.constant_(p, 0.25)
    model.load_state_dict(plain.state_dict())
    expected = {n: p.detach() for n, p in plain.named_parameters()}
    assert_same(full_params(model), expected)
    with zs.full_params(model):
        assert_same({n: p.detach() for n, p in model.named_parameters()}, expected)
    x = _data(0)
    assert_same(model(x).detach(), plain(x).detach())


@distributed(world=4)
def test_l1_a_model_of_one_scalar() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.forward = lambda x: x * model.scale
    zs.shard(model)
    model(torch.tensor(float(dist.get_rank()))).backward()
    assert model.scale.grad.full_tensor().item() == 1.5


@distributed(world=4)
def test_l1_a_model_of_nothing_but_empty_parameters() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.forward = lambda x: x + model.empty.sum()
    optimizer = torch.optim.AdamW(model.parameters())
    zs.shard(model, optimizer)
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    assert model.empty.shape == (0, 3)


# -- L3: sizes that are no multiple of 8, and 16-bit messages --


class Primes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13, bias=False)) for _ in range(2)
        )
        self.large = nn.Linear(13, 8191)  # its rows travel in place

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.tanh(self.large(x))


def _bits_by_hand(wire: str) -> None:
    plain, model = Primes(), Primes()
    zs.shard(model, config=zs.Config(reduce_dtype=wire))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wire]
    for step in range(2):
        x = _data(step)
        expected = _expected_grads(plain, plain(x).sum(), dtype)
        model.zero_grad()
        model(x).sum().backward()
        assert_same(full_grads(model), expected, what=f"step {step}")


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp32"])
@distributed(world=3)
def test_l3_odd_lengths_in_any_wire_dtype(world: int, wire: str) -> None:
    _bits_by_hand(wire)


@distributed(world=6, timeout=120)
def test_l3_on_six_ranks() -> None:
    _bits_by_hand("bf16")
