"""Stacks of decoder layers by arm, for the benchmarks of training steps.

Arms: `bf16` plain; `qat` this library, `qat packed` and `qat rounded` with `keep`; `verl` the
QATLinear of verl, which replaces linear modules and leaves the experts of a MoE in BF16.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from qat_core.options import Keep
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare, state_of

QAT_ARMS: dict[str, Keep | None] = {"qat": None, "qat packed": "packed", "qat rounded": "rounded"}
ATTENTION = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 16}
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 16}
CONFIGS: dict[str, Callable[[int], Any]] = {
    "qwen3-8b": lambda layers: Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        **ATTENTION,
    ),
    "qwen3-30b-a3b": lambda layers: Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_key_value_heads=4,
        num_hidden_layers=layers,
        **ATTENTION,
    ),
    "smollm2-135m": lambda layers: LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=layers,
        vocab_size=16,
    ),
    "tiny": lambda layers: Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, **TINY
    ),
    "tiny-moe": lambda layers: Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        **TINY,
    ),
}


def layer_stack(shape: str, layers: int, device: str, dtype: torch.dtype) -> nn.Module:
    """Random decoder layers in training mode, the same for every call."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModel.from_config(CONFIGS[shape](layers), dtype=dtype)
    return model.train()


def apply_arm(model: nn.Module, arm: str) -> Callable[[], None]:
    """Quantize `model` as the arm does; returns what to call when the weights have changed."""
    if arm in QAT_ARMS:
        prepare(model, Recipe(), keep=QAT_ARMS[arm])
        state = state_of(model)
        assert state is not None
        return state.weights.mark_all_written
    if arm == "verl":
        verl = verl_qat()
        verl.apply_qat(model, {"enable": True})
        verl.enable_qat_fuse(model)
        return lambda: verl.invalidate_all_scales(model)
    return lambda: None


@cache
def arms(*, sharded: bool = False) -> list[str]:
    """The arms that can be measured here: verl needs its package on the path and a GPU.

    Sharded weights travel packed and are kept so by themselves.
    """
    has_verl = importlib.util.find_spec("verl") is not None and torch.cuda.is_available()
    qat = ["qat"] if sharded else QAT_ARMS
    return ["bf16", *qat, *(["verl"] if has_verl else [])]


def verl_qat() -> ModuleType:
    """verl/utils/qat/core.py without the packages around it, which import Ray."""
    if "verl.utils.qat.core" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        assert spec is not None and spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for name in ("verl", "verl.utils", "verl.utils.qat"):
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        base = ModuleType("verl.base_config")
        base.BaseConfig = object  # type: ignore[attr-defined]
        sys.modules["verl.base_config"] = base
    return import_module("verl.utils.qat.core")


def step_inputs(
    model: nn.Module, sequences: int, tokens: int, device: str
) -> tuple[Tensor, Tensor]:
    """Input embeddings and output gradient, BF16 (sequences, tokens, hidden)."""
    hidden: Any = model.config.hidden_size  # type: ignore[union-attr]
    x = torch.randn(
        sequences, tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    return x, torch.randn_like(x)
