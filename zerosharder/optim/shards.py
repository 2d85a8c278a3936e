"""What a step over flat shards needs to know of them; the engine's buckets and parameters fit these descriptions."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerosharder.partition.layout import BucketLayout, ParamLayout


class ShardedParam(Protocol):
    """One parameter of a flat shard."""

    layout: ParamLayout
    sharded: nn.Parameter  # what the optimizer holds


class FlatShard(Protocol):
    """This rank's rows of several parameters, one after another, and their gradients in the same layout."""

    layout: BucketLayout
    flat: torch.Tensor  # 1-D [shard_numel], the master weights

    @property
    def rank(self) -> int:
        """This rank within the shard group."""

    @property
    def flat_grad(self) -> torch.Tensor:
        """The flat gradient, 1-D [shard_numel]."""

    def position(self, layout: ParamLayout) -> int:
        """How many parameters lie before this one."""

    def holds_grad(self, layout: ParamLayout, grad: torch.Tensor) -> bool:
        """Whether ``grad`` lies in the flat gradient where this parameter's belongs."""

    def take_grad(self, layout: ParamLayout, grad: torch.Tensor) -> None:
        """Copies a gradient there that lies elsewhere."""

    def as_sharded(self, flat: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
        """The view of ``flat`` that belongs to a parameter, in its sharded form."""

    def cut(self, layout: ParamLayout, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``whole``, in a sharded form of their own."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor this rank holds of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
