"""The model and the data of the benchmarks: a plain GPT and a stream of tokens that needs no file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# name: (layers, width, heads, vocabulary)
SIZES = {
    "tiny": (2, 64, 2, 512),  # 0.2 M
    "30m": (6, 512, 8, 11264),  # 30.5 M
    "120m": (12, 768, 12, 22528),  # 119.8 M
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, width]
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # [batch, seq, 3, heads, head]
        q, k, v = heads.movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, pre-norm, untied head; returns the mean loss."""

    def __init__(self, size: str, seq: int) -> None:
        super().__init__()
        layers, width, heads, vocabulary = SIZES[size]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, seq]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(size: str, seq: int, seed: int = 0) -> GPT:
    """The same weights in every process."""
    torch.manual_seed(seed)
    return GPT(size, seq)


def unit_nbytes(model: GPT) -> list[int]:
    """Bytes of what is worth gathering on its own: every block, the embedding, the head."""
    modules = [*model.blocks, model.tokens, model.head]
    return [sum(p.numel() * p.element_size() for p in module.parameters()) for module in modules]


def batch(size: str, step: int, rank: int, count: int, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [count, seq]: runs with a random start and stride, learnable within a few steps."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    start = torch.randint(97, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    tokens = (start + stride * torch.arange(seq + 1)) % min(97, SIZES[size][3])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
