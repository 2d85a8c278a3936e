"""Dtypes that meet in one model.

Expected values are computed by hand: the mean over ranks in fp32, in rank order, then rounded to the dtype of the
parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, full_params
from tiny import features, mean_over_ranks
from torch import Tensor, nn

import zerosharder as zs


class MixedBlock(nn.Module):
    """bf16 matrices and fp32 norms, as people write them for stability."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # [rows, width], fp32
        h = self.norm(x).to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(h))).to(x.dtype)


class Mixed(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock(dtype=dtype) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def _descend(weight: Tensor, grad: Tensor, lr: float) -> None:
    """In fp32: torch's 16-bit add with alpha rounds the body and the tail of a vector differently."""
    weight.copy_(weight.float() - lr * grad.float())


def _expected_step(model: nn.Module, loss: Tensor, lr: float = 0.1) -> dict[str, Tensor]:
    """Gradients of one step by hand; takes the step."""
    loss.backward()
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = mean_over_ranks(p.grad.float(), p.float()).to(p.dtype)
        _descend(p.data, grads[name], lr)
        p.grad = None
    return grads


def _compare(kind: Callable[[], nn.Module], *, steps: int = 3, **settings: str) -> nn.Module:
    plain, model = _build(kind), _build(kind)
    dtypes = {name: p.dtype for name, p in plain.named_parameters()}
    zs.shard(model, config=zs.Config(**settings) if settings else None)
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    for step in range(steps):
        x = features(step).to(next(plain.parameters()).dtype)
        expected = _expected_step(plain, plain(x).float().pow(2).sum())
        loss = model(x).float().pow(2).sum()
        loss.backward()
        assert_same(full_grads(model), expected, what=f"gradients of step {step}")
        with torch.no_grad():
            for p in model.parameters():
                _descend(p, p.grad, 0.1)
                p.grad = None
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()})
    return model


# -- K1: one block, two dtypes --


@distributed(world=2)
def test_k1_bf16_matrices_and_fp32_norms() -> None:
    model = _compare(Mixed)
    assert {b.layout.dtype for u in model._zerosharder.engine.units for b in u.buckets} == {
        torch.float32,
        torch.bfloat16,
    }


@distributed(world=2)
def test_k1_fp16_matrices_and_fp32_norms() -> None:
    _compare(lambda: Mixed(torch.float16), steps=1)


@distributed(world=3)
def test_k1_on_three_ranks() -> None:
    _compare(Mixed)


@pytest.mark.parametrize("name", ["adamw", "fused", "foreach", "sgd"])
@distributed(world=2)
def test_k1_with_an_optimizer(name: str) -> None:
    """Against torch's own optimizer on the whole mixed parameters, fed with the same gradients."""
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }[name]
    plain, model = _build(Mixed), _build(Mixed)
    reference, optimizer = make(plain.parameters()), make(model.parameters())
    zs.shard(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(features(step)).pow(2).sum().backward()
        for p, g in zip(plain.parameters(), full_grads(model).values(), strict=True):
            p.grad = g.clone()
        optimizer.step()
        reference.step()
    # torch's own bf16 kernels round the ends of a tensor that fill no vector differently: one ulp of bf16.
    bound = {"rtol": 8e-3} if name in ("fused", "sgd") else {}
    assert_same(full_params(model), {n: p.detach() for n, p in plain.named_parameters()}, **bound)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        mine, theirs = optimizer.state[p], reference.state[q]
        assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in theirs.items()}


