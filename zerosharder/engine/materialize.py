"""Models built on the meta device: real memory and initial values, one unit at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from zerosharder.errors import ShardError
from zerosharder.partition.select import ParamUse


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of ``model`` is on the meta device."""
    return any(t.is_meta for t in model.parameters()) or any(t.is_meta for t in model.buffers())


def materialize_params(
    model: nn.Module, uses: Iterable[ParamUse], device: torch.device, given: Container[str] = ()
) -> None:
    """Gives every meta parameter of ``uses`` memory on ``device`` and its initial value.

    The value comes from ``_init_weights(module)`` of the nearest ancestor that has one, called for the owner and for
    every module around it (the convention of transformers), else from the owner's ``reset_parameters()`` (the
    convention of torch). ``uses[i].param`` is replaced, in all owners. Parameters in ``given`` get memory only.

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
    wanted = [use for use in fresh if use.name not in given]
    owners = list(dict.fromkeys(use.owners[0][0] for use in wanted))
    buffers = _fresh_buffers(model, owners, device, given)  # a module may fill them with its parameters
    if wanted:
        _initialize(model, owners, {use.owners[0]: use.param for use in wanted})
    missing = [use.name for use in wanted if _is_unset(use.param)]
    if missing:
        raise ShardError(
            f"parameters {', '.join(missing)} are on the meta device and nothing initialises them: give their modules "
            "a reset_parameters(), or the model an _init_weights(module), or call to_empty() and initialise yourself"
        )
    _refuse_unset(buffers)


def materialize_buffers(model: nn.Module, device: torch.device, given: Container[str] = ()) -> None:
    """Gives every meta buffer memory and its value, which only its module's own initialisation knows.

    Buffers in ``given`` get memory only.

    Raises:
        ShardError: buffers that no initialisation computes again, by name (their ``__init__`` did, on meta).
    """
    owners = [m for m in model.modules() if any(b is not None and b.is_meta for b in m._buffers.values())]
    fresh = _fresh_buffers(model, owners, device, given)
    for module in dict.fromkeys(b.module for b in fresh):
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()  # type: ignore[operator]
        elif not any(True for _ in module.parameters(recurse=False)):  # those have their values already
            _initialize(model, [module], {})
    _refuse_unset(fresh)


class _FreshBuffer(NamedTuple):
    name: str
    module: nn.Module
    attr: str
    real: torch.Tensor
    version: int  # when it was made


def _fresh_buffers(
    model: nn.Module, owners: list[nn.Module], device: torch.device, given: Container[str]
) -> list[_FreshBuffer]:
    """Memory for the meta buffers of ``owners``; returns those that are not in ``given``."""
    made = []
    wanted = set(owners)
    for prefix, module in model.named_modules():
        for attr, buffer in module._buffers.items():
            if module in wanted and buffer is not None and buffer.is_meta:
                module._buffers[attr] = real = _unset(buffer, device)
                name = f"{prefix}.{attr}" if prefix else attr
                made.append(_FreshBuffer(name, module, attr, real, real._version))
    return [buffer for buffer in made if buffer.name not in given]


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


def _initialize(
    model: nn.Module, owners: list[nn.Module], fresh: Mapping[tuple[nn.Module, str], nn.Parameter]
) -> None:
    """Runs the initialisation of ``owners``, which writes to the parameters in ``fresh`` and to no others."""
    conventions = _conventions(model)
    own = [module for module in owners if conventions[module] is None]
    # Modules that set weights of their children do so after those, as when transformers builds a model.
    around = [
        m
        for m in _children_first(model)
        if conventions[m] is not None and not set(owners).isdisjoint(m.modules())
    ]
    with torch.no_grad():
        for module in own:
            if callable(getattr(module, "reset_parameters", None)):
                with _others_on_meta(module, fresh):
                    module.reset_parameters()  # type: ignore[operator]
        for module in around:
            with _others_on_meta(module, fresh):
                conventions[module]._init_weights(module)  # type: ignore[union-attr, operator]


@contextlib.contextmanager
def _others_on_meta(module: nn.Module, fresh: Mapping[tuple[nn.Module, str], nn.Parameter]) -> Iterator[None]:
    """Inside, only ``fresh`` can be written to: what else is below ``module`` has values to keep, or no memory yet.

    Of a tied parameter that goes for all owners but the first, whose initialisation is the one that counts.
    """
    kept = [
        (m, attr, param)
        for m in module.modules()
        for attr, param in m._parameters.items()
        if param is not None and not param.is_meta and (m, attr) not in fresh
    ]
    for m, attr, param in kept:
        m._parameters[attr] = nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )
    try:
        yield
    finally:
        for m, attr, param in kept:
            m._parameters[attr] = param


def _conventions(model: nn.Module) -> dict[nn.Module, nn.Module | None]:
    """For each module the nearest one, itself or around it, that has an ``_init_weights``."""
    found: dict[nn.Module, nn.Module | None] = {}

    def visit(module: nn.Module, nearest: nn.Module | None) -> None:
        nearest = module if hasattr(module, "_init_weights") else nearest
        found.setdefault(module, nearest)
        for child in module.children():
            if child not in found:
                visit(child, nearest)

    visit(model, None)
    return found


def _children_first(model: nn.Module) -> list[nn.Module]:
    """The order of ``nn.Module.apply``, each module once."""
    order: dict[nn.Module, None] = {}
    model.apply(lambda module: order.setdefault(module))
    return list(order)


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
