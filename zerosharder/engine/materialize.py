"""Models built on the meta device: real memory and initial values, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from zerosharder.errors import ShardError
from zerosharder.partition.select import ParamUse


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of ``model`` is on the meta device."""
    return any(t.is_meta for t in model.parameters()) or any(t.is_meta for t in model.buffers())


def materialize_params(model: nn.Module, uses: Iterable[ParamUse], device: torch.device) -> None:
    """Gives every meta parameter of ``uses`` memory on ``device`` and its initial value.

    The value comes from ``_init_weights(module)`` of the nearest ancestor that has one (the convention of
    transformers), else from the owner's ``reset_parameters()`` (the convention of torch). ``uses[i].param`` is
    replaced, in all owners.

    Raises:
        ShardError: a parameter that neither of them initialises, by name.
    """
    fresh = [use for use in uses if use.param.is_meta]
    for use in fresh:
        real = nn.Parameter(_unset(use.param, device), requires_grad=use.param.requires_grad)
        real.__dict__.update(use.param.__dict__)
        use.param = real
        for module, attr in use.owners:
            module._parameters[attr] = real
    # One owner initialises a tied parameter, as when it was built; the second would overwrite it.
    owners = list(dict.fromkeys(use.owners[0][0] for use in fresh))
    buffers = _fresh_buffers(model, owners, device)  # a module may fill them together with its parameters
    for module in owners:
        _initialize(model, module)
    missing = [use.name for use in fresh if _is_unset(use.param)]
    if missing:
        raise ShardError(
            f"parameters {', '.join(missing)} are on the meta device and nothing initialises them: give their modules "
            "a reset_parameters(), or the model an _init_weights(module), or call to_empty() and initialise yourself"
        )
    _refuse_unset(buffers)


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives every meta buffer memory and its value, which only its module's own initialisation knows.

    Raises:
        ShardError: buffers that no initialisation computes again, by name (their ``__init__`` did, on meta).
    """
    owners = [m for m in model.modules() if any(b is not None and b.is_meta for b in m._buffers.values())]
    fresh = _fresh_buffers(model, owners, device)
    for module in owners:
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()  # type: ignore[operator]
        elif not any(True for _ in module.parameters(recurse=False)):  # those have their values already
            _initialize(model, module)
    _refuse_unset(fresh)


class _FreshBuffer(NamedTuple):
    name: str
    module: nn.Module
    attr: str
    real: torch.Tensor
    version: int  # when it was made


def _fresh_buffers(model: nn.Module, owners: list[nn.Module], device: torch.device) -> list[_FreshBuffer]:
    """Memory for the meta buffers of ``owners``."""
    made = []
    wanted = set(owners)
    for prefix, module in model.named_modules():
        for attr, buffer in module._buffers.items():
            if module in wanted and buffer is not None and buffer.is_meta:
                module._buffers[attr] = real = _unset(buffer, device)
                name = f"{prefix}.{attr}" if prefix else attr
                made.append(_FreshBuffer(name, module, attr, real, real._version))
    return made


def _refuse_unset(buffers: list[_FreshBuffer]) -> None:
    def is_unset(b: _FreshBuffer) -> bool:
        if b.module._buffers[b.attr] is not b.real:
            return False
        return b.real._version == b.version if b.real.dtype is torch.bool else _is_unset(b.real)

    missing = [b.name for b in buffers if b.real.numel() and is_unset(b)]
    if missing:
        raise ShardError(
            f"buffers {', '.join(missing)} are on the meta device and were computed in __init__, which is lost: "
            "compute them in reset_parameters() too, or build the model on a real device"
        )


def _initialize(model: nn.Module, module: nn.Module) -> None:
    by_convention = _nearest_init(model, module)
    with torch.no_grad():
        if by_convention is not None:
            by_convention._init_weights(module)  # type: ignore[operator]
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]


def _nearest_init(model: nn.Module, module: nn.Module) -> nn.Module | None:
    best: nn.Module | None = None
    for candidate in model.modules():  # parents come before children: the last hit is the nearest
        if hasattr(candidate, "_init_weights") and any(m is module for m in candidate.modules()):
            best = candidate
    return best


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that tells whether anybody wrote to it: NaN, or the lowest integer."""
    real = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.is_floating_point() or like.is_complex():
        return real.fill_(float("nan"))
    return real.zero_() if like.dtype is torch.bool else real.fill_(torch.iinfo(like.dtype).min)


def _is_unset(tensor: torch.Tensor | None) -> bool:
    if tensor is None or not tensor.numel() or tensor.dtype is torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())
