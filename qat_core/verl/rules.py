"""What a verl configuration with NVFP4 may not ask for: a key a rule."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
FSDP, REFERENCE = f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config"
QAT = f"{FSDP}.qat"
ENGINE = "qat_core.verl.engine"
WORKER = "qat_core.verl.worker.LayerwiseWorkerExtension"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
REPLAY_MODE = f"{FSDP}.router_replay.mode"
SERVED = f"{VLLM}.hf_overrides.quantization_config"
PARAM_DTYPE = f"{FSDP}.mixed_precision.param_dtype"
APART = ("async_training", "rollout")  # of trainers apart from rollouts, the second of one-step-off
OWN_KEYS = ("train", "scale_policy", "block_scale_method")  # of QAT, beside verl's


class Rule(NamedTuple):
    """A key whose value has to be one that works, and what to do about it."""

    key: str
    allows: Callable[[Any], bool]
    fix: str


def is_not_set(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value in (None, 0, False, "")


def is_count(value: Any) -> bool:
    """Whether a value is a whole number above 0."""
    return type(value) is int and value > 0


def is_section(value: Any) -> bool:
    """Whether a value is a section of keys, or nothing."""
    return value is None or isinstance(value, DictConfig)


def one_of(*values: Any) -> Callable[[Any], bool]:
    """A rule that allows these values."""
    return lambda value: value in values


def unsplit(why: str, *more: str) -> tuple[Rule, ...]:
    """Rules that refuse sequence parallelism of the actor, and of more sections."""
    keys = (f"{section}.ulysses_sequence_parallel_size" for section in (FSDP, ACTOR, *more))
    return tuple(Rule(key, one_of(None, 1), f"{why}; use 1") for key in keys)


def synchronous(why: str) -> tuple[Rule, ...]:
    """Rules that refuse trainers whose rollouts may come from older weights."""
    return (
        Rule("trainer.v1.trainer_mode", one_of(None, "sync"), f"{why}; use sync"),
        *(Rule(section, one_of(None), f"{why}; use ppo_trainer") for section in APART),
    )


# where weights come through this project's worker, in BF16 too
SYNC_RULES = (
    Rule(
        f"{ACTOR}._target_",
        one_of("verl.workers.config.FSDPActorConfig"),
        "syncs come from verl's FSDP actor; use model_engine=dp",
    ),
    Rule(f"{ACTOR}.strategy", one_of("fsdp2"), "syncs come from FSDP2; use fsdp2"),
    *(
        Rule(f"{MODEL}.{key}", is_not_set, f"LoRA is not supported, it is not synced; use {none}")
        for key, none in (("lora_rank", 0), ("lora.rank", 0), ("lora_adapter_path", "null"))
    ),
    Rule(
        f"{MODEL}.hf_config_path",
        is_not_set,
        f"vLLM reads that of {MODEL}.path; use null, and change that file",
    ),
    Rule("critic.fsdp.qat.enable", is_not_set, "the critic stays in BF16; use false"),
    Rule(f"{REFERENCE}.qat.enable", is_not_set, "the reference stays in BF16; use false"),
    Rule(
        f"{ROLLOUT}.qat.enable",
        is_not_set,
        f"verl would patch vLLM for its own QAT; use null, and set {QAT}.enable",
    ),
    Rule(
        f"{ROLLOUT}.quantization",
        is_not_set,
        "syncs cannot write into it; use null, and +nvfp4=w4a16 for NVFP4",
    ),
    Rule(
        f"{ROLLOUT}.quantization_config_file",
        is_not_set,
        f"nothing would read it; use null, and {QAT}.quantization_config_path for NVFP4",
    ),
    Rule(  # follows model.mtp where it is not set itself
        f"{ROLLOUT}.mtp.enable_rollout",
        is_not_set,
        f"the draft model is not synced; use {MODEL}.mtp.enable_rollout=false",
    ),
    Rule(f"{VLLM}.speculative_config", is_not_set, "draft models are not synced; remove the key"),
    Rule(
        f"{ROLLOUT}.disaggregation.enabled",
        is_not_set,
        "syncs to engines that prefill and decode apart were never tried; use false",
    ),
    Rule(
        f"{VLLM}.hf_overrides",
        is_section,
        "a text; give a section, such as {max_position_embeddings: 4096}",
    ),
    Rule(f"{ROLLOUT}.name", one_of("vllm"), "only vLLM's workers take these syncs; use vllm"),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda v: v != "delta_sharded",
        "syncs bring whole weights; use naive, nccl or nixl",
    ),
    Rule(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        one_of(1),
        "a sync brings every layer to every worker; use 1, and tensor_model_parallel_size",
    ),
    Rule(
        f"{ROLLOUT}.data_parallel_size",
        one_of(1),
        "never tried with these syncs; use 1: verl starts one engine for each share of the GPUs",
    ),
    Rule(
        f"{VLLM}.worker_extension_cls",
        one_of(WORKER),
        "weights come through this project's; remove the key",
    ),
)
# of a run that is not on a CPU
GPU_RULES = (
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda v: v != "cpu",
        "for machines without a GPU; use naive, nccl or nixl, or +platform=cpu",
    ),
)
# of verl's own section
OFF_RULES = tuple(
    Rule(
        f"{QAT}.{key}",
        allows,
        "not with verl's own _target_, which +nvfp4=off leaves; use +nvfp4=w4a16 and its "
        "_target_, or remove the key",
    )
    for key, allows in (("enable", is_not_set), *((key, one_of(None)) for key in OWN_KEYS))
)
# of +nvfp4=w4a16, with `enable: false` too
W4A16_RULES = (
    Rule(
        f"{QAT}._target_",
        one_of(f"{ENGINE}.NvFp4Config"),
        "leave the section and its _target_ to verl and +nvfp4=w4a16",
    ),
)
BF16_RULES = tuple(
    Rule(key, is_not_set, "syncs bring BF16; remove the key, and use +nvfp4=w4a16 for NVFP4")
    for key in (f"{VLLM}.quantization", SERVED)
)
_IN_BF16 = "what is not in NVFP4 is trained and served in BF16"
NVFP4_RULES = (
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda v: v not in ("mooncake", "kimi_ckpt_engine"),
        "it casts all that it sends to BF16, packed bytes too; use naive, nccl or nixl",
    ),
    Rule(f"{ROLLOUT}.dtype", one_of("bfloat16"), f"{_IN_BF16}; use bfloat16"),
    Rule(PARAM_DTYPE, one_of(None, "bf16", "bfloat16"), f"{_IN_BF16}; use bf16"),
    Rule(
        f"{FSDP}.model_dtype",
        one_of(None, "fp32", "float32", "bf16", "bfloat16"),
        "NVFP4 is rounded from FP32 or BF16 weights; use fp32",
    ),
    Rule(
        f"{VLLM}.quantization",
        one_of(None, "compressed-tensors"),
        "NVFP4 is the quantization; remove the key",
    ),
    Rule(
        f"{ROLLOUT}.load_format",
        one_of("dummy"),
        "vLLM cannot read a BF16 checkpoint into NVFP4, weights come with the syncs; use dummy",
    ),
)
_NO_ROUTES = "what the model did not sample has no routes"
# with router_replay.mode R3 of the FSDP2 actor
REPLAY_RULES = (
    Rule(REPLAY_MODE, one_of("R3"), "FSDP2 replays the rollouts' routes; use +routing_replay=r3"),
    Rule(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        lambda v: v is True,
        "the rollouts have to return their routes; use true",
    ),
    *unsplit("routes are not split among ranks"),
    Rule(f"{ROLLOUT}.multi_turn.enable", is_not_set, f"{_NO_ROUTES}; use false"),
    Rule(
        f"{ROLLOUT}.agent.default_agent_loop",
        one_of(None, "single_turn_agent"),
        f"{_NO_ROUTES}; use single_turn_agent",
    ),
    *synchronous("old log-probs could be of other routes than the update's"),
)


def require_switches(qat: Any) -> None:
    """ValueError where a switch of `fsdp_config.qat` is a text, which is true whatever it says."""
    for key in ("enable", "train"):
        value = getattr(qat, key, True)
        if not isinstance(value, bool):
            raise ValueError(f"{QAT}.{key}: {value!r}: use true or false")


def together(*checks: Callable[[], object]) -> None:
    """Runs them all; ValueError with the lines of all that fail, each once."""
    lines: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ValueError as error:
            lines |= dict.fromkeys(str(error).splitlines())
    if lines:
        raise ValueError("\n".join(lines))


def refusal(error: ValueError) -> str:
    """The text with which a program ends: each line is an error of its own."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())


def require(config: DictConfig, rules: Iterable[Rule]) -> None:
    """ValueError with a line for each rule that is broken."""
    broken = list(_broken(config, rules))
    if broken:
        raise ValueError("\n".join(broken))


def _broken(config: DictConfig, rules: Iterable[Rule]) -> Iterator[str]:
    for rule in rules:
        value = OmegaConf.select(config, rule.key, throw_on_missing=False)
        if not rule.allows(value):
            said = "" if isinstance(value, DictConfig) else f"{value}: "  # a section is long
            yield f"{rule.key}: {said}{rule.fix}"
