"""Makes an existing optimizer work on sharded parameters.

The optimizer object, its ``param_groups`` dicts (empty ones and extra keys included) and their order stay; only the
parameters inside, and state that earlier steps left, are exchanged for their sharded forms.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerosharder.errors import OptimizerError
from zerosharder.observe.log import log
from zerosharder.optim.flat import step_over_flat_shards
from zerosharder.optim.shards import FlatShard, ShardedParam

# torch's own limits, found by its errors in the middle of a step; here they are said before the first.
NOT_ON_SHARDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it joins all gradients into one vector, of which a rank has its rows only",
    torch.optim.Rprop: "torch has no in-place indexing of DTensors",
    torch.optim.Adafactor: "torch has no in-place power of a partial norm of DTensors",
}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter of ``model``, by id; of a tied one its first."""
    return {id(param): name for name, param in model.named_parameters()}


def check_optimizer(optimizer: object, known: Container[int], is_sharded: bool) -> None:
    """Raises OptimizerError if ``optimizer`` cannot be adopted.

    Args:
        optimizer: what was given to ``shard()``.
        known: ids of the model's parameters, before and after sharding.
        is_sharded: whether the parameters are, or will be, shards: there is more than one rank.

    Raises:
        OptimizerError: not an optimizer, one that torch cannot run on shards, or one over foreign parameters.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"shard() takes a torch.optim.Optimizer as its second argument, got {kind.__name__}"
        )
    if kind in NOT_ON_SHARDS and is_sharded:
        raise OptimizerError(
            f"{kind.__name__} cannot step on sharded parameters: {NOT_ON_SHARDS[kind]}. AdamW, Adam, SGD, Adagrad, "
            "RMSprop, Muon and other optimizers whose steps torch supports on DTensors can"
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if params and not any(id(p) in known for p in params):
        raise OptimizerError(
            f"{kind.__name__} holds none of the model's parameters (its first one has shape "
            f"{tuple(params[0].shape)}); build it from model.parameters() of the model that is sharded"
        )


def describe_optimizer(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> list[str]:
    """What must be the same on every rank: class, and of each group the scalar settings and the parameters.

    Ranks that step the shards of one parameter differently would ruin the model without an error.
    """
    if optimizer is None:
        return []
    lines = [type(optimizer).__qualname__]
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        lines += [f"group {number} with {key}={value}" for key, value in sorted(settings.items()) if value]
        lines += [
            f"group {number} with {names.get(id(p), 'a parameter of no name')}" for p in group["params"]
        ]
    return lines


def _plain(value: object) -> str:
    """Text of a setting that can be compared between ranks; empty for what has an address or a device in its text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    if isinstance(value, tuple | list):
        parts = [_plain(item) for item in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else ""


class Adoption:
    """Knows the parameters of one sharded model, old and new, and adopts the optimizers that hold them."""

    def __init__(
        self,
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]],
        owned: Iterable[tuple[FlatShard, ShardedParam]],
    ) -> None:
        self._replaced = replaced
        self._owner: dict[int, tuple[FlatShard, ShardedParam]] = {
            id(param.sharded): (flat, param) for flat, param in owned
        }
        self._known = {id(new) for _, new in replaced.values()}
        _watch_steps(self)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchanges parameters and state in place; calling it again changes nothing.

        Raises:
            OptimizerError: see `check_optimizer`.
        """
        is_sharded = any(isinstance(new, DTensor) for _, new in self._replaced.values())
        check_optimizer(optimizer, self._replaced.keys() | self._known, is_sharded)
        for group in optimizer.param_groups:
            group["params"] = [self._new(p) for p in group["params"]]
        for old in list(optimizer.state):
            new = self._new(old) if isinstance(old, torch.Tensor) else old
            if new is not old:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {key: self._shard_state(new, value) for key, value in state.items()}
        step_over_flat_shards(optimizer, self._owner)

    def names(self, model: nn.Module) -> dict[int, str]:
        """Names of the model's parameters by id, both of those it has and of those it had."""
        names = parameter_names(model)
        return names | {old: names[id(new)] for old, (_, new) in self._replaced.items() if id(new) in names}

    def holds_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` still has parameters that ``shard()`` put others in place of."""
        return any(self._new(p) is not p for group in optimizer.param_groups for p in group["params"])

    def _new(self, param: torch.Tensor) -> torch.Tensor:
        found = self._replaced.get(id(param))
        return param if found is None else found[1]

    def _shard_state(self, param: torch.Tensor, value: Any) -> Any:
        """State of a whole parameter -> of its shard; anything of another shape is left as it is."""
        owner = self._owner.get(id(param))
        if (
            owner is None
            or not isinstance(value, torch.Tensor)
            or tuple(value.shape) != owner[1].layout.shape
        ):
            return value
        bucket, unit_param = owner
        return bucket.cut(unit_param.layout, value) if unit_param.layout.shape else value


_adoptions: weakref.WeakSet[Adoption] = weakref.WeakSet()
_is_watching = False


def _watch_steps(adoption: Adoption) -> None:
    """An optimizer built before ``shard(model)`` and never passed to it would silently train nothing."""
    global _is_watching
    _adoptions.add(adoption)
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_adopt_late)


def _adopt_late(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for adoption in list(_adoptions):
        if adoption.holds_replaced(optimizer):
            log.warning(
                "%s was built before its model was sharded and not passed to shard(); adopted at its first step. "
                "Pass it: model, optimizer = zerosharder.shard(model, optimizer)",
                type(optimizer).__name__,
            )
            adoption.adopt(optimizer)
