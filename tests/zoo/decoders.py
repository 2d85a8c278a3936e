"""Decoders of `transformers`: dense, mixtures of experts, state-space, hybrid, reversible."""

from __future__ import annotations

import dataclasses

from zoo.hugging_face import BERT, LLAMA, HuggingFaceFamily

FAMILY = HuggingFaceFamily()

FAMILY.decoder("llama", "LlamaForCausalLM", **LLAMA)
FAMILY.decoder("mistral", "MistralForCausalLM", sliding_window=8, **LLAMA)
FAMILY.decoder("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True, **LLAMA)
FAMILY.decoder("gemma2", "Gemma2ForCausalLM", query_pre_attn_scalar=8, sliding_window=8, **LLAMA)
FAMILY.decoder("phi3", "Phi3ForCausalLM", **{k: v for k, v in LLAMA.items() if k != "head_dim"})
FAMILY.decoder("olmo2", "Olmo2ForCausalLM", **{k: v for k, v in LLAMA.items() if k != "head_dim"})
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
FAMILY.decoder("gpt2", "GPT2LMHeadModel", **GPT2)
FAMILY.decoder("gptj", "GPTJForCausalLM", rotary_dim=4, tie_word_embeddings=False, **GPT2)
FAMILY.decoder("gpt-neox", "GPTNeoXForCausalLM", **BERT)
FAMILY.decoder("phi", "PhiForCausalLM", **BERT)
FAMILY.decoder("bloom", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4)
FAMILY.decoder(
    "opt",
    "OPTForCausalLM",
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    word_embed_proj_dim=24,
)
FAMILY.decoder(
    "mixtral", "MixtralForCausalLM", "moe", num_local_experts=4, output_router_logits=True, **LLAMA
)
FAMILY.decoder(
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
FAMILY.decoder(
    "mamba",
    "MambaForCausalLM",
    "state-space",
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
    time_step_rank=4,
)
FAMILY.decoder(
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
FAMILY.decoder(
    "rwkv", "RwkvForCausalLM", "state-space", hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
)
FAMILY.decoder(
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
FAMILY.decoder(
    "recurrent-gemma",
    "RecurrentGemmaForCausalLM",
    "state-space",
    lru_width=32,
    attention_window_size=8,
    block_types=["recurrent", "attention"],
    **LLAMA,
)
FAMILY.decoder(
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
FAMILY.decoder(
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
# DDP refuses the backward within a backward.
FAMILY["reformer"] = dataclasses.replace(FAMILY["reformer"], ddp=False)
