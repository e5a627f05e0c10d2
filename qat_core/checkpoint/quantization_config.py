"""What config.json says of packed weights: their format, and which modules stay in BF16.

compressed-tensors and ModelOpt each have a form of their own; both are written and read here.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from qat_core.options import BLOCK_SIZE, CheckpointFormat
from qat_core.plan import QuantPlan, plan
from qat_core.recipe import Recipe
from qat_core.weights.hub_names import fused_module, meta_weights, split_experts


def ignored_modules(checked: QuantPlan) -> list[str]:
    """Linear modules that stay in BF16, under the hub's names; a tied output head too."""
    kept = {entry.name for entry in checked.entries if not entry.quantized}
    matrices = [
        name.removesuffix(".weight")
        for name, weight in split_experts(
            (name, weight) for name, weight in meta_weights(checked) if name in kept
        )
        if len(weight.shape) == 2 and "embed" not in name
    ]
    return sorted({*matrices, "lm_head"})


def declared_plan(model: nn.Module, ignored: list[str]) -> QuantPlan:
    """The plan behind a list of ignored modules, as found in a quantization_config."""
    patterns = {f"re:{re.escape(fused_module(name))}$" for name in ignored if ":" not in name}
    patterns |= {name for name in ignored if name.startswith("re:")}
    return plan(model, Recipe.full(ignore=tuple(sorted(patterns))))


def quantization_config(kind: CheckpointFormat, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json; `ignored` are the linear modules left in BF16."""
    if kind == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": BLOCK_SIZE,
            "ignore": list(ignored),
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
    }
    group = {
        "format": "nvfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def format_of(config: dict[str, Any], source: str) -> tuple[CheckpointFormat, list[str]]:
    """Format and ignored modules that a config.json declares; ValueError if it is not NVFP4."""
    declared = config.get("quantization_config") or {}
    if declared.get("quant_method") == "modelopt" and declared.get("quant_algo") == "W4A16_NVFP4":
        return "modelopt", declared.get("ignore", [])
    if declared.get("format") == "nvfp4-pack-quantized":
        return "compressed-tensors", declared.get("ignore", [])
    raise ValueError(f"{source}: quantization_config: not NVFP4 of compressed-tensors or ModelOpt")


def hf_quant_config(ignored: Sequence[str]) -> dict[str, Any]:
    """Content of ModelOpt's hf_quant_config.json."""
    algorithm = {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK_SIZE,
        "exclude_modules": list(ignored),
    }
    return {"producer": {"name": "qat_core"}, "quantization": algorithm}
