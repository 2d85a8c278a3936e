"""Vision, and vision with text, of `transformers`."""

from __future__ import annotations

import torch

from zoo.architecture import BATCH, LENGTH, VOCAB, Family, images, own_loss, tokens
from zoo.hugging_face import LLAMA, VIT, pretrained_class

FAMILY = Family()

FAMILY.add(
    "vit",
    "vision",
    pretrained_class("ViTForImageClassification", image_size=16, patch_size=4, num_labels=4, **VIT),
    images(16),
    own_loss,
)
FAMILY.add(
    "dinov2",
    "vision",
    pretrained_class(
        "Dinov2ForImageClassification", image_size=16, patch_size=4, num_labels=4, mlp_ratio=2, **VIT
    ),
    images(16),
    own_loss,
)
FAMILY.add(
    "swin",
    "vision",
    pretrained_class(
        "SwinForImageClassification",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=4,
    ),
    images(16),
    own_loss,
)
FAMILY.add(
    "resnet",
    "vision",
    pretrained_class(
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="bottleneck",
        num_labels=4,
    ),
    images(32),
    own_loss,
)
FAMILY.add(
    "convnext",
    "vision",
    pretrained_class(
        "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=4
    ),
    images(32),
    own_loss,
)
FAMILY.add(
    "segformer",
    "vision",
    pretrained_class(
        "SegformerForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    ),
    lambda g: {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g),
        "labels": torch.randint(4, (BATCH, 16, 16), generator=g),
    },
    own_loss,
)
FAMILY.add(
    "perceiver",
    "perceiver",
    pretrained_class(
        "PerceiverForMaskedLM",
        vocab_size=VOCAB,
        num_latents=6,
        d_latents=32,
        d_model=24,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=16,
        v_channels=32,
        max_position_embeddings=LENGTH,
    ),
    lambda g: {"inputs": (ids := tokens(g)), "labels": ids.clone()},
    own_loss,
)
FAMILY.add(
    "clip",
    "vision and text",
    pretrained_class(
        "CLIPModel",
        projection_dim=16,
        text_config={
            "vocab_size": VOCAB,
            "max_position_embeddings": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **VIT,
        },
        vision_config={"image_size": 16, "patch_size": 4, **VIT},
    ),
    lambda g: {
        "input_ids": torch.cat([tokens(g, BATCH, 8), torch.full((BATCH, 1), 2)], 1),
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g),
        "return_loss": True,
    },
    own_loss,
)
FAMILY.add(
    "llava",
    "vision and text",
    pretrained_class(
        "LlavaForConditionalGeneration",
        text_config={"model_type": "llama", "vocab_size": VOCAB, **LLAMA},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **VIT},
        image_token_index=4,
        image_token_id=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    ),
    lambda g: {
        "input_ids": (ids := torch.cat([torch.full((BATCH, 4), 4), tokens(g, BATCH, 8)], 1)),
        "labels": ids.clone(),
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=g),
        "use_cache": False,
    },
    own_loss,
)
