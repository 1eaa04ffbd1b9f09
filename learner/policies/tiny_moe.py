"""The demo's model: a Qwen3 mixture of experts of about 0.95 million parameters."""

from __future__ import annotations

from typing import Any

import torch

#: Tokens of context: prompt, replies and tool results of a demo trial.
MAX_POSITIONS = 1024


def make_config(vocab_size: int, pad_id: int, eos_id: int) -> Any:
    """Qwen3-MoE: 2 layers of 8 experts, 2 of them per token, hidden size 128, tied embeddings."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.001,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
        bos_token_id=None,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        # Three times the usual 0.02: with a hidden size of 128 the residual stream would start almost empty, and
        # copying (module, operator) would be learnt after 150 steps instead of 50.
        initializer_range=0.06,
    )


def make_model(seed: int, vocab_size: int, pad_id: int, eos_id: int) -> torch.nn.Module:
    """A freshly initialised model in float32; the same weights for the same seed. The global RNG is left as it was."""
    from transformers import Qwen3MoeForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = Qwen3MoeForCausalLM(make_config(vocab_size, pad_id, eos_id))
    return model
