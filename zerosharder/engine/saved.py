"""Weights that autograd saves for the backward, while the memory they lie in is lent to other units.

An operation such as ``x @ w.t()`` saves a view of the gathered weight. Keeping that view would keep the slot; so the
hooks below save where the view lies (unit, offset, shape, stride) and rebuild it in the backward on the slot of the
moment, gathering the unit if nothing else did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from zerosharder.errors import StateError

if TYPE_CHECKING:
    from zerosharder.engine.engine import Engine
    from zerosharder.engine.tape import Call
    from zerosharder.engine.unit import Unit


class SavedView(NamedTuple):
    """Stands for a view of a gathered buffer on the autograd graph."""

    unit: Unit
    call: Call | None  # the use of the unit that saved it; None in a recomputation
    version: int  # of the unit's shards, to notice an optimizer step between forward and backward
    bucket: int
    offset: int  # elements into the bucket's gathered buffer
    size: torch.Size
    stride: tuple[int, ...]


class SavedWeights:
    """The pair of saved-tensor hooks of one engine, active from an outermost call to its return."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_address: dict[int, Unit] = {}  # slot address -> the unit gathered there
        self._active = False

    def gathered(self, unit: Unit) -> None:
        """``unit`` lies in a slot from now on."""
        self._by_address[unit.storage_key()] = unit

    def freed(self, unit: Unit) -> None:
        """``unit`` is about to give its slot back."""
        self._by_address.pop(unit.storage_key(), None)

    def push(self) -> None:
        """Activates the hooks, unless somebody else's are active.

        Only the innermost hooks run. Pushing ours inside another pair (a checkpoint around the whole model, a
        save_on_cpu) would silence them; theirs then hold views of the slot, which rests until they let go.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._active = True

    def pop(self) -> None:
        """Deactivates the hooks if ``push`` activated them."""
        if self._active:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._active = False

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        unit, place = None, None
        if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            unit = self._by_address.get(tensor.untyped_storage().data_ptr())
            place = unit.locate(tensor) if unit is not None else None
        if unit is None or place is None:
            # Not the tensor itself: an operation that saves its own output would keep its graph alive for ever.
            return tensor if tensor.is_leaf else tensor.detach()
        return SavedView(
            unit, self._engine.call_of(unit), unit.version, *place, tensor.size(), tensor.stride()
        )

    def _unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        if not isinstance(saved, SavedView):
            return saved
        self._engine.backward.needs(saved.unit, saved.call)
        if saved.unit.version != saved.version:
            raise StateError(
                f"weights of unit {saved.unit.name or '(root)'!r} were modified between the forward that saved them "
                "and this backward (an optimizer step, a load, an in-place write); run the backward first"
            )
        return saved.unit.rebuild(saved.bucket, saved.offset, saved.size, saved.stride)
