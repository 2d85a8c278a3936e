"""Finding and casting tensors inside whatever a forward takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# Outputs nest: a dataclass of tuples of tensors. Deeper than this lie objects that are not outputs.
MAX_DEPTH = 6


def find_tensors(value: object, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``: containers, dataclasses, and objects with plain attributes are looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from find_tensors(item, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from find_tensors(getattr(value, each.name, None), depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        for item in vars(value).values():
            yield from find_tensors(item, depth - 1)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``; known containers only."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
