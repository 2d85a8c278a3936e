"""One bucket of a unit: the flat shard, its parameters in all their forms, and its gradients.

[Note: the forms of a parameter]
* *sharded*: what the user and the optimizer see. A ``DTensor`` with ``Shard(0)`` (world of one: the plain
  parameter) whose local tensor is a view of the flat shard.
* *leaf*: what the forward computes with and autograd accumulates into: an ``nn.Parameter`` of the full shape in
  the compute dtype. Its data is a view of a slot while the unit is gathered, and a NaN placeholder otherwise.
* *grad*: ``sharded.grad``, a view of the flat gradient, which has the layout of the flat shard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerosharder.engine.collectives import GatherPart, ReducePart
from zerosharder.engine.compiler import uncompiled
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.slots import Slot
from zerosharder.offload.memory import flat_buffer
from zerosharder.optim.shards import local_of
from zerosharder.partition.layout import BucketLayout, ParamLayout
from zerosharder.partition.select import ParamUse


def _own_references() -> int:
    """What getrefcount says of an object that only a list holds, asked from inside a loop over that list."""
    return max(sys.getrefcount(item) for item in [object()])


_OWN_REFERENCES = _own_references()


class UnitParam:
    """One parameter in its three forms, see [Note: the forms of a parameter]."""

    __slots__ = ("layout", "leaf", "local_sum", "name", "owners", "placeholder", "sharded", "slow_owners")

    def __init__(self, use: ParamUse, layout: ParamLayout, sharded: nn.Parameter, leaf: nn.Parameter) -> None:
        self.name = use.name
        self.layout = layout
        self.sharded = sharded
        self.leaf = leaf
        self.placeholder = leaf.data
        # Unreduced gradients of earlier backwards (no_sync), in fp32 where autograd makes 16-bit ones.
        self.local_sum: torch.Tensor | None = None
        plain = nn.Module.__setattr__
        # Modules with a __setattr__ of their own (nn.LSTM keeps a list of its weights) must see every exchange.
        self.owners = [(m, attr) for m, attr in use.owners if type(m).__setattr__ is plain]
        self.slow_owners = [(m, attr) for m, attr in use.owners if type(m).__setattr__ is not plain]

    @property
    def has_local_grad(self) -> bool:
        """Whether a whole, unreduced gradient of this rank is waiting."""
        return self.leaf.grad is not None or self.local_sum is not None

    @property
    def is_installed_whole(self) -> bool:
        """Whether the owning modules show the leaf now."""
        module, attr = (self.owners or self.slow_owners)[0]
        return dict.__getitem__(module._parameters, attr) is self.leaf

    def install(self, param: nn.Parameter) -> None:
        """Makes ``param`` (one of the forms) what the owning modules read."""
        for module, attr in self.owners:
            module._parameters[attr] = param
        for module, attr in self.slow_owners:
            setattr(module, attr, param)

    def take_local_grad(self) -> torch.Tensor | None:
        """The whole gradient of this rank, 1-D, and forgets it; None if there is none."""
        grad, self.leaf.grad = self.leaf.grad, None
        if grad is not None and grad.layout != torch.strided:
            grad = grad.to_dense()
        if self.local_sum is not None:
            if grad is not None:
                self.local_sum.add_(grad)
            grad, self.local_sum = self.local_sum, None
        return None if grad is None else grad.reshape(-1)


@dataclass
class _SlotViews:
    """Everything of a bucket's gathered form that is a view of one slot."""

    full: torch.Tensor  # 1-D, the whole gathered buffer
    leaves: list[torch.Tensor]
    parts: list[GatherPart]
    own: list[torch.Tensor]  # where this rank's chunks go before they are sent
    unpacked: list[torch.Tensor]  # where packed chunks are read
    packed: list[torch.Tensor]  # and where they arrive


@dataclass
class Reduction:
    """A bucket's reduction under way: its parts and where their means go."""

    parts: list[ReducePart]
    wire_dtype: torch.dtype
    target: torch.Tensor  # 1-D, layout of the flat gradient
    packed: Slot  # what is sent of the small gradients; free once it is sent
    staging: Slot | None  # where target lies, unless it is the flat gradient itself


