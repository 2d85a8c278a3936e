"""Turns the counters and buffers of an engine into the snapshot that ``zs.stats`` returns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zerosharder.engine.engine import Engine
from zerosharder.observe.counters import Stats


def snapshot(model: nn.Module, engine: Engine) -> Stats:
    """Counters of this rank and bytes by tier and role. Roles: shards, gradients, gathered."""
    runtime, counters = engine.runtime, engine.runtime.counters
    tier = "device" if runtime.device.type == "cuda" else "host"
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    if buckets:
        shards = sum(b.flat.numel() * b.flat.element_size() for b in buckets)
        gradients = sum(b.grad_nbytes for b in buckets)
        parameters = sum(p.layout.numel for b in buckets for p in b.params)
    else:  # world of one: parameters and gradients are torch's own
        shards = sum(_nbytes(p) for p in model.parameters())
        gradients = sum(_nbytes(p.grad) for p in model.parameters() if p.grad is not None)
        parameters = sum(p.numel() for p in model.parameters())
    current = {"shards": shards, "gradients": gradients, "gathered": runtime.pool.in_use}
    peak = {"shards": shards, "gradients": gradients, "gathered": runtime.pool.peak}
    return Stats(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world=runtime.world,
        units=max(1, len(engine.units)),
        parameters=parameters,
        gathers=counters.gathers,
        prefetched=counters.prefetched,
        reduces=counters.reduces,
        frees=counters.frees,
        deviations=counters.deviations,
        passes=counters.passes,
        backwards=counters.backwards,
        bytes_received={"gather": counters.gather_bytes, "reduce": counters.reduce_bytes},
        exposed_seconds={"gather": counters.exposed_gather, "reduce": counters.exposed_reduce},
        current_bytes={tier: current},
        peak_bytes={tier: peak},
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
