"""Norms and clipping by torch's own function."""

from __future__ import annotations

import copy
import logging

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same, full_grads, reference_ddp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import zerosharder as zs

BOUND = 1e-6


def _plain(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Mixed(nn.Module):
    """Rows that divide and rows that do not, a vector, an unused and a frozen parameter, and, if asked, a scalar.

    rows: of the smallest parameter; fewer than ranks leave some of them without any.
    """

    def __init__(self, scalar: bool = False, rows: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tiny.Layer(8) for _ in range(2))
        self.odd = nn.Linear(8, 5)
        self.last = nn.Linear(5, rows)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(rows, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(3.0)) if scalar else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.frozen(self.last(self.odd(x)))
        return x if self.scale is None else x * self.scale


def _with_grads(config: zs.Config | None = None, **settings) -> tuple[nn.Module, nn.Module]:
    """The same gradients, on a plain model (under DDP) and on a sharded one."""
    torch.manual_seed(1)
    plain = Mixed(**settings)
    model = copy.deepcopy(plain)
    wrapped = reference_ddp(plain)
    zs.shard(model, config=config)
    for net in (wrapped, model):
        (net(tiny.features(0)) * 5).square().sum().backward()
    return plain, model


def _true_norm(plain: nn.Module, p: float) -> Tensor:
    return torch.cat([g.flatten() for g in full_grads(plain).values() if g is not None]).norm(p)


PATHS = pytest.mark.parametrize("foreach", [None, False, True], ids=["default", "single", "foreach"])


def _check(p: float, foreach: bool | None, **settings) -> None:
    plain, model = _with_grads(**settings)
    true = _true_norm(plain, p)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=p, foreach=foreach)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=p, foreach=foreach)
    assert_same(_plain(found), true, rtol=BOUND, what="norm")
    assert_same(_plain(found), expected, rtol=BOUND, what="norm of the plain model")
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what="clipped gradients")


@PATHS
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=(1, 2, 3))
def test_h1_norm_and_clipping(world: int, p: float, foreach: bool | None) -> None:
    _check(p, foreach)


@PATHS
@pytest.mark.parametrize("p", [1.0, 2.0])  # torch has no infinity norm of an empty shard: docs/gradients.md
@distributed(world=3, timeout=20)
def test_h1_norm_where_a_rank_has_no_rows(p: float, foreach: bool | None) -> None:
    """One row on three ranks, and five rows as 2, 2, 1 and four as 2, 2, 0."""
    _check(p, foreach, rows=1)


@distributed(world=2)
def test_h1_every_rank_gets_the_same_norm() -> None:
    """Also where one rank's gradient is far larger, infinite, or not a number."""
    _, model = _with_grads()
    for value in (1e6, float("inf"), float("nan")):
        if dist.get_rank() == 1:
            model.layers[0].linear.weight.grad.to_local()[0, 0] = value
        found = _plain(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
        everyone = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(everyone, found)
        assert_same(everyone[0], everyone[1])
        assert found.isnan() if value != value else found >= 1e6 * (value < 2e6) or found.isinf()


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=2)
def test_h1_clip_grad_value_and_mixed_precision(p: float) -> None:
    plain, model = _with_grads()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    assert_same(full_grads(model), full_grads(plain), rtol=BOUND, what="clipped by value")
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=p)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type=p)
    assert_same(_plain(found), expected, rtol=BOUND, what="norm")


@distributed(world=2)
def test_h1_gradients_of_bf16_training_have_fp32_norms() -> None:
    _, model = _with_grads(config=zs.Config(param_dtype="bf16"))
    whole = torch.cat([g.flatten() for g in full_grads(model).values() if g is not None])
    assert whole.dtype == torch.float32
    found = _plain(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert found.dtype == torch.float32
    assert_same(found, whole.norm(), rtol=BOUND)


@distributed(world=2)
def test_h3_one_scalar_collective_for_each_clip() -> None:
    """Counted at the dispatcher, with 300 parameters."""
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(150))
    model.forward = lambda x: sum(layer(x) for layer in model)
    zs.shard(model)
    model(torch.ones(1, 2)).sum().backward()
    for p in (1.0, 2.0, float("inf")):
        with CommDebugMode() as counted:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=p)
        assert counted.get_total_counts() == 1, p


@distributed(world=4)
def test_h4_two_meshes_in_one_step() -> None:
    """A model sharded over all ranks and one replicated over pairs, clipped each, one step each."""
    plain = [tiny.mlp(8, 2), tiny.mlp(8, 3)]
    models = [copy.deepcopy(m) for m in plain]
    zs.shard(models[0])
    zs.shard(models[1], mesh=init_device_mesh("cpu", (2, 2)))
    x = tiny.features(0)
    models[1](models[0](x)).square().sum().backward()
    wrapped = reference_ddp(nn.Sequential(*plain))
    wrapped(x).square().sum().backward()
    for model, ref in zip(models, plain, strict=True):
        expected = torch.nn.utils.clip_grad_norm_(ref.parameters(), 0.1)
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert_same(_plain(found), expected, rtol=BOUND, what="norm")
        assert_same(full_grads(model), full_grads(ref), rtol=BOUND, what="clipped")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@distributed(world=2)
def test_h5_scalar_parameters(p: float) -> None:
    """torch's default and foreach paths give the true norm; shard() says which path does not."""
    handler = _Lines()
    log = logging.getLogger("zerosharder")
    log.addHandler(handler)
    try:
        plain, model = _with_grads(scalar=True)
    finally:
        log.removeHandler(handler)
    true = _true_norm(plain, p)
    wrong = []
    for foreach in (None, True, False):
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=p, foreach=foreach)
        if (_plain(found) - true).abs() > BOUND * true:
            wrong.append(foreach)
    assert wrong in ([], [False])
    if wrong and dist.get_rank() == 0:
        assert any("foreach=False" in line and "scalar" in line for line in handler.lines)
