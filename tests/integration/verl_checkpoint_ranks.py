"""What every rank does to leave a checkpoint of verl: train nothing, shard, save."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_core.preparation import prepare
from qat_core.recipe import Recipe


def save(rank: int, world: int, model_dir: str, checkpoint: str) -> None:
    """Saves a model as verl's FSDP2 actor would, FP32 masters over all ranks, prepared for QAT."""
    os.environ |= {"VERL_PLATFORM": "cpu", "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu"}
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    Path(checkpoint).mkdir(parents=True, exist_ok=True)
    store = f"file://{checkpoint}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
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
