"""Checkpoints with random weights for benchmarks that need shapes, not skill."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qat_core.rl.tokenizer import character_tokenizer


def write_random_checkpoint(config: dict[str, Any], folder: Path, seed: int, device: str) -> None:
    """A BF16 checkpoint whose rows differ in size, so that rounding matters, with a tokenizer."""
    write_architecture(config, folder)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    spread_rows(model)
    model.save_pretrained(folder)


def write_architecture(config: dict[str, Any], folder: Path) -> None:
    """config.json and tokenizer alone."""
    folder.mkdir(parents=True)
    tokenizer = character_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config | special))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def spread_rows(model: nn.Module) -> None:
    """Scales the rows of all matrices by log-normal factors of sigma 0.5: heavy-tailed weights."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            factor = torch.randn(*parameter.shape[:-1], 1, device=parameter.device)
            parameter.mul_((0.5 * factor).exp().to(parameter.dtype))
