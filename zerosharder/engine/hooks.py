"""Where the engine takes hold of a model: wrapped forwards, and reads of sharded parameters.

A module's ``forward`` is replaced on the instance, so that ``module(x)``, ``module.forward(x)`` and anything that
calls either goes through the engine, while the class stays what it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerosharder.errors import ShardError

if TYPE_CHECKING:
    from zerosharder.engine.bucket import Bucket, UnitParam
    from zerosharder.engine.engine import Engine
    from zerosharder.engine.unit import Unit


class OnDemandParameters(dict[str, "nn.Parameter | None"]):
    """``module._parameters`` of a module that owns sharded parameters.

    A parent may read a child's weight without calling the child (``x @ self.embedding.weight.T``). Inside a wrapped
    forward such a read gathers the weight's unit and gives the gathered form. Iterating (named_parameters, state
    dicts) never does.
    """

    __slots__ = ("_engine", "inactive")

    def __init__(self, items: dict[str, nn.Parameter | None], engine: Engine) -> None:
        super().__init__(items)
        self._engine = engine
        self.inactive = 0  # units with a parameter here that are not computing now

    def __getitem__(self, key: str) -> nn.Parameter | None:
        param = super().__getitem__(key)
        # torch.compile traces this far inside a compiled block; anything that looks at the parameter itself would
        # become a guard on its identity, and each block of a model would be compiled again.
        if not self.inactive or param is None:
            return param
        leaf = self._engine.demand(param)
        return param if leaf is None else leaf


def install(engine: Engine) -> None:
    """Wraps the forward of every entry and the parameter table of every owner."""
    by_entry: dict[nn.Module, list[Unit]] = {}
    for unit in engine.units:
        for module in unit.entries:
            by_entry.setdefault(module, []).append(unit)
    for module, units in by_entry.items():
        wrap_method(engine, units, module, "forward")
    for unit in engine.units:
        for module in {m: None for param in unit.params for m, _ in param.owners + param.slow_owners}:
            table = module._parameters
            if not isinstance(table, OnDemandParameters):
                table = module.__dict__["_parameters"] = OnDemandParameters(table, engine)
            table.inactive += 1
            unit.tables.append(table)


def accept_full_state_dicts(model: nn.Module, engine: Engine) -> None:
    """Lets ``load_state_dict`` take the whole, plain tensors of an unsharded model (all of them on every rank)."""
    names: dict[str, tuple[Bucket, UnitParam]] = {}
    paths = {module: prefix for prefix, module in model.named_modules()}
    for unit in engine.units:
        for bucket in unit.buckets:
            for param in bucket.params:
                for module, attr in param.owners + param.slow_owners:
                    names[f"{paths[module]}.{attr}" if paths[module] else attr] = (bucket, param)

    def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, (bucket, param) in names.items():
            if param.is_installed_whole:  # inside full_params
                continue
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if tuple(value.shape) == param.layout.shape:
                state_dict[prefix + name] = bucket.cut(param.layout, value)

    model.register_load_state_dict_pre_hook(cut)


def wrap_method(engine: Engine, units: list[Unit], module: nn.Module, name: str) -> None:
    """Makes ``module.name(...)`` a wrapped forward of ``units``."""
    method = getattr(module, name, None)
    if not callable(method):
        raise ShardError(f"{type(module).__name__} has no method {name!r} to register")
    if getattr(method, "_zerosharder_wrapped", False):
        return
    module.__dict__[name] = _wrapped(engine, units, method)


def _wrapped(engine: Engine, units: list[Unit], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        frame, args, kwargs = engine.enter(units, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            engine.abandon(frame)
            raise
        return engine.leave(frame, output)

    # The engine's bookkeeping is not for the compiler; what it calls is (torch.compile reads this attribute).
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    forward._zerosharder_wrapped = True  # type: ignore[attr-defined]
    return forward
