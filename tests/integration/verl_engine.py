"""`python -m tests.integration.verl_engine MODEL_DIR OUT`: what verl's registry makes, as JSON.

One rank on the CPU. For each case the engine that verl would make of a command's overrides is
built and asked for its weights; a refusal is noted instead.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry

from experiments.verl.seeded_weights import SEED, draw
from qat_core.verl.configuration import complete
from qat_core.verl.cpu_transport import CpuCheckpointEngine
from qat_core.verl.worker import LayerwiseWorkerExtension

Tensors = list[tuple[str, torch.Tensor]]
BUCKET_BYTES = 4096  # smaller than some weights, which are then cut
QAT = "actor_rollout_ref.actor.fsdp_config.qat"
BF16_MASTERS = "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
SEED_OF_TEST = 5
USERS_MODULE = "this"  # of Python's library; nothing else imports it
CASES: dict[str, list[str]] = {
    "qat": [],
    "amax": [f"{QAT}.scale_policy=amax"],
    "no-qat": [f"{QAT}.train=false"],
    "bf16": [f"{QAT}.enable=false"],
    "not resharded": ["actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"],
    "users module": [f"actor_rollout_ref.model.external_lib={USERS_MODULE}"],
    "seeded": [
        "actor_rollout_ref.model.external_lib=experiments.verl.seeded_engine",
        f"+actor_rollout_ref.model.override_config.{SEED}={SEED_OF_TEST}",
    ],
    "bf16 masters": [BF16_MASTERS],
    "reference": ["actor_rollout_ref.actor.fsdp_config.forward_only=true", BF16_MASTERS],
    # what `complete` would have refused, where it was not called
    "lora": ["actor_rollout_ref.model.lora_rank=8"],
    "group size": [f"{QAT}.group_size=32"],
    "scale": [f"{QAT}.scale_policy=largest"],
    "mode": [f"{QAT}.mode=w4a4"],
    "everything ignored": [f"{QAT}.ignore_patterns=['re:.*']"],
}
COMPLETED = (
    *("qat", "amax", "no-qat", "bf16", "not resharded", "users module", "seeded", "bf16 masters"),
    "reference",
)


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
    assert case != "users module" or USERS_MODULE not in sys.modules
    try:
        engine = make(configuration(model_dir, case))
        found: dict[str, Any] = {"engine": type(engine).__name__}
        engine.initialize()
    except ValueError as error:
        return {"error": str(error)}
    if case == "qat":
        found |= packed_shards(engine)
    if case in ("qat", "bf16", "not resharded"):
        found["lost"] = lost_updates(engine)
    found["dtypes"] = dtypes(engine.module)
    if case == "users module":
        found["imported"] = USERS_MODULE in sys.modules
    stream, adapters = engine.get_per_tensor_param()
    assert adapters is None
    tensors = [(name, tensor.clone()) for name, tensor in stream]
    names = [name for name, _ in tensors]
    if case == "qat":
        found["arrived"] = same(tensors, transported(tensors))
    if case == "seeded":
        found["drawn"] = is_drawn(dict(tensors)["model.embed_tokens.weight"], engine.module.config)
    return found | {"first": names[0], "packed": sum(name.endswith(":codes") for name in names)}


def dtypes(module: Any) -> list[str]:
    """Of weights, and of the rotary embedding's frequencies."""
    return [str(module.lm_head.weight.dtype), str(module.model.rotary_emb.inv_freq.dtype)]


def is_drawn(weight: torch.Tensor, config: Any) -> bool:
    """Whether the embeddings are those of the seed, and not those of the folder."""
    name, std = "model.embed_tokens.weight", config.initializer_range
    return torch.equal(weight, draw(name, weight.shape, SEED_OF_TEST, std, weight.device))


