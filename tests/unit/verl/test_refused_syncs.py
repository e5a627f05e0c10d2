"""What this project's syncs cannot do is refused by the key that asks for it, in BF16 too."""

import pytest

from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, QAT, ROLLOUT, composed

VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FSDP1, USE_FSDP2 = f"{ACTOR}.strategy=fsdp", r"actor\.strategy: fsdp: .*; use fsdp2"
REFUSED = {
    "fsdp1": (FSDP1, USE_FSDP2),
    "megatron": ("model_engine=megatron", "McoreActorConfig: .* FSDP actor; use model_engine=dp"),
    "sglang": (f"{ROLLOUT}.name=sglang", r"rollout\.name: sglang: .*; use vllm"),
    "trtllm": (f"{ROLLOUT}.name=trtllm", r"rollout\.name: trtllm: .*; use vllm"),
    "pipeline": (f"{ROLLOUT}.pipeline_model_parallel_size=2", "pipeline_model_parallel_size: 2: "),
    "data parallel": (f"{ROLLOUT}.data_parallel_size=2", "data_parallel_size: 2: never tried"),
    "delta": (f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "backend: delta_sharded: "),
    "transport of a CPU": (
        f"{ROLLOUT}.checkpoint_engine.backend=cpu",
        r"backend: cpu: for machines without a GPU; use naive, nccl or nixl",
    ),
    "lora": (f"{MODEL}.lora_rank=8", r"model\.lora_rank: 8: LoRA is not supported, .*; use 0"),
    "lora section": (f"{MODEL}.lora={{rank: 8}}", r"model\.lora\.rank: 8: LoRA is not .*; use 0"),
    "lora merged": (f"{MODEL}.lora={{rank: 8, merge: true}}", r"model\.lora\.rank: 8: LoRA"),
    "adapter": (f"{MODEL}.lora_adapter_path=a", r"lora_adapter_path: a: LoRA .*; use null"),
    "drafter": (f"{MODEL}.mtp.enable_rollout=true", "the draft model is not synced"),
    "drafter of the rollouts": (
        f"{ROLLOUT}.mtp={{enable: true, enable_rollout: true}}",
        r"rollout\.mtp\.enable_rollout: True: the draft model is not synced",
    ),
    "drafter of vLLM's": (
        f"+{VLLM}.speculative_config.method=eagle3",
        "speculative_config: .*: draft models are not synced; remove the key",
    ),
    "prefill and decode apart": (
        f"{ROLLOUT}.disaggregation.enabled=true",
        r"disaggregation\.enabled: True: .* never tried; use false",
    ),
    "worker": (f"{VLLM}.worker_extension_cls=a.B", r"cls: a\.B: .* this project's; remove the key"),
    "fp8": (f"{ROLLOUT}.quantization=fp8", r"rollout\.quantization: fp8: .*; use null"),
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
        f"{ACTOR}.qat.enable=true",
        r"actor\.qat\.enable: True: verl does not read it; set .*fsdp_config\.qat\.enable",
    ),
}


@pytest.mark.verl_table(
    "`actor.strategy=fsdp`, `model_engine=megatron`",
    "refused, with `+nvfp4=off` too",
    cases=["fsdp1", "megatron", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`rollout.name=sglang`, `trtllm`",
    "refused, with `+nvfp4=off` too",
    cases=["sglang", "trtllm", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`rollout.pipeline_model_parallel_size`, `rollout.data_parallel_size` other than 1",
    "refused, with `+nvfp4=off` too",
    cases=["pipeline", "data parallel", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`rollout.disaggregation.enabled=true`",
    "refused, with `+nvfp4=off` too",
    cases=["prefill and decode apart", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`checkpoint_engine.backend=delta_sharded`",
    "refused, with `+nvfp4=off` too: vLLM keeps weights in a layout into which no difference fits",
    cases=["delta", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`checkpoint_engine.backend=cpu` without `+platform=cpu`",
    "refused, with `+nvfp4=off` too",
    cases=["transport of a CPU", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "LoRA, also with `merge=True`",
    "refused, with `+nvfp4=off` too",
    cases=["lora", "lora section", "lora merged", "adapter", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "MTP drafter in rollouts, `speculative_config` in `engine_kwargs.vllm`",
    "refused, with `+nvfp4=off` too: it would never be synced",
    cases=["drafter", "drafter of the rollouts", "drafter of vLLM's", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`rollout.quantization`, `rollout.quantization_config_file`",
    "refused, with `+nvfp4=off` too",
    cases=["fp8", "file", "w4a16", "off"],
)
@pytest.mark.verl_table(
    "`critic.fsdp.qat.enable=true`, `ref.fsdp_config.qat.enable=true`",
    "refused, with `+nvfp4=off` too",
    cases=["QAT of the critic", "QAT of the reference", "w4a16", "off"],
)
@pytest.mark.parametrize("choice", ["w4a16", "off"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_syncs_cannot_do_is_refused_by_name(case: str, choice: str) -> None:
    override, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        complete(composed(f"+nvfp4={choice}", *COMMAND[1:], override))


@pytest.mark.parametrize("switch", [f"{QAT}.train=false", f"{QAT}.enable=false"])
def test_it_is_refused_beside_the_switches_of_nvfp4(switch: str) -> None:
    with pytest.raises(ValueError, match=USE_FSDP2):
        complete(composed(*COMMAND, switch, FSDP1))


def test_the_transport_of_a_cpu_is_taken_on_one() -> None:
    backend = f"{ROLLOUT}.checkpoint_engine.backend=cpu"
    complete(composed(*COMMAND, "trainer.device=cpu", backend))
