"""Encoders, and encoders with decoders, of `transformers`."""

from __future__ import annotations

from zoo.architecture import VOCAB
from zoo.hugging_face import BART, BERT, HuggingFaceFamily

FAMILY = HuggingFaceFamily()

FAMILY.encoder("bert", "BertForMaskedLM", **BERT)
FAMILY.encoder("roberta", "RobertaForMaskedLM", **BERT)
FAMILY.encoder(
    "distilbert",
    "DistilBertForMaskedLM",
    dim=32,
    hidden_dim=48,
    n_layers=2,
    n_heads=4,
    max_position_embeddings=64,
)
FAMILY.encoder("electra", "ElectraForMaskedLM", embedding_size=16, **BERT)
FAMILY.encoder(
    "albert", "AlbertForMaskedLM", "weight sharing", embedding_size=16, **BERT | {"num_hidden_layers": 3}
)
FAMILY.encoder(
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
FAMILY.encoder("modernbert", "ModernBertForMaskedLM", local_attention=8, **NO_IDS, **BERT)
FAMILY.encoder("xlnet", "XLNetLMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=48)
FAMILY.encoder(
    "funnel", "FunnelForMaskedLM", "encoder", d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1]
)
FAMILY.encoder("longformer", "LongformerForMaskedLM", attention_window=4, **BERT)

FAMILY.seq2seq("t5", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
FAMILY.seq2seq(
    "mt5",
    "MT5ForConditionalGeneration",
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    tie_word_embeddings=False,
)
FAMILY.seq2seq("bart", "BartForConditionalGeneration", **BART)
FAMILY.seq2seq("marian", "MarianMTModel", decoder_vocab_size=VOCAB, **BART)
FAMILY.seq2seq(
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