class Bucket:
    """See the module docstring. Made by ``build_bucket`` (engine/build.py)."""

    def __init__(
        self,
        layout: BucketLayout,
        flat: torch.Tensor,
        params: list[UnitParam],
        runtime: Runtime,
        compute_dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.flat = flat  # 1-D [shard_numel], the master weights
        self.params = params
        self.compute_dtype = compute_dtype
        self._runtime = runtime
        by_offset = sorted(layout.params, key=lambda p: (p.shard_offset, p.name))
        self._positions = {p.name: position for position, p in enumerate(by_offset)}
        self._grad: torch.Tensor | None = None  # 1-D [shard_numel + one mask element for each parameter]
        self._grads: list[torch.Tensor] = []  # what sharded.grad is set to
        self._kept_local = False  # gradients of an earlier backward may be waiting in local sums

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered buffer in a slot, a whole number of pages."""
        return -(-self.layout.full_numel * self.compute_dtype.itemsize // 4096) * 4096

    @property
    def rank(self) -> int:
        """This rank within the shard group."""
        return self._runtime.rank

    @property
    def flat_grad(self) -> torch.Tensor:
        """The flat gradient, 1-D [shard_numel], layout of the flat shard."""
        assert self._grad is not None
        return self._grad[: self.layout.shard_numel]

    def holds_grad(self, layout: ParamLayout, grad: torch.Tensor) -> bool:
        """Whether ``grad`` lies in the flat gradient where this parameter's belongs."""
        if self._grad is None:
            return False
        local = local_of(grad)
        at = self._grad.data_ptr() + layout.shard_offset * self._grad.element_size()
        return not local.numel() or (local.data_ptr() == at and local.dtype == self._grad.dtype)

    def take_grad(self, layout: ParamLayout, grad: torch.Tensor) -> None:
        """Copies a gradient that the user assigned to where the step over the flat shard reads it."""
        if self._grad is None:
            self._make_grads(self.layout.shard_numel + len(self.params))
        local_of(self.as_sharded(self.flat_grad, layout)).copy_(local_of(grad))

    def position(self, layout: ParamLayout) -> int:
        """How many parameters lie before this one in the flat shard."""
        return self._positions[layout.name]

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the flat gradient, 0 before the first backward."""
        return 0 if self._grad is None else self._grad.numel() * self._grad.element_size()

    @property
    def wants_grad(self) -> bool:
        """Whether any parameter is trained now."""
        return any(p.sharded.requires_grad for p in self.params)

    # ---- gather

    def fill_own(self, views: _SlotViews) -> None:
        """Copies this rank's chunks (cast to the compute dtype) to where they are sent from and read."""
        if views.own:  # empty where all parameters are
            torch._foreach_copy_(views.own, self._own_sources())

    def make_views(self, raw: torch.Tensor) -> _SlotViews:
        """Views of ``raw``, uint8 [gathered_nbytes]; see partition/layout.py for the offsets."""
        lay, rank, world = self.layout, self._runtime.rank, self._runtime.world
        full = raw.view(self.compute_dtype)
        views = _SlotViews(full, [], [], [], [], [])
        for p in (param.layout for param in self.params):
            whole = full[p.full_offset : p.full_offset + p.numel]
            leaf = whole.view(p.shape) if p.stride is None else whole.as_strided(p.shape, p.stride)
            views.leaves.append(leaf)
            if p.direct:
                region = full[p.full_offset : p.full_offset + p.chunk * world]
                views.parts.append(GatherPart(region, p.chunk, p.valid))
                start = rank * p.chunk
                views.own.append(region[start : start + p.valid[rank]])
                continue
            for r in (rank,) if p.replicated else range(world):
                if not p.valid[r]:
                    continue
                source = lay.pack_full_offset + r * lay.pack_numel + p.shard_offset - lay.pack_shard_offset
                rows = leaf if p.replicated else leaf[p.first_row(r) : p.first_row(r) + p.rows_of(r)]
                views.unpacked.append(rows)
                views.packed.append(full[source : source + p.valid[r]].view(rows.shape))
        if lay.pack_numel:
            area = full[lay.pack_full_offset : lay.pack_full_offset + lay.pack_numel * world]
            views.parts.append(GatherPart(area, lay.pack_numel, (lay.pack_numel,) * world))
            views.own.append(area[rank * lay.pack_numel : (rank + 1) * lay.pack_numel])
        return views

    def _own_sources(self) -> list[torch.Tensor]:
        lay, rank = self.layout, self._runtime.rank
        flat = self.flat
        sources = [flat[p.shard_offset : p.shard_offset + p.valid[rank]] for p in lay.params if p.direct]
        if lay.pack_numel:
            sources.append(flat[lay.pack_shard_offset : lay.pack_shard_offset + lay.pack_numel])
        return sources

    def write_back(self, views: _SlotViews) -> None:
        """Takes this rank's rows back from the gathered form (after ``full_params(write=True)``)."""
        rank = self._runtime.rank
        for param, leaf in zip(self.params, views.leaves, strict=True):
            p = param.layout
            start = p.start_of(rank)
            rows = leaf.reshape(-1)[start : start + p.valid[rank]]
            self.flat[p.shard_offset : p.shard_offset + p.valid[rank]].copy_(rows)

    # ---- reduce

    def keep_local(self) -> None:
        """After a backward without reduction: moves 16-bit gradients into sums of the reduce dtype."""
        self._kept_local = True
        for p in self.params:
            grad = p.leaf.grad
            if grad is None or grad.dtype.itemsize >= 4:
                continue
            if p.local_sum is None:
                p.local_sum = grad.float()
            else:
                p.local_sum.add_(grad)
            p.leaf.grad = None

    def start_reduction(self) -> Reduction:
        """Takes the leaves' gradients and lays out their reduction."""
        found = [p.take_local_grad() for p in self.params]
        # The same on every rank, whichever parameters got a gradient on this one.
        summed, self._kept_local = self._kept_local, False
        made = torch.float32 if summed and self.compute_dtype.itemsize < 4 else self.compute_dtype
        wire = self._runtime.wire_dtype(made)
        target, staging = self._target()
        parts = []
        for param, grad in zip(self.params, found, strict=True):
            p = param.layout
            if p.direct:
                out = target[p.shard_offset : p.shard_offset + p.chunk]
                parts.append(ReducePart(None if grad is None else grad.to(wire), p.chunk, p.valid, out))
        packed, area = self._pack(found, wire)
        width = area.numel() // self.layout.world
        out = target[self.layout.pack_shard_offset : self.layout.pack_shard_offset + width]
        parts.append(ReducePart(area, width, (width,) * self.layout.world, out))
        return Reduction(parts, wire, target, packed, staging)

    def _pack(self, found: list[torch.Tensor | None], wire: torch.dtype) -> tuple[Slot, torch.Tensor]:
        """Packs small gradients and, for every parameter, whether it has one.

        Returns a slot and a tensor in it, 1-D [world * (pack_numel + params)]: one row for each rank it goes to.
        """
        lay, world = self.layout, self.layout.world
        width = lay.pack_numel + len(self.params)
        slot = self._runtime.pool.acquire(world * width * wire.itemsize)
        area = slot.tensor.view(wire)[: world * width].zero_()
        into, what = [], []
        for param, grad in zip(self.params, found, strict=True):
            p = param.layout
            if p.direct or grad is None:
                continue
            for r in range(world):
                at = r * width + p.shard_offset - lay.pack_shard_offset
                start = p.start_of(r)
                into.append(area[at : at + p.valid[r]])
                what.append(grad[start : start + p.valid[r]])
        if into:
            torch._foreach_copy_(into, what)
        mask = torch.tensor([0.0 if g is None else 1.0 for g in found], dtype=wire)
        area.view(world, width)[:, lay.pack_numel :] = mask.to(area.device)
        return slot, area

    def _target(self) -> tuple[torch.Tensor, Slot | None]:
        """Where the means go: the flat gradient if nothing is in it and nobody looks at it, else staging."""
        lay = self.layout
        length = lay.shard_numel + len(self.params)
        wide = lay.dtype.itemsize >= 4
        if wide and all(p.sharded.grad is None for p in self.params):
            if self._grad is None or self._is_grad_held():
                self._make_grads(length)
            assert self._grad is not None
            return self._grad, None
        dtype = lay.dtype if wide else torch.float32
        slot = self._runtime.pool.acquire(length * dtype.itemsize)
        return slot.tensor.view(dtype)[:length], slot

    def finish_reduction(self, reduction: Reduction) -> Iterator[UnitParam]:
        """Sets or adds to ``sharded.grad``; yields the parameters that got a gradient on any rank."""
        lay = self.layout
        mask = reduction.target[lay.shard_numel : lay.shard_numel + len(self.params)].tolist()
        if reduction.staging is not None and self._grad is None:
            self._make_grads(lay.shard_numel + len(self.params))
        for param, grad, used in zip(self.params, self._grads, mask, strict=True):
            sharded = param.sharded
            if not used or not sharded.requires_grad:
                continue
            if reduction.staging is not None:
                p = param.layout
                n = p.valid[self._runtime.rank]
                mean = reduction.target[p.shard_offset : p.shard_offset + n].view(
                    p.local_shape(self._runtime.rank)
                )
                if sharded.grad is not None:
                    local_of(sharded.grad).add_(mean)
                    yield param
                    continue
                local_of(grad).copy_(mean)
            sharded.grad = grad
            yield param
        if reduction.staging is not None:
            self._runtime.pool.release(reduction.staging)

    def _is_grad_held(self) -> bool:
        """Whether the user kept a ``.grad`` of an earlier step, which must not change under their hands."""
        return any(sys.getrefcount(grad) > _OWN_REFERENCES for grad in self._grads)

    def _make_grads(self, length: int) -> None:
        lay, runtime = self.layout, self._runtime
        self._grad = flat_buffer(length, lay.dtype, runtime.device)
        self._grads = [self.as_sharded(self._grad, p.layout) for p in self.params]

    def cut(self, layout: ParamLayout, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``whole`` (any dtype, shape of the parameter), as a sharded form of their own."""
        flat = torch.zeros(self.layout.shard_numel, dtype=whole.dtype, device=self._runtime.device)
        sharded = self.as_sharded(flat, layout)
        first, rows = layout.first_row(self.rank), layout.rows_of(self.rank)
        local_of(sharded).copy_(whole if layout.replicated else whole[first : first + rows])
        return sharded.detach().clone()

    def as_sharded(self, flat: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
        """The view of ``flat`` (layout of the flat shard) that belongs to a parameter, as its sharded form."""
        runtime = self._runtime
        n = layout.valid[runtime.rank]
        local = flat[layout.shard_offset : layout.shard_offset + n].view(layout.local_shape(runtime.rank))
        if runtime.mesh is None:
            return local
        local = _with_own_storage(local)
        placements = runtime.replicated if layout.replicated else runtime.placements
        whole = torch.empty(layout.shape, device="meta")
        with uncompiled():
            return DTensor.from_local(
                local, runtime.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Gives ``view`` a storage that starts where it starts, over the same memory, with the same version counter.

    torch gives a DTensor the storage offset of its local tensor, and takes one with an offset for a tensor that has
    memory itself: deepcopy and torch.save of it would fail. It also makes torch.save write these bytes only.
    """
    if not view.storage_offset():
        return view
    if not view.numel():
        view.data = view.new_empty(view.shape)
        return view
    raw = view.reshape(-1).view(torch.uint8)
    if view.device.type == "cpu":
        alias = torch.frombuffer(raw.numpy(), dtype=view.dtype)  # holds the array, which holds the tensor
    else:
        alias = torch.as_tensor(_CudaBytes(raw), device=view.device).view(view.dtype)
    view.data = alias.view(view.shape)
    return view


class _CudaBytes:
    """Memory of ``raw`` (uint8, on CUDA) for ``torch.as_tensor``, which keeps this object and so the memory."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        self.__cuda_array_interface__ = raw.__cuda_array_interface__
