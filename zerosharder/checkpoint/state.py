"""What a model and its optimizer hold, by name, as boxes of whole tensors; and the way back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zerosharder.checkpoint.values import decode, encode
from zerosharder.errors import CheckpointError
from zerosharder.optim.shards import local_of

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes within the whole tensor


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    local: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's own if it is whole."""
        offsets, sizes = self.box
        return self.name if sizes == self.shape else f"{self.name}@{','.join(map(str, offsets))}"


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """The part of ``tensor`` that this rank holds; all of it unless it is a DTensor."""
    shape = tuple(tensor.shape)
    box: Box = ((0,) * len(shape), shape)
    if isinstance(tensor, DTensor):
        if any(p.is_partial() for p in tensor.placements):
            raise CheckpointError(f"{name} is a DTensor of partial sums, which cannot be saved")
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        box = (tuple(offsets), tuple(sizes))
    with torch.no_grad():
        return Piece(name, tensor.dtype, shape, box, local_of(tensor.detach()))


def is_writer(tensor: torch.Tensor, is_first: bool) -> bool:
    """Whether this rank is the one of those that hold this part which writes it."""
    if not isinstance(tensor, DTensor):
        return is_first
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        at == 0 for at, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate)
    )


@dataclass
class ModelState:
    """Tensors of a model by the name of their first use; other names of the same tensor; what is no tensor."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    values: dict[str, Any]


def model_state(model: nn.Module) -> ModelState:
    """What ``model.state_dict()`` holds, tied parameters once."""
    first: dict[int, str] = {}
    state = ModelState({}, {}, {})
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            state.values[name] = value
        elif id(value) in first:
            state.aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            state.tensors[name] = value
    return state


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """State by name of the parameter.

    Returns:
        Tensors by ``parameter/key``; the rest as JSON: the groups and, of each parameter, its keys; the tensors that
        are nested in the rest.
    """
    tensors: dict[str, torch.Tensor] = {}
    nested: list[torch.Tensor] = []
    groups, states = [], {}
    for number, group in enumerate(optimizer.param_groups):
        members = [_name_of(p, names) for p in group["params"]]
        settings = {
            key: encode(value, f"{key!r} of parameter group {number}", nested)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({"params": members, "settings": settings})
        for name, param in zip(members, group["params"], strict=True):
            entries: dict[str, Any] = {}
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                        raise CheckpointError(
                            f"optimizer state {key!r} of {name} is a plain tensor of shape {tuple(value.shape)} "
                            "beside a sharded parameter: whether the ranks hold the same or parts is not known"
                        )
                    tensors[f"{name}/{key}"] = value
                    entries[key] = None
                else:
                    entries[key] = {"value": encode(value, f"optimizer state {key!r} of {name}", nested)}
            states[name] = entries
    return tensors, {"groups": groups, "state": states}, nested


def restore_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Any, nested: list[torch.Tensor]
) -> None:
    """Brings the settings back into the groups that are there; the dicts stay, so schedulers keep what they hold."""
    by_name = {name: entry["settings"] for entry in saved for name in entry["params"]}
    for number, group in enumerate(optimizer.param_groups):
        members = [_name_of(p, names) for p in group["params"]]
        absent = next((name for name in members if name not in by_name), None)
        if absent is not None:
            raise CheckpointError(f"the checkpoint has no optimizer settings of parameter {absent!r}")
        if any(by_name[name] != by_name[members[0]] for name in members):
            raise CheckpointError(
                f"parameter group {number} joins parameters that had different settings when they were saved"
            )
        for key, value in decode(by_name[members[0]], nested).items() if members else ():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)
            else:
                group[key] = value.clone() if isinstance(value, torch.Tensor) else value


def room_for(
    optimizer: torch.optim.Optimizer,
    param: torch.Tensor,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The tensor of ``param``'s state to read ``key`` into: the one it has if it fits, or a new one."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    state = optimizer.state[param]
    current = state.get(key)
    if isinstance(current, torch.Tensor) and tuple(current.shape) == shape and current.dtype == dtype:
        return current
    if shape == tuple(param.shape) and shape:
        made = torch.empty_like(param, dtype=dtype, requires_grad=False)
    else:
        local = local_of(param.detach())
        on_device = group.get("fused") or group.get("capturable") or key != "step"
        made = torch.empty(shape, dtype=dtype, device=local.device if on_device else "cpu")
    state[key] = made
    return made


def _name_of(param: torch.Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(param))
    if name is None:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not the model's, so it has no "
            "name to be saved under"
        )
    return name
