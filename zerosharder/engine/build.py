"""From a plan to units: flat shards, sharded parameters, leaves. The values are those of rank 0, as with DDP."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zerosharder.engine.bucket import Bucket, UnitParam
from zerosharder.engine.materialize import materialize_params
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.unit import Unit
from zerosharder.offload.memory import flat_buffer
from zerosharder.partition.layout import BucketLayout, unit_layout
from zerosharder.partition.select import ParamUse, UnitPlan


@dataclass
class Built:
    """What ``build_units`` made, and what became of the parameters the model had before."""

    units: list[Unit] = field(default_factory=list)
    # id of an old parameter -> (the old one, kept so that its id stays taken; the one in its place)
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)


def values_of_rank_0(model: nn.Module, plans: Sequence[UnitPlan], runtime: Runtime) -> frozenset[str]:
    """Names of the parameters and buffers that are not on the meta device there, so no other rank computes them."""
    tensors: dict[str, torch.Tensor] = {use.name: use.param for plan in plans for use in plan.params}
    tensors.update(model.named_buffers(remove_duplicate=False))
    real = torch.tensor([not tensor.is_meta for tensor in tensors.values()], dtype=torch.uint8)
    group = runtime.control_group
    if group is not None:
        send = functools.partial(dist.broadcast, real, group=group, group_src=0)
        runtime.guarded("distribution of the buffers", "", send)
    return frozenset(name for name, is_real in zip(tensors, real.tolist(), strict=True) if is_real)


def build_units(
    model: nn.Module, plans: list[UnitPlan], runtime: Runtime, given: Container[str] = ()
) -> Built:
    """Cuts every parameter of ``plans`` into flat shards, one unit after another.

    A rank never holds more than its shards and one whole unit of a model that was built on the meta device. Values in
    ``given`` (`values_of_rank_0`) are not computed here.
    """
    built = Built()
    for index, plan in enumerate(plans):
        before = [use.param for use in plan.params]
        materialize_params(model, plan.params, runtime.device, given)
        buckets = []
        for uses, casts in _by_cast(plan.params, runtime):
            for layout in unit_layout(_described(uses), runtime.world, _strides(uses)):
                compute_dtype = runtime.compute_dtype(layout.dtype) if casts else layout.dtype
                buckets.append(_bucket(layout, {use.name: use for use in uses}, compute_dtype, runtime))
        made = {p.name: p.sharded for bucket in buckets for p in bucket.params}
        for old, use in zip(before, plan.params, strict=True):
            built.replaced[id(old)] = (old, made[use.name])
        built.units.append(Unit(index, plan.name, plan.entries, buckets, runtime))
    return built


def flatten_resident(plans: list[UnitPlan], model: nn.Module, device: torch.device) -> Built:
    """World of one without casts: parameters stay what and where they are, as views of one buffer for each bucket."""
    built = Built()
    for plan in plans:
        before = [use.param for use in plan.params]
        materialize_params(model, plan.params, device)
        by_name = {use.name: use.param for use in plan.params}
        for layout in unit_layout(_described(plan.params), 1, _strides(plan.params)):
            flat = flat_buffer(layout.shard_numel, layout.dtype, device)
            for p in layout.params:
                param = by_name[p.name]
                local = flat[p.shard_offset : p.shard_offset + p.chunk]
                local = local.view(p.shape) if p.stride is None else local.as_strided(p.shape, p.stride)
                local.copy_(param.data)
                param.data = local
        for old, use in zip(before, plan.params, strict=True):
            built.replaced[id(old)] = (old, use.param)
    return built


def move_rest(model: nn.Module, ignored: Sequence[nn.Parameter], device: torch.device) -> None:
    """Moves what is not sharded, buffers and ignored parameters, to ``device``."""
    for tensor in (*model.buffers(), *ignored):
        tensor.data = tensor.data.to(device)


def sync_buffers(model: nn.Module, runtime: Runtime) -> None:
    """Gives every rank the buffers of rank 0."""
    group = runtime.control_group
    if group is None:
        return
    with torch.no_grad():
        for buffer in model.buffers():
            if not buffer.numel() or buffer.layout is not torch.strided:
                continue
            host = buffer.detach().cpu().contiguous()
            raw = (torch.view_as_real(host) if host.is_complex() else host).reshape(-1).view(torch.uint8)
            send = functools.partial(dist.broadcast, raw, group=group, group_src=0)
            runtime.guarded("distribution of the buffers", "", send)
            buffer.copy_(host)


def _by_cast(uses: list[ParamUse], runtime: Runtime) -> list[tuple[list[ParamUse], bool]]:
    """Parameters that are computed with in param_dtype, and those that keep their own.

    Batch norm refuses 16-bit weights beside running statistics in fp32, and buffers stay as they are.
    """
    if runtime.config.param_dtype == "fp32":
        return [(uses, False)]
    kept = {use.name for use in uses if all(isinstance(module, _BatchNorm) for module, _ in use.owners)}
    split = [u for u in uses if u.name not in kept], [u for u in uses if u.name in kept]
    return [(split[0], True), (split[1], False)]


def _described(uses: list[ParamUse]) -> list[tuple[str, torch.Size, torch.dtype, bool]]:
    return [(use.name, use.param.shape, use.param.dtype, use.param.requires_grad) for use in uses]


def _bucket(
    layout: BucketLayout, by_name: dict[str, ParamUse], compute_dtype: torch.dtype, runtime: Runtime
) -> Bucket:
    uses = [by_name[p.name] for p in layout.params]
    flat = flat_buffer(layout.shard_numel, layout.dtype, runtime.device)
    _fill(flat, layout, uses, runtime)
    bucket = Bucket(layout, flat, [], runtime, compute_dtype)
    bucket.params = [_unit_param(bucket, use, runtime) for use in uses]
    return bucket


def _fill(flat: torch.Tensor, layout: BucketLayout, uses: list[ParamUse], runtime: Runtime) -> None:
    """Writes this rank's rows of the whole parameters of rank 0 into ``flat``."""
    group = runtime.control_group
    rank = group.rank() if group is not None else 0
    if rank != 0:
        assert group is not None
        host = torch.empty(layout.shard_numel, dtype=layout.dtype)
        received = group.recv([host.view(torch.uint8)], 0, 0)
        runtime.guarded("distribution of the weights", uses[0].name, received.wait)
        flat.copy_(host)
        return
    with torch.no_grad():
        _write_rows(flat, layout, uses, runtime.rank)
        for peer in range(1, group.size() if group is not None else 1):
            assert group is not None
            host = torch.zeros(layout.shard_numel, dtype=layout.dtype)
            _write_rows(host, layout, uses, runtime.shard_ranks[peer])
            sent = group.send([host.view(torch.uint8)], peer, 0)
            runtime.guarded("distribution of the weights", uses[0].name, sent.wait)


