"""What every rank does with checkpoints of verl: leave one of a model, and resume from one."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from tests.integration.fsdp_steps import sharded, step
from tests.tiny_models import tiny_model


def save(rank: int, world: int, model_dir: str, checkpoint: str) -> None:
    """Saves a model as verl's FSDP2 actor would, FP32 masters over all ranks, prepared for QAT."""
    _start(rank, world, checkpoint)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prepare(model, Recipe.full())
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    contents = OmegaConf.create({"save_contents": ["model"], "load_contents": ["model"]})
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    manager = FSDPCheckpointManager(model, processing_class=tokenizer, checkpoint_config=contents)
    manager.save_checkpoint(f"{checkpoint}/actor")
    dist.destroy_process_group()


def resume(rank: int, world: int, checkpoint: str) -> None:
    """Trains on after a save, and again from there; notes whether both are the same to the bit."""
    _start(rank, world, checkpoint)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    contents = ["model", "optimizer", "extra"]
    keys = OmegaConf.create({"save_contents": contents, "load_contents": contents})
    # the second has weights, moments and scales of its own, which loading has to replace
    models = [sharded(lambda: tiny_model("qwen3-moe", seed=seed)) for seed in (0, 1)]  # noqa: B023
    managers = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer)
        step(model)
        model.zero_grad()
        managers.append(FSDPCheckpointManager(model, optimizer, checkpoint_config=keys))
    managers[0].save_checkpoint(f"{checkpoint}/actor")
    managers[1].load_checkpoint(f"{checkpoint}/actor")
    outputs = [step(manager.model, manager.optimizer) for manager in managers]
    shards = zip(*(model.state_dict().values() for model in models), strict=True)
    same = {
        "output": torch.equal(*outputs),
        "weights": all(torch.equal(a.to_local(), b.to_local()) for a, b in shards),
    }
    Path(f"{checkpoint}/same{rank}.json").write_text(json.dumps(same))
    dist.destroy_process_group()


def _start(rank: int, world: int, folder: str) -> None:
    """As a worker of verl's, before it is imported."""
    os.environ |= {"VERL_PLATFORM": "cpu", "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu"}
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
