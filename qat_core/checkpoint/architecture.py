"""What a config.json says about a model's weights, from a copy of the model without memory."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qat_core.checkpoint.shards import read_json
from qat_core.weights.hub_names import refuse_renamed


def meta_model(folder: Path) -> nn.Module:
    """The folder's model on the meta device, in BF16, not quantized.

    Raises:
        ValueError: config.json is missing, invalid, or of an architecture that is not known.
    """
    settings = read_json(folder / "config.json")
    settings.pop("quantization_config", None)
    model_type = settings.pop("model_type", None)
    try:
        config = AutoConfig.for_model(model_type, **settings)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / 'config.json'}: model_type {model_type}: {reason}") from error
    refuse_renamed(model)
    return model


def without_tied_copies(model: nn.Module, stored: dict[str, Any]) -> dict[str, Any]:
    """Stored tensors less the second names of tied weights, which some checkpoints also hold."""
    named_once = {name for name, _ in model.named_parameters()}
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: t for name, t in stored.items() if name not in every_name - named_once}
