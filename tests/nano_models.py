"""Nano models with random weights and the task they train on, for tests of trainer and rollouts."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.base.random_model import write_architecture
from experiments.rl.config import GrpoConfig, RolloutConfig, TaskConfig
from experiments.rl.trainer import GrpoTrainer, TrainerConfig
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json, write_json
from qat_core.planning.recipe import Recipe
from qat_core.rollout.start import EngineKind

# of vLLM, for these
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "kv_cache_memory_bytes": 2**26,
    "enforce_eager": True,
}
TASK = TaskConfig(name="chain-sum", terms=(3, 4), largest=9, train_prompts=64, test_prompts=8)
CONFIG = GrpoConfig(
    steps=4,
    prompts_per_step=4,
    responses_per_prompt=4,
    mini_batch_prompts=2,
    micro_batch_responses=8,
    lr=1e-4,
    save_every=2,
    rollout=RolloutConfig(max_prompt_tokens=16, max_response_tokens=16),
)


def nano_trainer(
    base_dir: Path,
    checkpoint_dir: Path,
    train_recipe: Recipe | None,
    rollout_recipe: Recipe | None,
    grpo: GrpoConfig = CONFIG,
    engine: EngineKind = "eager",
) -> GrpoTrainer:
    """A trainer of that base on `TASK`."""
    return GrpoTrainer(
        TrainerConfig(
            base_dir=base_dir,
            checkpoint_dir=checkpoint_dir,
            train_recipe=train_recipe,
            rollout_recipe=rollout_recipe,
            task=TASK,
            grpo=grpo,
            engine=engine,
        )
    )


def write_nano(name: str, folder: Path, num_layers: int, seed: int = 0, **sizes: Any) -> None:
    """A BF16 checkpoint of `nano-dense` or `nano-moe` in a new folder; `sizes` change it."""
    config = read_json(ROOT / "experiments" / "models" / f"{name}.json")
    write_architecture(config | {"num_hidden_layers": num_layers} | sizes, folder)
    torch.manual_seed(seed)
    shape = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)


def said_to_be_tied(folder: Path, copy: Path) -> Path:
    """The checkpoint with `tie_word_embeddings: true`, in spite of its own output head."""
    shutil.copytree(folder, copy)
    settings = read_json(copy / "config.json") | {"tie_word_embeddings": True}
    write_json(copy / "config.json", settings)
    return copy


def without_token(nano_dir: Path, folder: Path, token: str) -> Path:
    """The checkpoint with a tokenizer that has no such token."""
    copy = shutil.copytree(nano_dir, folder / "model")
    settings = read_json(copy / "tokenizer_config.json")
    del settings[token]
    write_json(copy / "tokenizer_config.json", settings)
    return copy
