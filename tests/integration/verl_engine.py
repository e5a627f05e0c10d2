"""`python -m tests.integration.verl_engine MODEL_DIR OUT`: what verl's registry makes, as JSON.

One rank on the CPU. For each case the engine that verl would make of a command's overrides is
built and asked for its weights; a refusal is noted instead.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry

from qat_core.verl.configuration import complete

QAT = "actor_rollout_ref.actor.fsdp_config.qat"
CASES: dict[str, list[str]] = {
    "qat": [],
    "amax": [f"{QAT}.scale_policy=amax"],
    "no-qat": [f"{QAT}.train=false"],
    "bf16": [f"{QAT}.enable=false"],
    "users module": ["actor_rollout_ref.model.external_lib=colorsys"],
    "reference": ["actor_rollout_ref.actor.fsdp_config.forward_only=true"],
    # what `complete` would have refused, where it was not called
    "lora": ["actor_rollout_ref.model.lora_rank=8"],
    "group size": [f"{QAT}.group_size=32"],
    "scale": [f"{QAT}.scale_policy=largest"],
    "mode": [f"{QAT}.mode=w4a4"],
    "everything ignored": [f"{QAT}.ignore_patterns=['re:.*']"],
}
COMPLETED = ("qat", "amax", "no-qat", "bf16", "users module", "reference")


def configuration(model_dir: str, case: str) -> DictConfig:
    """verl's, as composed for a command."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    overrides = [
        *("+nvfp4=w4a16", "+platform=cpu", "actor_rollout_ref.rollout.name=vllm"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"actor_rollout_ref.model.path={model_dir}",
        *CASES[case],
    ]
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    if case in COMPLETED or case.startswith("r3"):
        complete(config)
    return config


def make(config: DictConfig) -> Any:
    """As verl's TrainingWorker does."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    return EngineRegistry.new(
        model_type="language_model",
        backend=actor.engine.strategy,
        model_config=model,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )


def outcome(model_dir: str, case: str) -> dict[str, Any]:
    """The engine's class and stream, or its refusal."""
    try:
        engine = make(configuration(model_dir, case))
        found: dict[str, Any] = {"engine": type(engine).__name__}
        engine.initialize()
    except ValueError as error:
        return {"error": str(error)}
    if case == "qat":
        found |= packed_shards(engine)
    if case == "users module":
        found["imported"] = "colorsys" in sys.modules
    stream, adapters = engine.get_per_tensor_param()
    assert adapters is None
    names = [name for name, _ in stream]
    return found | {"first": names[0], "packed": sum(name.endswith(":codes") for name in names)}


def packed_shards(engine: Any) -> dict[str, int]:
    """How many shards are kept packed after a forward pass, and after verl has offloaded."""
    tokens = torch.tensor([[3, 14, 4, 17]])
    with torch.no_grad():
        engine.module(input_ids=tokens)
    parameter = engine.module.get_parameter(engine.plan.quantized[0])
    scales = parameter.to_local().scales
    after_forward = len(scales.packed_shards)
    engine.to("cpu", model=True, optimizer=False, grad=False)
    after_offload = len(scales.packed_shards)
    with torch.no_grad():
        engine.module(input_ids=tokens)
    return {
        "after_forward": after_forward,
        "after_offload": after_offload,
        "after_next_forward": len(scales.packed_shards),
    }


def main(model_dir: str, out: str) -> None:
    """All cases."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes = {case: outcome(model_dir, case) for case in CASES}
    Path(out).write_text(json.dumps(outcomes, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
