"""Language models of transformers that write on: each predicts the next token."""

from __future__ import annotations

from transformers import AutoModelForCausalLM as CAUSAL

from tests.zoo.model import ADAM_CLIP, ADAM_CYCLE, ADAMW, ADAMW_FOREACH, ADAMW_WARMUP, RMSPROP, SGD, SGD_DECAY
from tests.zoo.transformers_batches import VOCABULARY, padded_text, text
from tests.zoo.transformers_parts import SMALL_TEXT, SPECIAL, row

LLAMA = SMALL_TEXT | SPECIAL
GROUPED = LLAMA | {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "output_router_logits": True}
WORDS = {"vocab_size": VOCABULARY}

MODELS = [
    row("gpt2", CAUSAL, text, ADAMW_WARMUP, **WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16),
    row(
        "gpt_neo",
        CAUSAL,
        text,
        SGD,
        **WORDS,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=16,
    ),
    row("gpt_neox", CAUSAL, padded_text, ADAMW, **LLAMA),
    row("gptj", CAUSAL, text, ADAMW, **WORDS, n_embd=16, n_layer=2, n_head=2, rotary_dim=4),
    row("codegen", CAUSAL, text, SGD, **WORDS, n_embd=16, n_layer=1, n_head=4, rotary_dim=4),
    row("opt", CAUSAL, padded_text, ADAMW_WARMUP, **LLAMA, ffn_dim=32, word_embed_proj_dim=16),
    row("bloom", CAUSAL, padded_text, ADAMW, **WORDS, hidden_size=16, n_layer=2, n_head=2),
    row("falcon", CAUSAL, text, SGD, **LLAMA),
    row("mpt", CAUSAL, text, SGD_DECAY, **WORDS, d_model=16, n_layers=2, n_heads=2, max_seq_len=16),
    row("llama", CAUSAL, padded_text, ADAMW_WARMUP, **GROUPED),
    row("mistral", CAUSAL, text, ADAMW, **GROUPED, sliding_window=4),
    row("qwen2", CAUSAL, text, SGD_DECAY, **GROUPED),
    row("qwen3", CAUSAL, padded_text, ADAM_CLIP, **GROUPED),
    row("gemma", CAUSAL, text, ADAMW, **GROUPED),
    row("gemma2", CAUSAL, text, ADAMW_FOREACH, **GROUPED, sliding_window=4),
    row("gemma3_text", CAUSAL, text, SGD, **GROUPED, sliding_window=4),
    row("phi", CAUSAL, text, ADAM_CYCLE, **LLAMA),
    row("phi3", CAUSAL, text, ADAMW, **GROUPED),
    row("stablelm", CAUSAL, text, SGD, **LLAMA, num_key_value_heads=2),
    row("olmo2", CAUSAL, text, ADAMW, **LLAMA),
    row("cohere", CAUSAL, text, ADAMW, **LLAMA),
    row("granite", CAUSAL, text, RMSPROP, **LLAMA),
    row("smollm3", CAUSAL, text, SGD, **GROUPED),
    row("starcoder2", CAUSAL, text, SGD, **GROUPED),
    row("mixtral", CAUSAL, text, ADAMW, **EXPERTS, num_local_experts=4, builds=2),
    row("qwen3_moe", CAUSAL, text, SGD, **EXPERTS, num_experts=4, moe_intermediate_size=16, builds=2),
    row(
        "deepseek_v3",
        CAUSAL,
        text,
        ADAMW,
        **SMALL_TEXT,
        **SPECIAL,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    row("mamba", CAUSAL, text, ADAMW, **WORDS, hidden_size=16, num_hidden_layers=2, state_size=4),
    row(
        "mamba2",
        CAUSAL,
        text,
        SGD,
        **WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        state_size=4,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    row("rwkv", CAUSAL, text, ADAMW, **WORDS, hidden_size=16, num_hidden_layers=2),
    row("xlnet", CAUSAL, text, ADAMW, **WORDS, d_model=16, n_layer=2, n_head=2, d_inner=32),
]
