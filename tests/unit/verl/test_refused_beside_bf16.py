"""Weights also come through this project's worker in BF16: what it cannot take is refused there."""

import pytest

from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, QAT, ROLLOUT, composed

VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
MODEL = "actor_rollout_ref.model"
BF16 = {"off": ["+nvfp4=off"], "enable: false": ["+nvfp4=w4a16", f"{QAT}.enable=false"]}
REFUSED = {
    "fp8": (f"{ROLLOUT}.quantization=fp8", r"rollout\.quantization: fp8: .*; use null"),
    "fp8 of vLLM's": (f"+{VLLM}.quantization=fp8", r"vllm\.quantization: fp8: syncs bring BF16"),
    "NVFP4 of vLLM's": (
        f"+{VLLM}.quantization=compressed-tensors",
        r"vllm\.quantization: compressed-tensors: syncs bring BF16; .* use \+nvfp4=w4a16 for NVFP4",
    ),
    "quantization_config": (
        f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8",
        r"hf_overrides\.quantization_config: .*: syncs bring BF16",
    ),
    "file": (
        f"{ROLLOUT}.quantization_config_file=a.json",
        r"quantization_config_file: a\.json: nothing would read it; use null",
    ),
    "QAT of the critic": (
        "critic.fsdp.qat.enable=true",
        r"critic\.fsdp\.qat\.enable: True: the critic stays in BF16; use false",
    ),
    "QAT of the reference": (
        "actor_rollout_ref.ref.fsdp_config.qat.enable=true",
        r"ref\.fsdp_config\.qat\.enable: True: the reference stays in BF16; use false",
    ),
    "QAT of the rollouts": (
        f"++{ROLLOUT}.qat={{enable: true}}",
        r"rollout\.qat\.enable: True: verl would patch vLLM for its own QAT; use null",
    ),
    "QAT that verl does not read": (
        "actor_rollout_ref.actor.qat.enable=true",
        r"actor\.qat\.enable: True: verl does not read it",
    ),
    "fsdp1": ("actor_rollout_ref.actor.strategy=fsdp", "strategy: fsdp: .*; use fsdp2"),
    "megatron": ("model_engine=megatron", "McoreActorConfig: syncs come from verl's FSDP actor; "),
    "lora": (f"{MODEL}.lora_rank=8", r"model\.lora_rank: 8: LoRA is not supported, .*; use 0"),
    "lora section": (f"{MODEL}.lora.rank=8", r"model\.lora\.rank: 8: LoRA is not .*; use 0"),
    "adapter": (f"{MODEL}.lora_adapter_path=a", r"lora_adapter_path: a: LoRA .*; use null"),
    "worker": (f"{VLLM}.worker_extension_cls=a.B", "this project's; remove the key"),
    "sglang": (f"{ROLLOUT}.name=sglang", r"rollout\.name: sglang: .*; use vllm"),
    "delta": (f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "backend: delta_sharded: "),
    "apart": (f"{ROLLOUT}.disaggregation.enabled=true", r"disaggregation\.enabled: True: "),
    "drafter": (f"{MODEL}.mtp.enable_rollout=true", "the draft model is not synced"),
    "drafter of vLLM's": (f"+{VLLM}.speculative_config.method=eagle3", "speculative_config: "),
}


@pytest.mark.parametrize("choice", BF16.values(), ids=BF16)
@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_beside_bf16_rollouts(choice: list[str], override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete(composed(*choice, *COMMAND[1:], override))
