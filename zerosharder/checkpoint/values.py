"""Values of a checkpoint that are no tensors, as JSON; tensors nested in them are taken out and numbered.

JSON keeps neither tuples nor keys that are not text, so these are marked. Anything it cannot hold is refused by name:
loading must never have to run code that a file names, as unpickling does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerosharder.errors import CheckpointError

_MARK = "__zs__"


def encode(value: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    """``value`` as what ``json`` can write; its tensors are appended to ``tensors``.

    Args:
        value: None, bool, int, float, str, bytes, dtype, tensor, or a list, tuple, set, dict of such.
        name: where it comes from, for messages.
        tensors: gets the tensors, on whatever device they are.

    Raises:
        CheckpointError: something else, or a tensor that is spread over ranks.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            raise CheckpointError(f"{name} is a DTensor: only the model's and the optimizer's may be sharded")
        tensors.append(value.detach())
        return {_MARK: "tensor", "number": len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {_MARK: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "hex": value.hex()}
    if isinstance(value, Mapping):
        items = [
            [encode(key, f"a key of {name}", tensors), encode(item, f"{name}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        if all(isinstance(key, str) and key != _MARK for key in value) and not isinstance(value, Counter):
            return dict(items)
        return {_MARK: "counter" if isinstance(value, Counter) else "dict", "items": items}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, f"{name}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: _sequence(value), "items": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{name} is a {kind}, which a checkpoint cannot hold: give numbers, text, tensors, and lists, tuples, sets "
        "and dicts of them, or an object with state_dict() and load_state_dict()"
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointError: a mark that this version does not know.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(_MARK)
    if mark is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if mark == "tensor":
        return tensors[value["number"]]
    if mark == "bytes":
        return bytes.fromhex(value["hex"])
    if mark == "dtype":
        dtype = getattr(torch, value["name"], None)
        if isinstance(dtype, torch.dtype):
            return dtype
    items = decode(value.get("items", []), tensors)
    if mark in ("dict", "counter"):
        return dict(items) if mark == "dict" else Counter(dict(items))
    if mark in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[mark](items)
    raise CheckpointError(f"the manifest holds a value of a kind {mark!r}, which this version does not know")


def _sequence(value: object) -> str:
    return "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
