"""Comparisons of a sharded model with a plain one: full parameters and gradients by name.

`full_params` and `full_grads` are collective when the model is sharded: call them on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Named = Mapping[str, Tensor | None]
Comparable = Named | Iterable[Tensor | float] | Tensor | float


def reference_ddp(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """The same model under DistributedDataParallel, any parameters unused, each rank with its own buffers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name in newer versions
        settings = {"find_unused_parameters": True, "broadcast_buffers": False} | kwargs
        return DistributedDataParallel(model, **settings)


def average_grads(model: nn.Module) -> None:
    """What DDP does to gradients, for models that DDP cannot wrap: call after backward, on every rank."""
    world = dist.get_world_size()
    params = [p for p in model.parameters() if p.requires_grad]
    for param, somewhere in zip(params, _anywhere(param.grad is not None for param in params), strict=True):
        if somewhere:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            param.grad.mul_(1 / world)  # before the sum, as DDP
            dist.all_reduce(param.grad)


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters in full, by the names the plain model has."""
    return {name: _full(param) for name, param in _named_parameters(model)}


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients in full, None where there is none. Ranks must agree on where there is one."""
    named = _named_parameters(model)
    if any(isinstance(param, DTensor) for _, param in named):
        here = [param.grad is not None for _, param in named]
        odd = [
            name for (name, _), mine, any_ in zip(named, here, _anywhere(here), strict=True) if mine != any_
        ]
        missing = torch.tensor([len(odd)])
        dist.all_reduce(missing)  # before full_tensor, which would hang
        if missing.item():
            raise AssertionError(f"only some ranks have a gradient; missing on rank {dist.get_rank()}: {odd}")
    return {name: None if param.grad is None else _full(param.grad) for name, param in named}


def assert_same(
    found: Comparable,
    expected: Comparable,
    *,
    bitwise: bool | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    what: str = "",
) -> None:
    """Dictionaries, lists, tensors or numbers are the same: bit for bit, or, given a bound, within it.

    atol: largest absolute difference. rtol: the same as a share of the expected tensor's largest magnitude.
    The message names the first tensor that differs, the worst one, and how many do.
    """
    if bitwise is None:
        bitwise = not (atol or rtol)
    if bitwise == bool(atol or rtol):
        raise ValueError("either bitwise or a bound")
    a, b = _named(found), _named(expected)
    title = f"{what}: " if what else ""
    if list(a) != list(b):
        missing, extra = [n for n in b if n not in a], [n for n in a if n not in b]
        detail = (
            f"missing {missing}, unexpected {extra}" if missing or extra else f"order {list(a)} and {list(b)}"
        )
        raise AssertionError(f"{title}names differ: {detail}")
    wrong = {}
    for name, one in a.items():
        problem = _difference(one, b[name], bitwise, atol, rtol)
        if problem:
            wrong[name] = problem
    if wrong:
        name, problem = next(iter(wrong.items()))
        worst, where = max_abs_diff(a, b)
        first = f"{len(wrong)} of {len(a)} differ; first {name}: {problem}"
        raise AssertionError(f"{title}{first}; largest difference {worst:.6g} in {where or name}")


def is_bitwise(found: Comparable, expected: Comparable) -> bool:
    """Whether assert_same would pass without bounds."""
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


def max_abs_diff(found: Comparable, expected: Comparable) -> tuple[float, str]:
    """The largest absolute difference and the name of its tensor; shapes that differ count as infinite."""
    a, b = _named(found), _named(expected)
    worst = (0.0, "")
    for name in a.keys() & b.keys():
        one, other = a[name], b[name]
        if one is None and other is None:
            continue
        if one is None or other is None or one.shape != other.shape:
            return float("inf"), name
        worst = max(worst, (_abs_diff(one, other), name))
    return worst


# -- private --


def _named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return list(plain.named_parameters())


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


def _anywhere(flags: Iterable[bool]) -> list[bool]:
    """For each flag, whether any rank has it set."""
    counts = torch.tensor([int(flag) for flag in flags])
    if dist.is_initialized() and counts.numel():
        dist.all_reduce(counts)
    return [bool(count) for count in counts]


def _named(values: Comparable) -> dict[str, Tensor | None]:
    if isinstance(values, Tensor | float | int):
        values = [values]
    if not isinstance(values, Mapping):
        values = {f"[{i}]": _tensor(value) for i, value in enumerate(values)}
    return {
        name: _full(value) if isinstance(value, DTensor) else value if value is None else value.detach()
        for name, value in values.items()
    }


def _tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _abs_diff(one: Tensor, other: Tensor) -> float:
    if one.numel() == 0:
        return 0.0
    difference = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"))
    difference[(one == other) | (one.isnan() & other.isnan())] = 0.0
    return difference.max().item()


def _difference(one: Tensor | None, other: Tensor | None, bitwise: bool, atol: float, rtol: float) -> str:
    """What is wrong, or nothing."""
    if one is None or other is None:
        return "" if one is other else f"{_kind(one)} and {_kind(other)}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{_kind(one)} and {_kind(other)}"
    if bitwise:
        if torch.equal(_bits(one), _bits(other)):
            return ""
        unequal = int((_bits(one) != _bits(other)).any(dim=1).sum())
        if torch.equal(one, other):
            return f"{_kind(one)}: {unequal} zeros have another sign"
        return f"{_kind(one)}: {unequal} of {one.numel()} elements, max abs diff {_abs_diff(one, other):.6g}"
    found = _abs_diff(one, other)
    scale = other.double().abs().max().item() if other.numel() else 0.0
    bound = atol + rtol * scale
    if found <= bound:
        return ""
    return f"{_kind(one)}: max abs diff {found:.6g}, scale {scale:.6g}, bound {bound:.6g}"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, for a comparison that knows NaN and the sign of zero. (n, itemsize)"""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
