"""Models of torch's own modules: transformer, recurrent, attention, experts, convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.architecture import LENGTH, VOCAB, Family, images, language, sequence_to_sequence

FAMILY = Family()


class _Translator(nn.Module):
    """nn.Transformer; target embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, 32)
        self.target = nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.target.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1] - 1)
        hidden = self.transformer(self.source(input_ids), self.target(labels[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels[:, 1:].flatten())


class _Encoder(nn.Module):
    """nn.TransformerEncoder, norm first, learned positions as a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.positions = nn.Parameter(torch.randn(LENGTH, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(input_ids) + self.positions)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _Recurrent(nn.Module):
    """A language model around nn.LSTM or nn.GRU, which keep their weights in a list of their own as well."""

    def __init__(self, cell: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.rnn = cell(24, 24, num_layers=2, batch_first=True, **kwargs)
        self.head = nn.Linear(48 if kwargs.get("bidirectional") else 24, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _Attention(nn.Module):
    """nn.MultiheadAttention in its three ways of holding weights; it reads out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            [
                nn.MultiheadAttention(32, 4, batch_first=True),
                nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, vdim=24),
                nn.MultiheadAttention(32, 4, batch_first=True, bias=False, add_bias_kv=True),
            ]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(3)])
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for attention, norm in zip(self.layers, self.norms, strict=True):
            h = norm(x)
            x = x + attention(h, h[..., : attention.kdim], h[..., : attention.vdim], need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Experts(nn.Module):
    """Top-1 routing over a list of experts. One that gets no token is not called, so ranks call different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, 12, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24)) for _ in range(12)]
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](tokens[rows]) * weight[rows, None])
        return x + out.view_as(x)


class _MixtureOfExperts(nn.Module):
    """What people wrote before there were grouped kernels: blocks with a list of expert modules in each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(24), _Experts()) for _ in range(3)])
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Convolutions(nn.Module):
    """Batch norm, group norm, transposed and grouped convolutions, PReLU, one weight-normalised layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.PReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=4),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.BatchNorm2d(8, affine=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(128, 4))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(pixel_values)), labels)


FAMILY.add("torch-transformer", "encoder-decoder", _Translator, sequence_to_sequence, lambda m, x: m(**x))
FAMILY.add("torch-encoder", "encoder", _Encoder, language, lambda m, x: m(**x))
FAMILY.add("torch-lstm", "recurrent", lambda: _Recurrent(nn.LSTM, proj_size=0), language, lambda m, x: m(**x))
FAMILY.add(
    "torch-gru", "recurrent", lambda: _Recurrent(nn.GRU, bidirectional=True), language, lambda m, x: m(**x)
)
FAMILY.add("torch-attention", "encoder", _Attention, language, lambda m, x: m(**x))
FAMILY.add("torch-moe", "moe", _MixtureOfExperts, language, lambda m, x: m(**x))
FAMILY.add("torch-conv", "vision", _Convolutions, images(8), lambda m, x: m(**x))
