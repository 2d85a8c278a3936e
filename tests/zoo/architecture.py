"""What an entry of the zoo is, and the inputs and losses that entries share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

Inputs = dict[str, Any]

VOCAB = 96  # token numbers below FIRST are left to padding, begin, end
FIRST = 5
BATCH = 2
LENGTH = 12  # tokens
SEED = 0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One entry. `make`, `draw` and `score` are what build, inputs and loss run once seeds are set."""

    name: str
    kind: str
    make: Callable[[], nn.Module]
    draw: Callable[[Generator], Inputs]
    score: Callable[[nn.Module, Inputs], Tensor]
    ddp: bool = True  # DDP can wrap it; else gradients of the reference are averaged by hand

    def build(self) -> nn.Module:
        """The model, in train mode."""
        torch.manual_seed(SEED)
        return self.make().train()

    def inputs(self, step: int, rank: int) -> Inputs:
        """Keyword arguments of one step on one rank."""
        return self.draw(torch.Generator().manual_seed(1 + 1000 * step + rank))

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """A scalar."""
        return self.score(model, inputs)


class Family(dict[str, Architecture]):
    """Architectures by name."""

    def add(
        self,
        name: str,
        kind: str,
        make: Callable[[], nn.Module],
        draw: Callable[[Generator], Inputs],
        score: Callable[[nn.Module, Inputs], Tensor],
        **kwargs: Any,
    ) -> None:
        assert name not in self, name
        self[name] = Architecture(name, kind, make, draw, score, **kwargs)


def tokens(g: Generator, *shape: int) -> Tensor:
    return torch.randint(FIRST, VOCAB, shape or (BATCH, LENGTH), generator=g)


def language(g: Generator) -> Inputs:
    ids = tokens(g)
    return {"input_ids": ids, "labels": ids.clone()}


def sequence_to_sequence(g: Generator) -> Inputs:
    return {"input_ids": tokens(g), "labels": tokens(g, BATCH, LENGTH - 2)}


def images(size: int, channels: int = 3, classes: int = 4) -> Callable[[Generator], Inputs]:
    def draw(g: Generator) -> Inputs:
        pixels = torch.randn(BATCH, channels, size, size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(classes, (BATCH,), generator=g)}

    return draw


def own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The loss that models of transformers compute when they get labels."""
    loss: Tensor = model(**inputs).loss
    return loss


def probe(output: Tensor) -> Tensor:
    """A loss for an output of any shape, whose gradient is nowhere zero."""
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return F.mse_loss(output, target)


def probe_of(attribute: str) -> Callable[[nn.Module, Inputs], Tensor]:
    return lambda model, inputs: probe(getattr(model(**inputs), attribute))
