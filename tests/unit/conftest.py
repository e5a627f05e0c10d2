"""Nano checkpoints with random weights, for tests of trainer and rollouts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qat_core.rl.tokenizer import character_tokenizer


@pytest.fixture(scope="session", params=["nano-dense", "nano-moe"])
def nano_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer model of the architecture, random weights, with the character tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    config = json.loads(Path(f"experiments/models/{request.param}.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    shape = AutoConfig.from_pretrained(
        folder, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
