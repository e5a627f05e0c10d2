"""The one way in which trainers, engines and tools here load a model from its folder.

`from_pretrained` fills a weight that a folder lacks with random numbers, leaves out a tensor that
the model has no place for, and says so in a log that few read.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat_core.checkpoint.architecture import (
    meta_model,
    quiet,
    require_loadable,
    require_nothing_left,
    without_tied_copies,
)
from qat_core.checkpoint.shards import HF_QUANT_CONFIG, Shards, read_json
from qat_core.weights.hub_names import HubNames


def load_model(folder: Path) -> PreTrainedModel:
    """The folder's model in BF16, on the CPU, each weight from the folder's files.

    Raises:
        ValueError: no checkpoint there, a quantized one, two sets of weights, one that transformers
            cannot load, or one that holds other tensors than its config.json says.
    """
    shards = full_precision_shards(folder)
    with quiet():
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, output_loading_info=True
            )
        except Exception as error:  # of any kind: it reads what a user names
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder}: transformers cannot load it: {reason}") from error
    require_nothing_left(found, str(folder))
    without_tied_copies(HubNames(model), shards, str(folder))
    assert isinstance(model, PreTrainedModel)
    return model


def require_whole(folder: Path) -> None:
    """As `load_model`, with its errors, of names and shapes alone: no weight is read."""
    model, shards = meta_model(folder), full_precision_shards(folder)
    stored = without_tied_copies(HubNames(model), shards, str(folder))
    require_loadable(model, stored, str(folder))


def full_precision_shards(folder: Path) -> Shards:
    """The files of a checkpoint that is not quantized; ValueError that names what is wrong."""
    shards = Shards(folder)
    if "quantization_config" in read_json(folder / "config.json"):
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config: already quantized; name a BF16 or "
            "FP32 checkpoint"
        )
    if (folder / HF_QUANT_CONFIG).is_file():
        raise ValueError(
            f"{folder}: holds {HF_QUANT_CONFIG}, so that vLLM takes its weights for quantized; "
            "name a BF16 or FP32 checkpoint, or remove the file"
        )
    return shards
