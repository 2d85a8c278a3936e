"""Shards a tiny model, trains three steps, and compares with the same steps unsharded.

python smoke.py
torchrun --nproc-per-node 2 smoke.py
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn as nn

import zerosharder as zs

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 16), *blocks, nn.Linear(16, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the losses. Every rank sees the same batches, so the mean gradient is that of one process."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 5, generator=generator)  # [batch, features]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    model = build()
    reference = copy.deepcopy(model)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zs.shard(model, optimizer)
    losses = train(model, optimizer)

    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    if losses[-1] >= losses[0]:
        raise SystemExit(f"the loss does not fall: {losses}")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1 or dist.get_rank() == 0:
        print(f"smoke: {STEPS} steps, world of {world}, losses {', '.join(f'{x:.4f}' for x in losses)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