def transported(tensors: Tensors) -> Tensors:
    """What two rollout workers get of tensors that this process sends them, in small buckets."""
    sender = CpuCheckpointEngine(BUCKET_BYTES, is_master=True)
    receivers = [CpuCheckpointEngine(BUCKET_BYTES) for _ in range(2)]
    metadata = [engine.prepare() for engine in (sender, *receivers)]
    (addresses,) = CpuCheckpointEngine.build_topology(1, 2, metadata)[0]["addresses"]
    sender.init_process_group(addresses)

    async def received(engine: CpuCheckpointEngine) -> Tensors:
        return [(name, tensor.clone()) async for name, tensor in engine.receive_weights()]

    with ThreadPoolExecutor(len(receivers)) as pool:
        coming = [pool.submit(asyncio.run, received(engine)) for engine in receivers]
        asyncio.run(sender.send_weights(iter(tensors)))
        first, second = (future.result(timeout=60) for future in coming)
    for engine in (sender, *receivers):
        engine.finalize()
    assert same(first, second)
    return first


def same(first: Tensors, second: Tensors) -> bool:
    """Whether names, shapes, dtypes and bytes are equal."""
    return len(first) == len(second) and all(
        a == b
        and s.dtype == t.dtype
        and torch.equal(s.reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        for (a, s), (b, t) in zip(first, second, strict=True)
    )


def packed_shards(engine: Any) -> dict[str, int]:
    """How many shards are kept packed after a forward pass, and after verl has offloaded."""
    tokens = torch.tensor([[3, 14, 4, 17]])
    with torch.no_grad():
        engine.module(input_ids=tokens)
    parameter = engine.module.get_parameter(engine.plan.quantized[0])
    state = parameter.to_local().state
    after_forward = len(state.packed_shards)
    engine.to("cpu", model=True, optimizer=False, grad=False)
    after_offload = len(state.packed_shards)
    with torch.no_grad():
        engine.module(input_ids=tokens)
    return {
        "after_forward": after_forward,
        "after_offload": after_offload,
        "after_next_forward": len(state.packed_shards),
    }


def lost_updates(engine: Any) -> list[str]:
    """Weights, and the output, that differ once verl has gone back to older ones and returned.

    As `_compute_old_log_prob` of its trainers apart from their rollouts does.
    """
    tokens = torch.tensor([[3, 14, 4, 17]])
    worker = object.__new__(DetachActorWorker)
    worker.config = OmegaConf.create({"actor": {"strategy": "fsdp2"}})
    worker.actor, worker._strategy_handlers = SimpleNamespace(engine=engine), None

    def state() -> dict[str, torch.Tensor]:
        shards = engine.module.state_dict()
        found = {name: shard.to_local().detach().clone() for name, shard in shards.items()}
        with torch.no_grad():  # may leave whole weights in the place of the shards
            return found | {"output": engine.module(input_ids=tokens).logits}

    old = state()
    worker.save_model_to_cpu(0)
    engine.module.state_dict()  # leaves shards, as a backward pass does
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    current = state()
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    went_back = state()
    worker.restore_model_from_cpu(1)
    returned = state()
    return [
        name
        for name in old
        if not torch.equal(went_back[name], old[name])
        or not torch.equal(returned[name], current[name])
        or torch.equal(old[name], current[name])
    ]


def adapters_refused() -> str:
    """What vLLM's worker says when a sync brings LoRA adapters."""
    worker = object.__new__(LayerwiseWorkerExtension)
    try:
        worker.update_weights_from_ipc(peft_config={"r": 8})
    except ValueError as error:
        return str(error)
    return ""


def critics_engine() -> str:
    """The class of verl's engine for a value model on a GPU."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl has none for a CPU
    return EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__


def main(model_dir: str, out: str) -> None:
    """All cases."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cudnn_before = torch.backends.cuda.cudnn_sdp_enabled()
    outcomes = {case: outcome(model_dir, case) for case in CASES}
    cudnn_after = torch.backends.cuda.cudnn_sdp_enabled()
    outcomes["attention"] = {"cudnn": [cudnn_before, cudnn_after]}
    outcomes["critic"] = {"engine": critics_engine()}
    outcomes["adapters"] = {"error": adapters_refused()}
    Path(out).write_text(json.dumps(outcomes, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
