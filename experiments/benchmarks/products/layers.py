"""The quantized layers of Qwen3-8B and Qwen3-30B-A3B, random weights for them, and their floors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.nvfp4 import PackedTensor, dequantize, global_scale, group_amax, quantize
from qat_core.options import ScalePolicy

MODELS = ("qwen3-8b", "qwen3-30b-a3b")
BYTES_PER_WEIGHT = {"nvfp4": 9 / 16, "bf16": 2.0}


@dataclass(frozen=True)
class Layer:
    """One matrix product of a decoder layer, as vLLM fuses it: y = x @ weight.T.

    Attributes:
        model: the architecture's name.
        name: of the product.
        n, k: the weight is (n, k), or (experts, n, k).
        experts: 0 for a dense layer.
        experts_per_token: how many of them each token visits; 1 for a dense layer.
        rows_per_token: rows of x a token; those of `down` have been through an expert already.
    """

    model: str
    name: str
    n: int
    k: int
    experts: int = 0
    experts_per_token: int = 1
    rows_per_token: int = 1

    @property
    def key(self) -> str:
        """Model and product, as the command line names it."""
        return f"{self.model}.{self.name}"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(n, k), with the experts in front."""
        return (self.experts, self.n, self.k) if self.experts else (self.n, self.k)

    def flops(self, tokens: int) -> float:
        """Multiplications and additions."""
        return 2.0 * tokens * self.experts_per_token * self.n * self.k

    def bytes_moved(self, tokens: int, kind: str, experts_hit: float) -> float:
        """Each weight that is used, x and y once; `kind` is a key of BYTES_PER_WEIGHT."""
        matrices = experts_hit if self.experts else 1
        weights = matrices * self.n * self.k * BYTES_PER_WEIGHT[kind]
        return weights + 2.0 * tokens * (
            self.rows_per_token * self.k + self.experts_per_token * self.n
        )


def layers_of(model: str) -> list[Layer]:
    """The products of one decoder layer, from the architecture's config."""
    config = read_json(ROOT / "experiments" / "models" / f"{model}.json")
    hidden = config["hidden_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    attention = [
        Layer(model, "qkv", query + 2 * key_value, hidden),
        Layer(model, "o", hidden, query),
    ]
    if "num_experts" not in config:
        inner = config["intermediate_size"]
        return [
            *attention,
            Layer(model, "gate_up", 2 * inner, hidden),
            Layer(model, "down", hidden, inner),
        ]
    inner, top_k = config["moe_intermediate_size"], config["num_experts_per_tok"]
    experts = {"experts": config["num_experts"], "experts_per_token": top_k}
    return [
        *attention,
        Layer(model, "gate_up", 2 * inner, hidden, **experts),
        Layer(model, "down", hidden, inner, rows_per_token=top_k, **experts),
    ]


def random_weight(
    layer: Layer, device: str, scale: ScalePolicy = "pow2"
) -> tuple[PackedTensor, Tensor]:
    """A packed weight with heavy-tailed rows and its BF16 values, as a trainer would round them."""
    weight = torch.randn(layer.weight_shape, device=device, dtype=torch.bfloat16)
    spread = torch.randn(*layer.weight_shape[:-1], 1, device=device, dtype=torch.bfloat16)
    weight *= 0.02 * torch.exp(0.5 * spread)
    packed = quantize(weight, global_scale(group_amax([[weight]])[0], scale))
    return packed, dequantize(packed)


def floors_us(layer: Layer, tokens: int, experts_hit: float, peak: dict[str, float]) -> Any:
    """What no kernel undercuts: the longer of bytes over bandwidth and FLOPs over peak.

    Args:
        layer: the product.
        tokens: of the batch.
        experts_hit: how many different experts they visit.
        peak: `bytes_per_s` and `flops_per_s`, measured in the same run.
    """
    math = layer.flops(tokens) / peak["flops_per_s"]
    return {
        kind: 1e6 * max(math, layer.bytes_moved(tokens, kind, experts_hit) / peak["bytes_per_s"])
        for kind in BYTES_PER_WEIGHT
    }
