"""Tiny random causal language models of each family, BF16, the same for every call."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 128
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **sizes: Qwen3Config(**{"head_dim": 16} | sizes),
    "qwen3-tied": lambda **sizes: Qwen3Config(head_dim=16, tie_word_embeddings=True, **sizes),
    "qwen2": lambda **sizes: Qwen2Config(**sizes),
    "llama": lambda **sizes: LlamaConfig(**sizes),
    "qwen3-moe": lambda **sizes: Qwen3MoeConfig(**{"head_dim": 16} | EXPERTS | sizes),
}


def tiny_model(family: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A model of the family, in training mode; `sizes` change its config."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**(SIZES | sizes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    return model.train()


def tokens(sequences: int = 2, length: int = 16) -> torch.Tensor:
    """Random token ids (sequences, length)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB_SIZE, (sequences, length), generator=generator)
