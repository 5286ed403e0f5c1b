"""Language models of transformers that read: encoders, and those that answer what they have read."""

from __future__ import annotations

from transformers import AutoModelForMaskedLM as MASKED
from transformers import AutoModelForSeq2SeqLM as SEQ2SEQ
from transformers import AutoModelForSequenceClassification as CLASSES

from tests.zoo.model import ADAM_CLIP, ADAMW, ADAMW_WARMUP, SGD, Deviation
from tests.zoo.transformers_batches import (
    VOCABULARY,
    labelled_text,
    masked_text,
    text,
    translated_text,
    unpadded_text,
)
from tests.zoo.transformers_parts import ONE_CLASS, SMALL_TEXT, SPECIAL, row

WORDS = {"vocab_size": VOCABULARY}
ROUTED = "each expert asks in Python which tokens are its own"

ENCODERS = [
    row("bert/unpadded", MASKED, unpadded_text, SGD, **SMALL_TEXT),
    row("bert", MASKED, masked_text, ADAMW_WARMUP, **SMALL_TEXT),
    row("roberta", CLASSES, labelled_text, SGD, builds=2, **SMALL_TEXT | SPECIAL),
    row(
        "distilbert",
        CLASSES,
        labelled_text,
        ADAMW,
        **ONE_CLASS,
        **WORDS,
        dim=16,
        hidden_dim=32,
        n_layers=2,
        n_heads=2,
    ),
    row("albert", MASKED, masked_text, ADAMW, **SMALL_TEXT, embedding_size=8),
    row("electra", CLASSES, labelled_text, ADAM_CLIP, **ONE_CLASS, **SMALL_TEXT, embedding_size=8),
    row(
        "deberta",
        MASKED,
        masked_text,
        ADAMW,
        **SMALL_TEXT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    row(
        "deberta-v2",
        CLASSES,
        labelled_text,
        SGD,
        **ONE_CLASS,
        **SMALL_TEXT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
    ),
    row("mpnet", MASKED, masked_text, SGD, **SMALL_TEXT),
    row(
        "modernbert",
        MASKED,
        masked_text,
        ADAMW,
        **SMALL_TEXT | SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
        global_attn_every_n_layers=2,
    ),
    row(
        "squeezebert",
        MASKED,
        masked_text,
        SGD,
        **SMALL_TEXT,
        embedding_size=16,
        q_groups=2,
        k_groups=2,
        v_groups=2,
        post_attention_groups=1,
        intermediate_groups=2,
        output_groups=2,
    ),
    row("fnet", MASKED, text, ADAMW, **SMALL_TEXT),
    row(
        "funnel",
        MASKED,
        masked_text,
        SGD,
        **WORDS,
        d_model=16,
        block_sizes=[1, 1],
        n_head=2,
        d_head=8,
        d_inner=32,
        num_decoder_layers=1,
    ),
    row("convbert", CLASSES, labelled_text, SGD, **ONE_CLASS, **SMALL_TEXT, embedding_size=16, head_ratio=2),
    row(
        "longformer",
        CLASSES,
        labelled_text,
        SGD,
        **ONE_CLASS,
        **SMALL_TEXT,
        attention_window=4,
    ),
    row("big_bird", CLASSES, labelled_text, SGD, **ONE_CLASS, **SMALL_TEXT, attention_type="original_full"),
    row(
        "esm",
        MASKED,
        masked_text,
        ADAMW,
        **SMALL_TEXT,
        pad_token_id=0,
        mask_token_id=1,
        position_embedding_type="rotary",
    ),
]

BART = SPECIAL | {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
ANSWERING = [
    row("t5", SEQ2SEQ, translated_text, ADAMW_WARMUP, **T5),
    row("bart", SEQ2SEQ, translated_text, ADAMW, **BART),
    row("pegasus", SEQ2SEQ, translated_text, SGD, **BART),
    row("marian", SEQ2SEQ, translated_text, SGD, **BART),
    row(
        "switch_transformers",
        SEQ2SEQ,
        translated_text,
        ADAMW,
        deviation=Deviation("refused", ROUTED, "modeling_switch_transformers.py"),
        **T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=8,
    ),
]
MODELS = ENCODERS + ANSWERING
