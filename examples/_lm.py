"""The model of train_lm.py: a byte-level GPT in plain PyTorch. Nothing here knows about sharding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # one token per byte

# name: (layers, width, heads); a block has 12 * width**2 parameters
SIZES = {
    "tiny": (2, 64, 2),  # 0.1 M
    "3m": (4, 256, 4),  # 3.3 M
    "30m": (10, 512, 8),  # 31.7 M
    "120m": (17, 768, 12),  # 120.7 M
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:  # x: [batch, seq, width]
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, head]
        q, k = (rotate(F.rms_norm(t, t.shape[-1:]), rotation) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.apply(init_weights)
        for block in self.blocks:  # every block starts as the identity
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits [batch, seq, 256], or the mean loss in nats per byte if targets [batch, seq] are given."""
        x = self.embedding(tokens)
        rotation = rotary_angles(tokens.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)


def rotary_angles(seq: int, head_width: int, like: Tensor) -> Tensor:
    """Cosines and sines of position * frequency, [2, seq, head_width / 2]."""
    frequency = 10_000.0 ** -torch.linspace(0, 1, head_width // 2, device=like.device)
    angle = torch.arange(seq, device=like.device)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).to(like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:  # x: [batch, heads, seq, head]
    """Rotary position embedding: turn the pair (x[i], x[i + head / 2]) by its angle."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
