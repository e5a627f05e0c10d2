"""Tiny models: of transformers, and of three layers; what these do after a weight was written."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qat_core import Recipe, prepare, weight_stream
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.plan import plan

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


UP = "up_proj.weight"


class Mlp(nn.Module):
    """Gate and up share a scale."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(48, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def x(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 32, dtype=next(model.parameters()).dtype)


def fresh(model: nn.Module) -> nn.Module:
    """A model that was prepared with the values that `model` holds now."""
    other = Mlp(next(model.parameters()).dtype)
    other.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    prepare(other, Recipe())
    return other


def assert_follows(model: nn.Module, values: Tensor) -> None:
    """Forward pass, with and without the model's own hook, and stream are those of `values`."""
    assert torch.equal(model.get_parameter(UP).detach().flatten(), values.flatten())
    expected = fresh(model)
    assert torch.equal(model.forward(x(model)), expected(x(model)))
    assert torch.equal(model(x(model)), expected(x(model)))
    for name, weight in weight_stream(model, plan(model, Recipe()), Recipe()):
        assert isinstance(weight, PackedTensor)
        parameter: Any = model.get_parameter(name)
        assert torch.equal(dequantize(weight), parameter.rounded().bfloat16())


def used_mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Prepared and used, so that old scales and rounded values are known."""
    model = Mlp(dtype)
    prepare(model, Recipe())
    model(x(model)).sum().backward()
    return model
