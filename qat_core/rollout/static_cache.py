"""A KV cache in static memory, and the attention of one token over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache

STATIC_ATTENTION = "static_decode"


def has_static_form(model: Any) -> bool:
    """Whether all layers attend to all tokens before, which is all that this decoding knows."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"}


class StaticCache:
    """Keys and values (B, heads, capacity, head size) of all layers; Hugging Face calls `update`.

    Attributes:
        slot: where the next token goes, int64 (1,).
    """

    def __init__(self, prefilled: DynamicCache, capacity: int) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in prefilled.layers:
            batch_size, heads, _, head_size = layer.keys.shape
            shape = (batch_size, heads, capacity, head_size)
            self.keys.append(layer.keys.new_zeros(shape))
            self.values.append(layer.values.new_zeros(shape))
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.keys[0].device)

    def load(self, prefilled: DynamicCache, num_tokens: int) -> None:
        """Takes over the keys and values of the prompts; zeros follow, as masked NaN stays NaN."""
        for keys, values, layer in zip(self.keys, self.values, prefilled.layers, strict=True):
            keys.zero_()[:, :, :num_tokens] = layer.keys
            values.zero_()[:, :, :num_tokens] = layer.values
        self.slot.fill_(num_tokens)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one token's keys and values (B, heads, 1, head size); returns all."""
        self.keys[layer_idx].index_copy_(2, self.slot, keys)
        self.values[layer_idx].index_copy_(2, self.slot, values)
        return self.keys[layer_idx], self.values[layer_idx]


def grouped_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one token over the cache (B, key heads, L, D), by PyTorch's own kernels.

    Queries that share a key head go in as if they were tokens one after the other, which reads the
    cache once where a copy of it for each query head would be made. True in the mask (B, 1, 1, L)
    is a token that is seen. Returns (B, 1, query heads, D), and None for the weights.
    """
    batch_size, query_heads, head_size = query.shape[0], query.shape[1], query.shape[3]
    grouped = query.reshape(batch_size, key.shape[1], -1, head_size)
    seen = attention_mask.expand(-1, -1, grouped.shape[2], -1)
    mixed = scaled_dot_product_attention(grouped, key, value, attn_mask=seen, scale=scaling)
    return mixed.reshape(batch_size, 1, query_heads, head_size), None


AttentionInterface.register(STATIC_ATTENTION, grouped_query_attention)


@contextmanager
def static_attention(model: Any) -> Iterator[None]:
    """Lets a model attend by `grouped_query_attention` for the block."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = STATIC_ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = usual