@distributed(world=2)
def test_k1_an_integer_parameter_beside() -> None:
    """Quantised weights people keep as parameters that need no gradient."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(-12, 12).view(6, 4).to(torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(6))
            self.flags = nn.Parameter(torch.arange(5) % 2 == 0, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.codes.float() * self.scale[:, None]).t() * self.flags.sum()

    plain, model = _build(Quantised), _build(Quantised)
    zs.shard(model)
    x = torch.randn(3, 4)
    assert_same(model(x).detach(), plain(x).detach())
    model(x).sum().backward()
    assert model.codes.grad is None and model.codes.dtype is torch.int8 and model.flags.dtype is torch.bool
    assert_same(full_params(model)["codes"], plain.codes.detach())


@distributed(world=2)
def test_k1_double_precision_is_never_rounded() -> None:
    """The default reduce dtype is fp32, 'which never rounds'."""
    plain, model = _build(lambda: nn.Linear(4, 3).double()), _build(lambda: nn.Linear(4, 3).double())
    zs.shard(model)
    x = features(0, width=4).double()
    plain(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    for p in plain.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    assert_same(full_grads(model), {n: p.grad for n, p in plain.named_parameters()}, rtol=1e-15)


@distributed(world=2)
def test_k1_complex_parameters_keep_their_imaginary_part() -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)

    plain, model = _build(Fourier), _build(Fourier)
    zs.shard(model)
    x = features(0)
    plain(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    grad = torch.view_as_real(plain.weight.grad)
    dist.all_reduce(grad)
    found = model.weight.grad.full_tensor()
    assert found.imag.abs().max() > 0
    assert_same(found, torch.view_as_complex(grad / 2), rtol=1e-6)


# -- K2: buffers --


class Blur(nn.Module):
    """A convolution with a trained and one with a fixed kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.register_buffer("kernel", torch.full((2, 1, 3, 3), 1 / 9))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor, cast: bool = True) -> Tensor:
        x = self.conv(x)
        return nn.functional.conv2d(x, self.kernel.to(x.dtype) if cast else self.kernel, groups=2, padding=1)


@distributed(world=2)
def test_k2_buffers_are_left_alone() -> None:
    model = _build(Blur)
    before = dict(model.named_buffers())
    values = copy.deepcopy(before)
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    out = model(torch.randn(2, 2, 4, 4))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert all(after is before[name] for name, after in model.named_buffers())
    assert_same(dict(model.named_buffers()), values)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@distributed(world=2)
def test_k2_a_buffer_of_another_dtype_fails_as_in_torch_and_the_next_step_works() -> None:
    model = _build(Blur)
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    x = torch.randn(2, 2, 4, 4)
    with pytest.raises(RuntimeError, match="type"):
        model(x, cast=False)
    model(x).float().sum().backward()
    assert zs.stats(model).current_bytes["host"]["gathered"] == 0


@distributed(world=2)
def test_k2_batch_norm() -> None:
    """Its statistics are fp32 buffers; torch takes no bf16 weights beside them."""
    model = _build(lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)))
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    model(torch.randn(2, 2, 4, 4)).float().pow(2).sum().backward()
    assert model[1].running_mean.dtype is torch.float32 and model[1].running_mean.abs().max() > 0
    assert model[1].num_batches_tracked.item() == 1
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


# -- K4: parameters that are 16-bit already --


@pytest.mark.parametrize(
    "settings", [{}, {"param_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}], ids=str
)
@distributed(world=2)
def test_k4_a_bf16_model_whose_gradients_are_summed_in_fp32(settings: dict[str, str]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()

    _compare(build, **settings)


@distributed(world=2)
def test_k4_a_half_model() -> None:
    _compare(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).half(),
        reduce_dtype="fp32",
        steps=1,
    )


@distributed(world=2)
def test_k4_a_half_model_that_computes_in_bf16() -> None:
    model = _build(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).half())
    zs.shard(model, config=zs.Config(param_dtype="bf16"))
    out = model(features(0))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert all(p.dtype is torch.float16 and p.grad.dtype is torch.float16 for p in model.parameters())


@distributed(world=2)
def test_k4_accumulated_16_bit_gradients_are_summed_in_fp32_before_they_are_rounded() -> None:
    """Many micro batches of small gradients: sums in bf16 would stall at 256 times the summand."""
    model = _build(lambda: nn.Linear(4, 1, bias=False).bfloat16())
    zs.shard(model)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    for step in range(300):
        if step < 299:
            with zs.no_sync(model):
                model(x).sum().backward()
        else:
            model(x * 4 * dist.get_rank()).sum().backward()
    # 299 and 303: 301, which bf16 rounds to 300. Rounded before they are sent they would be 300 and 304.
    assert_same(full_grads(model)["weight"].float(), torch.full((1, 4), 300.0))
