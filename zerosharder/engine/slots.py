"""A pool of persistent, page-aligned slots that gathered units, staging and gradients in flight lie in.

Fresh memory is expensive on a CPU (2 to 4 GB/s for a first touch in 4 KiB pages, against 13 to 23 GB/s in huge
pages and more for memory that is already there), and freeing it leaves the heap grown. A slot is made once and
used for unit after unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from zerosharder.offload.memory import host_buffer

T = TypeVar("T")

# A free slot serves a smaller unit if no more than this share of it stays unused: pages once touched stay, so
# lending a large slot to a small unit would only make the next large unit allocate another one.
MAX_OVERSIZE = 1.25
GRANULE = 4096


class Slot:
    """One persistent buffer. ``tensor`` is its whole extent as bytes.

    [Note: outside references] A slot is handed on only when nobody else refers to its storage: a custom autograd
    function, a user's saved-tensor hook or a returned parameter may keep a view of a gathered weight on its own.
    ``baseline`` counts the references that are ours (the tensor, the storage handle, cached views); more than that
    and the slot rests, which costs memory, never correctness.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.tensor = _allocate(nbytes, device)
        self._storage = self.tensor.untyped_storage()
        self._views: dict[object, object] = {}
        self._baseline = self._references()
        # On CUDA: the last use of the slot on the compute stream; the next gather waits for it before it writes.
        self.last_use: torch.cuda.Event | None = None

    def views(self, key: object, make: Callable[[torch.Tensor], T]) -> T:
        """What ``make(tensor)`` returned for ``key``, made once; views in it stay, and count as ours."""
        if key not in self._views:
            before = self._references()
            self._views[key] = make(self.tensor)
            self._baseline += self._references() - before
        return cast("T", self._views[key])

    @property
    def is_referenced(self) -> bool:
        """Whether somebody outside refers to the storage, see [Note: outside references]."""
        return self._references() > self._baseline

    def _references(self) -> int:
        # A storage has one Python handle, shared by everybody who asks for it: its own references count too.
        return torch._C._storage_Use_Count(self._storage._cdata) + sys.getrefcount(self._storage)


class SlotPool:
    """Slots by size; ``acquire`` and ``release`` are the only traffic."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Slot] = []
        self.nbytes = 0  # of all slots that exist
        self.peak = 0  # highest value of nbytes
        self.in_use = 0  # of the slots that are handed out

    def acquire(self, nbytes: int) -> Slot:
        """A slot of at least ``nbytes``: the smallest free one that fits, else a new one."""
        nbytes = max(GRANULE, -(-nbytes // GRANULE) * GRANULE)
        best: Slot | None = None
        for slot in self._free:
            fits = nbytes <= slot.nbytes <= nbytes * MAX_OVERSIZE
            if fits and (best is None or slot.nbytes < best.nbytes) and not slot.is_referenced:
                best = slot
        if best is None:
            best = Slot(nbytes, self.device)
            self.nbytes += best.nbytes
            self.peak = max(self.peak, self.nbytes)
        else:
            self._free.remove(best)
        self.in_use += best.nbytes
        return best

    def release(self, slot: Slot) -> None:
        """Gives ``slot`` back; it is lent again once nobody refers to it."""
        self.in_use -= slot.nbytes
        self._free.append(slot)

    def trim(self) -> None:
        """Drops every free slot that nobody refers to."""
        kept = [slot for slot in self._free if slot.is_referenced]
        self.nbytes -= sum(slot.nbytes for slot in self._free) - sum(slot.nbytes for slot in kept)
        self._free = kept


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return host_buffer(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
