"""What every rank does with engines and checkpoints of verl; each notes what it saw."""

import json
import os
from pathlib import Path
from typing import Any

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


Weights = dict[str, torch.Tensor]


def look_at_engines(rank: int, world: int, model_dir: str, folder: str) -> None:
    """The rotary embedding of BF16 masters, and streams after a forward pass that trains nothing.

    With `trainer.critic_warmup` the actor computes log-probs, and is then synced as it is.
    """
    from tests.integration.verl_engine import CASES, configuration, make  # sets the environment

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    CASES["not resharded bf16"] = [*CASES["not resharded"], *CASES["bf16"]]
    found: dict[str, Any] = {}
    engine = make(configuration(model_dir, "bf16 masters"))
    engine.initialize()
    frequencies = engine.module.model.rotary_emb.inv_freq
    found["rotary"] = {
        "weights made on": engine._build_module().lm_head.weight.device.type,
        "dtype": str(frequencies.dtype),
        "frequencies": frequencies.tolist(),
    }
    for case in ("not resharded", "not resharded bf16"):
        engine = make(configuration(model_dir, case))
        engine.initialize()
        found[case] = _changes(engine)
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _changes(engine: Any) -> dict[str, Any]:
    """Of the stream, by a forward pass alone: names of weights; and whether it left them whole."""

    def stream() -> Weights:
        return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}

    @torch.no_grad()
    def forward() -> None:
        engine.module(input_ids=torch.tensor([[3, 14, 4, 17]]))

    before = stream()
    forward()
    whole = [type(weight).__name__ for weight in engine.module.parameters()]
    after = stream()
    forward()
    engine.to("cpu", model=True, optimizer=False, grad=False)  # whole weights are let go, too
    return {
        "whole": "DTensor" not in whole,
        "same names": list(before) == list(after),
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
    }