def _write_rows(flat: torch.Tensor, layout: BucketLayout, uses: list[ParamUse], rank: int) -> None:
    for p, use in zip(layout.params, uses, strict=True):
        n = p.valid[rank]
        if p.replicated:
            flat[p.shard_offset : p.shard_offset + n].copy_(use.param.data.reshape(-1))
        elif n:
            rows = use.param.data[p.first_row(rank) : p.first_row(rank) + p.rows_of(rank)]
            flat[p.shard_offset : p.shard_offset + n].copy_(rows.reshape(-1))


def _strides(uses: Sequence[ParamUse]) -> dict[str, tuple[int, ...]]:
    """Strides of the parameters whose memory is dense but not in row order."""
    odd = {use.name: use.param.data for use in uses if not use.param.is_contiguous()}
    # Like-allocation keeps strides exactly where they are dense and do not overlap.
    return {
        name: data.stride() for name, data in odd.items() if torch.empty_like(data).stride() == data.stride()
    }


def _unit_param(bucket: Bucket, use: ParamUse, runtime: Runtime) -> UnitParam:
    layout = next(p for p in bucket.layout.params if p.name == use.name)
    old = use.param
    local = bucket.as_sharded(bucket.flat, layout)
    if runtime.mesh is None:
        sharded = old
        sharded.data = local
    else:
        sharded = nn.Parameter(local, requires_grad=old.requires_grad)
        sharded.__dict__.update(old.__dict__)
        # Whoever kept the old parameter keeps a name, not the memory.
        old.data = old.data.new_empty(0)
    leaf = nn.Parameter(_placeholder(layout.shape, bucket.compute_dtype, runtime.device), requires_grad=False)
    leaf.requires_grad_(old.requires_grad)
    leaf.__dict__.update(old.__dict__)
    if sharded is not old:
        _keep_hooks(old, sharded, leaf)
    param = UnitParam(use, layout, sharded, leaf)
    param.install(sharded)
    use.param = sharded
    return param


def _keep_hooks(old: nn.Parameter, sharded: nn.Parameter, leaf: nn.Parameter) -> None:
    """Hooks on the gradient see it whole, before it is reduced; hooks after accumulation see the sharded parameter."""
    for hook in (old._backward_hooks or {}).values():
        leaf.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``shape`` that takes one element of memory and reads NaN (integers: the lowest)."""
    floating = dtype.is_floating_point or dtype.is_complex
    lowest = False if dtype is torch.bool else torch.iinfo(dtype).min if not floating else float("nan")
    return torch.full((1,), lowest, dtype=dtype, device=device).as_strided(shape, (0,) * len(shape))
