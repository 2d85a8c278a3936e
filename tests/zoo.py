"""Architectures that people wrote, in tiny random configurations: what `zs.shard` must take with nothing else said.

    arch = zoo.ZOO["llama"]
    model = arch.build()                                   # the same weights every time
    loss = arch.loss(model, arch.inputs(step=0, rank=1))   # deterministic: no dropout, no random masks

Nothing is downloaded. `transformers` and `diffusers` are imported by `build` alone, since that takes seconds.
"""

from __future__ import annotations

import dataclasses
import warnings
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
    ddp: bool = (
        True  # DistributedDataParallel can wrap it; else gradients of the reference are averaged by hand
    )

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


ZOO: dict[str, Architecture] = {}


def _add(
    name: str,
    kind: str,
    make: Callable[[], nn.Module],
    draw: Callable[[Generator], Inputs],
    score: Callable[[nn.Module, Inputs], Tensor],
    **kwargs: Any,
) -> None:
    assert name not in ZOO, name
    ZOO[name] = Architecture(name, kind, make, draw, score, **kwargs)


# -- inputs and losses --


def _tokens(g: Generator, *shape: int) -> Tensor:
    return torch.randint(FIRST, VOCAB, shape or (BATCH, LENGTH), generator=g)


def _language(g: Generator) -> Inputs:
    ids = _tokens(g)
    return {"input_ids": ids, "labels": ids.clone()}


def _sequence_to_sequence(g: Generator) -> Inputs:
    return {"input_ids": _tokens(g), "labels": _tokens(g, BATCH, LENGTH - 2)}


def _ids(g: Generator) -> Inputs:
    return {"input_ids": _tokens(g)}


def _images(size: int, channels: int = 3, classes: int = 4) -> Callable[[Generator], Inputs]:
    def draw(g: Generator) -> Inputs:
        pixels = torch.randn(BATCH, channels, size, size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(classes, (BATCH,), generator=g)}

    return draw


