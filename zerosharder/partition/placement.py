"""The two sides of a sharded tensor: the DTensor everybody sees and the rows this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor this rank holds of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
