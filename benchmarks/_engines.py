"""What each engine does to the model and the optimizer; the training step around it is the same for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from _model import GPT
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]


class Trained:
    """A model, its optimizer, and one training step of them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False) -> None:
        self.model, self.optimizer, self.autocast = model, optimizer, autocast

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        self.backward(tokens, targets)
        return self.finish()

    def backward(self, tokens: Tensor, targets: Tensor, weight: float = 1.0) -> None:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            self.loss = self.model(tokens, targets)
        (self.loss * weight if weight != 1.0 else self.loss).backward()

    def finish(self) -> float:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.loss.item()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def plain(model: GPT, dtype: str) -> Trained:
    return Trained(model, adamw(model), autocast=dtype == "bf16")


def ddp(model: GPT, dtype: str) -> Trained:
    join()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trained(wrapped, adamw(wrapped), autocast=dtype == "bf16")


def fsdp2(model: GPT, dtype: str) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    join()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return Trained(model, adamw(model))


def zerosharder(model: GPT, dtype: str) -> Trained:
    import zerosharder as zs

    config = zs.Config(param_dtype="bf16") if dtype == "bf16" else None
    return Trained(*zs.shard(model, adamw(model), config=config))


ENGINES: dict[str, Callable[[GPT, str], Trained]] = {
    "plain": plain,  # one process on its own
    "plain_pair": plain,  # as many of them as there are ranks, side by side, without a word between them
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zerosharder": zerosharder,
}
SHARE_NOTHING = ("plain", "plain_pair")  # engines whose ranks do not talk


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def world_of(engine: str, world: int) -> int:
    """How many processes an engine runs when `world` ranks are asked for."""
    return 1 if engine == "plain" else world


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
