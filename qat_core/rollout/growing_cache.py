"""A KV cache whose memory is made once, and that can lose the rows of ended responses.

transformers' own copies all keys and values at every token.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def growing_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache of `capacity` tokens; layers that slide are as in transformers."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        _GrowingLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` (B, heads, tokens, head size) are views of a larger memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._memory = [
            states.new_empty(*states.shape[:2], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (memory[:, :, :0] for memory in self._memory)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.keys.shape[2]
        end = first + key_states.shape[2]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, first:end] = states
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows."""
        end = self.keys.shape[2]
        self._memory = [memory[indices] for memory in self._memory]
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)
