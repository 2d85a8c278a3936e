"""Speech and sound, of `transformers`."""

from __future__ import annotations

import torch
from torch import Generator

from zoo.architecture import BATCH, VOCAB, Family, Inputs, own_loss, probe_of, tokens
from zoo.hugging_face import BART, VIT, pretrained_class

FAMILY = Family()

SPEECH = {
    "vocab_size": VOCAB,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "pad_token_id": 0,
}


def _speech(g: Generator) -> Inputs:
    return {"input_values": torch.randn(BATCH, 256, generator=g), "labels": tokens(g, BATCH, 5)}


FAMILY.add("wav2vec2", "audio", pretrained_class("Wav2Vec2ForCTC", **SPEECH, **VIT), _speech, own_loss)
FAMILY.add(
    "hubert",
    "audio",
    pretrained_class("HubertForCTC", feat_extract_norm="layer", do_stable_layer_norm=True, **SPEECH, **VIT),
    _speech,
    own_loss,
)
FAMILY.add(
    "encodec",
    "audio",
    pretrained_class(
        "EncodecModel",
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=32,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[24.0],
    ),
    lambda g: {"input_values": torch.randn(BATCH, 1, 128, generator=g)},
    probe_of("audio_values"),
)
FAMILY.add(
    "whisper",
    "audio",
    pretrained_class(
        "WhisperForConditionalGeneration",
        vocab_size=VOCAB,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
        use_cache=False,
        **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    ),
    lambda g: {"input_features": torch.randn(BATCH, 8, 32, generator=g), "labels": tokens(g, BATCH, 8)},
    own_loss,
)
