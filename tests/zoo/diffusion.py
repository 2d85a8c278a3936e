"""Models of `diffusers`: UNets, diffusion transformers, an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, nn

from zoo.architecture import BATCH, Family, Inputs, probe_of

FAMILY = Family()


def _diffusers(class_name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, class_name)(**settings)
        return model

    return make


def _noise(size: int, channels: int = 3) -> Callable[[Generator], Inputs]:
    return lambda g: {
        "sample": torch.randn(BATCH, channels, size, size, generator=g),
        "timestep": torch.randint(1000, (BATCH,), generator=g),
    }


FAMILY.add(
    "unet2d",
    "unet",
    _diffusers(
        "UNet2DModel",
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _noise(8),
    probe_of("sample"),
)
FAMILY.add(
    "unet2d-condition",
    "unet",
    _diffusers(
        "UNet2DConditionModel",
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    lambda g: _noise(8, 4)(g) | {"encoder_hidden_states": torch.randn(BATCH, 5, 16, generator=g)},
    probe_of("sample"),
)
FAMILY.add(
    "dit",
    "diffusion transformer",
    _diffusers(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=8,
    ),
    lambda g: {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=g),
        "timestep": torch.randint(1000, (BATCH,), generator=g),
        "class_labels": torch.randint(1000, (BATCH,), generator=g),
    },
    probe_of("sample"),
)
FAMILY.add(
    "flux",
    "diffusion transformer",
    _diffusers(
        "FluxTransformer2DModel",
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ),
    lambda g: {
        "hidden_states": torch.randn(BATCH, 16, 4, generator=g),
        "encoder_hidden_states": torch.randn(BATCH, 6, 24, generator=g),
        "pooled_projections": torch.randn(BATCH, 16, generator=g),
        "timestep": torch.rand(BATCH, generator=g),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(6, 3),
    },
    probe_of("sample"),
)
FAMILY.add(
    "autoencoder-kl",
    "autoencoder",
    _diffusers(
        "AutoencoderKL",
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    lambda g: {"sample": torch.randn(BATCH, 3, 16, 16, generator=g)},
    probe_of("sample"),
)
