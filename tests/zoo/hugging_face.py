"""Models of `transformers` from their configuration classes, and the sizes that many configurations share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.architecture import VOCAB, Family, language, own_loss, sequence_to_sequence

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _quiet(config: Any) -> None:
    """No dropout of any kind, in nested configurations as well."""
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _quiet(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def pretrained_class(class_name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, class_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = cls.config_class(**settings)
            _quiet(config)
            model: nn.Module = cls(config)
        return model

    return make


class HuggingFaceFamily(Family):
    """Language models, whose configurations agree on the names of special tokens."""

    def decoder(self, name: str, class_name: str, kind: str = "decoder", **settings: Any) -> None:
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
        self.add(
            name, kind, pretrained_class(class_name, vocab_size=VOCAB, **ids | settings), language, own_loss
        )

    def encoder(self, name: str, class_name: str, kind: str = "encoder", **settings: Any) -> None:
        self.add(
            name,
            kind,
            pretrained_class(class_name, vocab_size=VOCAB, pad_token_id=0, **settings),
            language,
            own_loss,
        )

    def seq2seq(self, name: str, class_name: str, kind: str = "encoder-decoder", **settings: Any) -> None:
        ids = {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "forced_eos_token_id": None,
            "use_cache": False,
        }
        make = pretrained_class(class_name, vocab_size=VOCAB, **ids | settings)
        self.add(name, kind, make, sequence_to_sequence, own_loss)