def _own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The loss that models of transformers compute when they get labels."""
    loss: Tensor = model(**inputs).loss
    return loss


def _probe(output: Tensor) -> Tensor:
    """A loss for an output of any shape, whose gradient is nowhere zero."""
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return F.mse_loss(output, target)


def _probe_of(attribute: str) -> Callable[[nn.Module, Inputs], Tensor]:
    return lambda model, inputs: _probe(getattr(model(**inputs), attribute))


def _probe_tensor(model: nn.Module, inputs: Inputs) -> Tensor:
    return _probe(model(**inputs))


# -- torch's own modules --


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


_add("torch-transformer", "encoder-decoder", _Translator, _sequence_to_sequence, lambda m, x: m(**x))
_add("torch-encoder", "encoder", _Encoder, _language, lambda m, x: m(**x))
_add("torch-lstm", "recurrent", lambda: _Recurrent(nn.LSTM, proj_size=0), _language, lambda m, x: m(**x))
_add("torch-gru", "recurrent", lambda: _Recurrent(nn.GRU, bidirectional=True), _language, lambda m, x: m(**x))
_add("torch-attention", "encoder", _Attention, _language, lambda m, x: m(**x))
_add("torch-moe", "moe", _MixtureOfExperts, _language, lambda m, x: m(**x))
_add("torch-conv", "vision", _Convolutions, _images(8), lambda m, x: m(**x))


# -- transformers --


def _quiet(config: Any) -> None:
    """No dropout of any kind, in nested configurations as well."""
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _quiet(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def _transformers(class_name: str, **settings: Any) -> Callable[[], nn.Module]:
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


def _decoder(name: str, class_name: str, kind: str = "decoder", **settings: Any) -> None:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    _add(name, kind, _transformers(class_name, vocab_size=VOCAB, **ids | settings), _language, _own_loss)


def _encoder(name: str, class_name: str, kind: str = "encoder", **settings: Any) -> None:
    _add(
        name,
        kind,
        _transformers(class_name, vocab_size=VOCAB, pad_token_id=0, **settings),
        _language,
        _own_loss,
    )


def _seq2seq(name: str, class_name: str, kind: str = "encoder-decoder", **settings: Any) -> None:
    ids = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
        "use_cache": False,
    }
    make = _transformers(class_name, vocab_size=VOCAB, **ids | settings)
    _add(name, kind, make, _sequence_to_sequence, _own_loss)


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_decoder("llama", "LlamaForCausalLM", **LLAMA)
_decoder("mistral", "MistralForCausalLM", sliding_window=8, **LLAMA)
_decoder("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True, **LLAMA)
_decoder("gemma2", "Gemma2ForCausalLM", query_pre_attn_scalar=8, sliding_window=8, **LLAMA)
_decoder("phi3", "Phi3ForCausalLM", **{k: v for k, v in LLAMA.items() if k != "head_dim"})
_decoder("olmo2", "Olmo2ForCausalLM", **{k: v for k, v in LLAMA.items() if k != "head_dim"})
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_decoder("gpt2", "GPT2LMHeadModel", **GPT2)
_decoder("gptj", "GPTJForCausalLM", rotary_dim=4, tie_word_embeddings=False, **GPT2)
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_decoder("gpt-neox", "GPTNeoXForCausalLM", **BERT)
_decoder("phi", "PhiForCausalLM", **BERT)
_decoder("bloom", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4)
_decoder(
    "opt",
    "OPTForCausalLM",
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    word_embed_proj_dim=24,
)
_decoder("mixtral", "MixtralForCausalLM", "moe", num_local_experts=4, output_router_logits=True, **LLAMA)
_decoder(
    "qwen2-moe",
    "Qwen2MoeForCausalLM",
    "moe",
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=2,
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
)
_decoder(
    "mamba",
    "MambaForCausalLM",
    "state-space",
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
    time_step_rank=4,
)
_decoder(
    "mamba2",
    "Mamba2ForCausalLM",
    "state-space",
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
    num_heads=8,
    head_dim=8,
    n_groups=2,
    chunk_size=8,
)
_decoder(
    "rwkv", "RwkvForCausalLM", "state-space", hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
)
_decoder(
    "falcon-h1",
    "FalconH1ForCausalLM",
    "hybrid",
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_chunk_size=8,
    **LLAMA,
)
_decoder(
    "recurrent-gemma",
    "RecurrentGemmaForCausalLM",
    "state-space",
    lru_width=32,
    attention_window_size=8,
    block_types=["recurrent", "attention"],
    **LLAMA,
)
_decoder(
    "deepseek-v3",
    "DeepseekV3ForCausalLM",
    "moe",
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    **{k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")},
)
# Reversible layers: a custom backward that runs the modules again.
_decoder(
    "reformer",
    "ReformerModelWithLMHead",
    "reversible",
    is_decoder=True,
    hidden_size=32,
    feed_forward_size=48,
    attn_layers=["local", "local"],
    num_attention_heads=4,
    attention_head_size=8,
    axial_pos_shape=(4, 3),
    axial_pos_embds_dim=(16, 16),
    max_position_embeddings=12,
    local_attn_chunk_length=4,
    hash_seed=0,
)
ZOO["reformer"] = dataclasses.replace(
    ZOO["reformer"], ddp=False
)  # DDP refuses the backward within a backward

_encoder("bert", "BertForMaskedLM", **BERT)
_encoder("roberta", "RobertaForMaskedLM", **BERT)
_encoder(
    "distilbert",
    "DistilBertForMaskedLM",
    dim=32,
    hidden_dim=48,
    n_layers=2,
    n_heads=4,
    max_position_embeddings=64,
)
_encoder("electra", "ElectraForMaskedLM", embedding_size=16, **BERT)
_encoder(
    "albert", "AlbertForMaskedLM", "weight sharing", embedding_size=16, **BERT | {"num_hidden_layers": 3}
)
_encoder(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    conv_kernel_size=3,
    **BERT,
)
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
_encoder("modernbert", "ModernBertForMaskedLM", local_attention=8, **NO_IDS, **BERT)
_encoder("xlnet", "XLNetLMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=48)
_encoder(
    "funnel", "FunnelForMaskedLM", "encoder", d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1]
)
_encoder("longformer", "LongformerForMaskedLM", attention_window=4, **BERT)

_seq2seq("t5", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
_seq2seq(
    "mt5",
    "MT5ForConditionalGeneration",
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    tie_word_embeddings=False,
)
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
_seq2seq("bart", "BartForConditionalGeneration", **BART)
_seq2seq("marian", "MarianMTModel", decoder_vocab_size=VOCAB, **BART)
_seq2seq(
    "switch-transformers",
    "SwitchTransformersForConditionalGeneration",
    "moe",
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    num_heads=4,
    num_experts=3,
    expert_capacity=64,
    router_jitter_noise=0.0,
)

# Vision, audio, both
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_add(
    "vit",
    "vision",
    _transformers("ViTForImageClassification", image_size=16, patch_size=4, num_labels=4, **VIT),
    _images(16),
    _own_loss,
)
_add(
    "dinov2",
    "vision",
    _transformers(
        "Dinov2ForImageClassification", image_size=16, patch_size=4, num_labels=4, mlp_ratio=2, **VIT
    ),
    _images(16),
    _own_loss,
)
_add(
    "swin",
    "vision",
    _transformers(
        "SwinForImageClassification",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=4,
    ),
    _images(16),
    _own_loss,
)
_add(
    "resnet",
    "vision",
    _transformers(
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="bottleneck",
        num_labels=4,
    ),
    _images(32),
    _own_loss,
)
_add(
    "convnext",
    "vision",
    _transformers(
        "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=4
    ),
    _images(32),
    _own_loss,
)
_add(
    "segformer",
    "vision",
    _transformers(
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
    _own_loss,
)
_add(
    "perceiver",
    "perceiver",
    _transformers(
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
    lambda g: {"inputs": (ids := _tokens(g)), "labels": ids.clone()},
    _own_loss,
)
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
    return {"input_values": torch.randn(BATCH, 256, generator=g), "labels": _tokens(g, BATCH, 5)}


_add("wav2vec2", "audio", _transformers("Wav2Vec2ForCTC", **SPEECH, **VIT), _speech, _own_loss)
_add(
    "hubert",
    "audio",
    _transformers("HubertForCTC", feat_extract_norm="layer", do_stable_layer_norm=True, **SPEECH, **VIT),
    _speech,
    _own_loss,
)
_add(
    "encodec",
    "audio",
    _transformers(
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
    _probe_of("audio_values"),
)
_add(
    "whisper",
    "audio",
    _transformers(
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
    lambda g: {"input_features": torch.randn(BATCH, 8, 32, generator=g), "labels": _tokens(g, BATCH, 8)},
    _own_loss,
)
_add(
    "clip",
    "vision and text",
    _transformers(
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
        "input_ids": torch.cat([_tokens(g, BATCH, 8), torch.full((BATCH, 1), 2)], 1),
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g),
        "return_loss": True,
    },
    _own_loss,
)
_add(
    "llava",
    "vision and text",
    _transformers(
        "LlavaForConditionalGeneration",
        text_config={"model_type": "llama", "vocab_size": VOCAB, **LLAMA},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **VIT},
        image_token_index=4,
        image_token_id=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    ),
    lambda g: {
        "input_ids": (ids := torch.cat([torch.full((BATCH, 4), 4), _tokens(g, BATCH, 8)], 1)),
        "labels": ids.clone(),
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=g),
        "use_cache": False,
    },
    _own_loss,
)


# -- diffusers --


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


_add(
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
    _probe_of("sample"),
)
_add(
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
    _probe_of("sample"),
)
_add(
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
    _probe_of("sample"),
)
_add(
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
    _probe_of("sample"),
)
_add(
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
    _probe_of("sample"),
)
