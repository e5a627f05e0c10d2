"""Checkpoints with random weights for benchmarks that need shapes, not skill."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.rl.tokenizer import character_tokenizer
from experiments.study.model_config import read_model_config
from experiments.support.gpu_locks import require_device

SIGMA = 0.5
NOISE = 0.1  # of vectors
LARGEST_SIGMA = 10  # beyond it factors of some rows are infinite


def write_random_checkpoint(
    config: dict[str, Any], folder: Path, seed: int, device: str, sigma: float = SIGMA
) -> None:
    """A BF16 checkpoint with a tokenizer.

    Rows differ in size, so that rounding matters; norms are not 1, nor biases 0, so that they do.
    """
    write_architecture(config, folder)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    spread_rows(model, sigma)
    move_vectors(model)
    model.save_pretrained(folder)


def write_architecture(config: dict[str, Any], folder: Path) -> None:
    """config.json and tokenizer alone."""
    folder.mkdir(parents=True)
    tokenizer = character_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config | special))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def spread_rows(model: nn.Module, sigma: float = SIGMA) -> None:
    """Scales the rows of all matrices by log-normal factors of sigma: heavy-tailed weights."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            factor = torch.randn(*parameter.shape[:-1], 1, device=parameter.device)
            parameter.mul_((sigma * factor).exp().to(parameter.dtype))


@torch.no_grad()
def move_vectors(model: nn.Module) -> None:
    """Adds noise to the weights of norms and to biases, which a new model has as ones and zeros."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(NOISE * torch.randn_like(parameter))


def main(arguments: argparse.Namespace) -> None:
    """Writes a checkpoint of a shape."""
    sigma = SIGMA if arguments.sigma is None else arguments.sigma
    if not 0 <= sigma <= LARGEST_SIGMA:
        raise ValueError(f"--sigma: {sigma}: needs a number from 0 to {LARGEST_SIGMA}")
    require_device(arguments.device)
    config = read_model_config(arguments.config, "name the config.json of another model")
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    if arguments.folder.exists():
        raise ValueError(f"{arguments.folder}: is there already; name a new folder")
    write_random_checkpoint(config, arguments.folder, 0, arguments.device, sigma)
