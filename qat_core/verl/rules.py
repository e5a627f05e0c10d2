"""What a verl configuration with NVFP4 may not ask for: a key a rule."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
QAT = f"{ACTOR}.fsdp_config.qat"
ENGINE = "qat_core.verl.engine"
WORKER = "qat_core.verl.worker.LayerwiseWorkerExtension"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
REPLAY_MODE = f"{ACTOR}.fsdp_config.router_replay.mode"
SERVED = f"{VLLM}.hf_overrides.quantization_config"


class Rule(NamedTuple):
    """A key whose value has to be one that works, and what to do about it."""

    key: str
    allows: Callable[[Any], bool]
    fix: str


def _is_not_set(value: Any) -> bool:
    return value in (None, 0, False, "")


# where weights come through this project's worker, in BF16 too
SYNC_RULES = (
    Rule(
        f"{ROLLOUT}.name", lambda v: v == "vllm", "only vLLM's workers take these syncs; use vllm"
    ),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda v: v != "delta_sharded",
        "syncs bring whole weights; use naive, nccl or nixl",
    ),
    Rule(  # follows model.mtp where it is not set itself
        f"{ROLLOUT}.mtp.enable_rollout",
        _is_not_set,
        f"the draft model is not synced; use {MODEL}.mtp.enable_rollout=false",
    ),
    Rule(f"{VLLM}.speculative_config", _is_not_set, "draft models are not synced; remove the key"),
    Rule(
        f"{ROLLOUT}.disaggregation.enabled",
        _is_not_set,
        "syncs to engines that prefill and decode apart were never tried; use false",
    ),
    Rule(
        f"{VLLM}.worker_extension_cls",
        lambda v: v == WORKER,
        "weights come through this project's; remove the key",
    ),
)
NVFP4_RULES = (
    Rule(
        f"{ACTOR}._target_",
        lambda v: v == "verl.workers.config.FSDPActorConfig",
        "NVFP4 trains with verl's FSDP actor; use model_engine=dp",
    ),
    Rule(f"{ACTOR}.strategy", lambda v: v == "fsdp2", "NVFP4 trains with FSDP2; use fsdp2"),
    Rule(
        f"{QAT}._target_",
        lambda v: v == f"{ENGINE}.NvFp4Config",
        "only +nvfp4=w4a16 sets it; remove it",
    ),
    Rule(
        f"{QAT}.mode",
        lambda v: v == "w4a16",
        "4-bit activations are not supported, and experimental in verl's own QAT; use w4a16",
    ),
    Rule(f"{ACTOR}.qat.enable", _is_not_set, f"verl does not read it; set {QAT}.enable"),
    Rule("critic.fsdp.qat.enable", _is_not_set, "the critic stays in BF16; use false"),
    Rule(f"{MODEL}.lora_rank", _is_not_set, "LoRA is not supported with NVFP4; use 0"),
    Rule(f"{MODEL}.lora.rank", _is_not_set, "LoRA is not supported with NVFP4; use 0"),
    Rule(f"{MODEL}.lora_adapter_path", _is_not_set, "LoRA is not supported with NVFP4; use null"),
    Rule(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        lambda v: v == 1,
        "a sync brings every layer to every worker; use 1, and tensor_model_parallel_size",
    ),
    Rule(
        f"{ROLLOUT}.data_parallel_size",
        lambda v: v == 1,
        "never tried with NVFP4; use 1: verl starts one engine for each share of the GPUs",
    ),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda v: v not in ("mooncake", "kimi_ckpt_engine"),
        "it casts all that it sends to BF16, packed bytes too; use naive, nccl or nixl",
    ),
    Rule(
        f"{ROLLOUT}.dtype",
        lambda v: v == "bfloat16",
        "what is not in NVFP4 is trained and served in BF16; use bfloat16",
    ),
    Rule(f"{ROLLOUT}.quantization", _is_not_set, "NVFP4 is the quantization; use null"),
    Rule(
        f"{VLLM}.quantization",
        lambda v: v in (None, "compressed-tensors"),
        "NVFP4 is the quantization; remove the key",
    ),
    Rule(
        f"{ROLLOUT}.load_format",
        lambda v: v == "dummy",
        "vLLM cannot read a BF16 checkpoint into NVFP4, weights come with the syncs; use dummy",
    ),
)
# with router_replay.mode R3 of the FSDP2 actor
REPLAY_RULES = (
    Rule(
        REPLAY_MODE,
        lambda v: v == "R3",
        "FSDP2 replays the rollouts' routes; use routing_replay=r3",
    ),
    Rule(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        lambda v: v is True,
        "the rollouts have to return their routes; use true",
    ),
    Rule(f"{ACTOR}.strategy", lambda v: v == "fsdp2", "routes are replayed with FSDP2; use fsdp2"),
    Rule(
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        lambda v: v in (None, 1),
        "routes are not split among ranks; use 1",
    ),
    Rule(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        lambda v: v in (None, 1),
        "routes are not split among ranks; use 1",
    ),
    Rule(
        f"{ROLLOUT}.multi_turn.enable",
        _is_not_set,
        "what the model did not sample has no routes; use false",
    ),
    Rule(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        lambda v: v == 1,
        "vLLM returns no routes with it; use 1",
    ),
)


def require(config: DictConfig, rules: tuple[Rule, ...]) -> None:
    """ValueError with a line for each rule that is broken."""
    broken = list(_broken(config, rules))
    if broken:
        raise ValueError("\n".join(broken))


def _broken(config: DictConfig, rules: tuple[Rule, ...]) -> Iterator[str]:
    for rule in rules:
        value = OmegaConf.select(config, rule.key, throw_on_missing=False)
        if not rule.allows(value):
            yield f"{rule.key}: {value}: {rule.fix}"
