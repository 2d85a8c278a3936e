"""Tiny models, batches and training loops that the tests of sharded training share.

Everything is deterministic from its arguments: no dropout, batches drawn from (step, rank, micro batch).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

VOCAB = 24
LENGTH = 8
ROWS = 2  # sequences of a batch


class Block(nn.Module):
    """Pre-norm attention and MLP. At width 64 the MLP's matrices are sent in place at W=2, the rest is packed."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [rows, length, width]
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits [rows, length, vocab] of tokens [rows, length].

    checkpoint: None, "reentrant" or "plain" (not reentrant): blocks are recomputed in the backward.
    shared: one block, called `depth` times (as in ALBERT).
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 3,
        vocab: int = VOCAB,
        *,
        tied: bool = False,
        checkpoint: str | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(1 if shared else depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoint = checkpoint
        self.depth = depth

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in range(self.depth):
            block = self.blocks[layer % len(self.blocks)]
            if self.checkpoint is not None and torch.is_grad_enabled():
                reentrant = self.checkpoint == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
        return self.head(self.norm(x))


def gpt(**settings: Any) -> GPT:
    """A GPT with the same weights every time."""
    torch.manual_seed(7)
    return GPT(**settings)


class Layer(nn.Module):
    """Linear and a nonlinearity, the smallest module that is a unit of its own in a list."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class MLP(nn.Module):
    """[..., width] -> [..., width]: `depth` layers, each a unit, and a projection in the root."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.project(x)


def mlp(width: int = 8, depth: int = 3) -> MLP:
    """An MLP with the same weights every time."""
    torch.manual_seed(7)
    return MLP(width, depth)


# -- data and steps --


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tokens(step: int, micro: int = 0, of: int | None = None, vocab: int = VOCAB) -> Tensor:
    """The tokens of one (micro) step on rank `of` (default: this one), [ROWS, LENGTH]: numbers that count up."""
    number = 1 + 1000 * step + 100 * micro + (rank() if of is None else of)
    start = torch.randint(vocab, (ROWS, 1), generator=torch.Generator().manual_seed(number))
    return (start + torch.arange(LENGTH)) % vocab


def features(step: int, width: int = 8, rows: int = 4, of: int | None = None) -> Tensor:
    """Random inputs of one step on rank `of` (default: this one), [rows, width]."""
    number = 1 + 1000 * step + (rank() if of is None else of)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean next-token cross entropy in fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())


def gpt_loss(model: Callable[[Tensor], Tensor], step: int, micro: int = 0) -> Tensor:
    batch = tokens(step, micro)
    return token_loss(model(batch), batch)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss_of: Callable[[nn.Module, int], Tensor] = gpt_loss,
    *,
    first: int = 0,
    after_backward: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """The usual loop; returns the loss of each step on this rank."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model.parameters())


# -- references by hand --


def mean_over_ranks(grad: Tensor | None, like: Tensor, wire: torch.dtype | None = None) -> Tensor:
    """The mean of `grad` (None: zeros) over all ranks, in fp32: summed in rank order, after rounding to `wire`."""
    own = torch.zeros_like(like) if grad is None else grad.detach()
    own = own.to(wire or own.dtype).contiguous()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return own.float()
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    total = everyone[0].float() + everyone[1].float()
    for other in everyone[2:]:
        total += other.float()
    return total / world


class Reference:
    """What sharded training does, by hand: `masters` in fp32, a copy in `dtype` that computes, exact means.

    `backward` adds the mean of this backward's gradients to `masters`' grads, as a reduction in each backward does;
    `accumulate` keeps them on this rank, in fp32, and the next `backward` reduces the sum, as under no_sync.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype = torch.float32, wire: torch.dtype | None = None
    ) -> None:
        self.masters = model
        self.model = copy.deepcopy(model).to(dtype)
        self._dtype = dtype
        self._wire = wire
        self._sums: list[Tensor | None] = [None for _ in self.model.parameters()]

    def accumulate(self, loss: Tensor) -> None:
        loss.backward()
        for i, param in enumerate(self.model.parameters()):
            if param.grad is None:
                continue
            total = self._sums[i]
            self._sums[i] = param.grad.float() if total is None else total + param.grad
            param.grad = None

    def backward(self, loss: Tensor, **settings: Any) -> None:
        loss.backward(**settings)
        found: list[Tensor | None] = []
        for i, param in enumerate(self.model.parameters()):
            grad, total = param.grad, self._sums[i]
            self._sums[i] = param.grad = None
            if total is not None:
                grad = total if grad is None else total + grad
            found.append(grad)
        somewhere = torch.tensor([grad is not None for grad in found]).int()
        if dist.is_initialized():
            dist.all_reduce(somewhere)
        pairs = zip(
            self.model.parameters(), self.masters.parameters(), found, somewhere.tolist(), strict=True
        )
        for param, master, grad, count in pairs:
            if not count:
                continue  # no rank has one
            mean = mean_over_ranks(grad, param, self._wire)
            if master.grad is None:
                master.grad = mean
            else:
                master.grad += mean

    def refresh(self) -> None:
        """After the optimizer's step on the masters."""
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                param.copy_(master)

    def grads(self) -> dict[str, Tensor | None]:
        return {
            name: None if p.grad is None else p.grad.clone() for name, p in self.masters.named_parameters()
        }

    def params(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.masters.named_parameters()}
