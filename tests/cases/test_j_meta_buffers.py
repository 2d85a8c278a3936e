"""Buffers that ``__init__`` computes, in models built on the meta device.

Every rank ends with the values of an eager build, or every rank is told by name which buffers nobody can compute.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from parity import assert_same
from torch import Tensor, nn

import zerosharder as zs
from zerosharder.errors import ShardError


class Rotary(nn.Module):
    """As many write it: what ``__init__`` computes on meta is lost."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.register_buffer(
            "inv_freq", 1.0 / 100 ** (torch.arange(0, dim, 2).float() / dim), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[0]).float(), self.inv_freq)
        return x * torch.cat([angles.cos(), angles.sin()], -1)


class RotaryWithReset(Rotary):
    def reset_parameters(self) -> None:
        dim = 2 * self.inv_freq.numel()
        self.inv_freq.copy_(1.0 / 100 ** (torch.arange(0, dim, 2).float() / dim))


class ScaledLinear(nn.Linear):
    """Parameters and a computed buffer in one module, both set by reset_parameters."""

    def __init__(self, n: int) -> None:
        super().__init__(n, n)
        self.register_buffer("scale", torch.full((n,), 0.5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Masked(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def _model(rotary: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), rotary, nn.Linear(8, 8))


def _everywhere(text: str) -> list[str]:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _refused(model: nn.Module) -> str:
    with pytest.raises(ShardError) as caught:
        zs.shard(model)
    messages = _everywhere(str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


@distributed(world=2)
def test_j1_a_buffer_that_nobody_can_compute_is_named_on_every_rank() -> None:
    with torch.device("meta"):
        model = _model(Rotary())
    message = _refused(model)
    assert "1.inv_freq" in message and "reset_parameters" in message


@distributed(world=2)
def test_j1_a_buffer_that_reset_parameters_computes_is_that_of_an_eager_build() -> None:
    with torch.device("meta"):
        model = _model(RotaryWithReset())
    zs.shard(model)
    assert_same(model[1].inv_freq, Rotary().inv_freq)
    out = model(torch.randn(3, 8))
    out.sum().backward()
    assert not out.isnan().any()


@distributed(world=2)
def test_j1_an_eager_model_keeps_its_buffers() -> None:
    model = _model(Rotary())
    before = model[1].inv_freq
    zs.shard(model)
    assert model[1].inv_freq is before and "1.inv_freq" not in model.state_dict()
    assert_same(before, Rotary().inv_freq)


@distributed(world=2)
def test_j1_a_module_with_parameters_and_a_computed_buffer() -> None:
    with torch.device("meta"):
        model = nn.Sequential(ScaledLinear(4), nn.Linear(4, 4))
    zs.shard(model)
    assert_same(model[0].scale, torch.full((4,), 0.5))
    assert not model(torch.ones(2, 4)).isnan().any()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16], ids=str
)
@distributed(world=2)
def test_j1_buffers_of_every_dtype_are_noticed(dtype: torch.dtype) -> None:
    """A boolean mask has no value that could mark it as unset, and must not come out all False."""
    with torch.device("meta"):
        model = Masked(dtype)
    assert "mask" in _refused(model)


@distributed(world=2)
def test_j1_running_statistics_and_counters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    zs.shard(model)
    for norm in (model[1], model[2]):
        assert_same(norm.running_mean, torch.zeros(4))
        assert_same(norm.running_var, torch.ones(4))
        assert norm.num_batches_tracked.item() == 0


@distributed(world=2)
def test_j1_real_buffers_in_a_meta_model_are_left_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Module())
    model[1].register_buffer("table", torch.arange(5.0), persistent=False)
    model[1].forward = lambda x: x + model[1].table.sum()
    zs.shard(model)
    assert_same(model[1].table, torch.arange(5.0))


@distributed(world=2)
def test_j1_ranks_get_the_same_random_values() -> None:
    """Each rank draws its own; those of rank 0 count."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zs.shard(model)
    with zs.full_params(model):
        values = model[0].weight.detach().clone()
    theirs = values.clone()
    dist.broadcast(theirs, 0)
    assert_same(values, theirs)
    assert values.unique().numel() == 64


@distributed(world=2)
def test_j1_rotary_embedding_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    eager = LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    zs.shard(model)
    buffers = dict(model.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    assert_same(buffers, dict(eager.named_buffers()))
    tokens = torch.arange(8)[None]
    assert not model(input_ids=tokens, labels=tokens).loss.isnan()
