"""Keys of NVFP4, and other quantizations, are refused where training and rollouts are in BF16."""

import pytest

from qat_core.verl.configuration import complete
from tests.verl_configurations import COMMAND, QAT, ROLLOUT, composed

VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
BF16 = {"off": ["+nvfp4=off"], "enable: false": ["+nvfp4=w4a16", f"{QAT}.enable=false"]}
REFUSED = {
    "fp8 of vLLM's": (f"+{VLLM}.quantization=fp8", r"vllm\.quantization: fp8: syncs bring BF16"),
    "NVFP4 of vLLM's": (
        f"+{VLLM}.quantization=compressed-tensors",
        r"vllm\.quantization: compressed-tensors: syncs bring BF16; .* use \+nvfp4=w4a16 for NVFP4",
    ),
    "quantization_config": (
        f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8",
        r"hf_overrides\.quantization_config: .*: syncs bring BF16",
    ),
}


@pytest.mark.verl_table(
    "`quantization`, `hf_overrides.quantization_config` in `engine_kwargs.vllm`",
    "refused, with `+nvfp4=off` too",
    cases=["off", "fp8 of vLLM's", "quantization_config"],
)
@pytest.mark.parametrize("choice", BF16)
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_beside_bf16_rollouts(choice: str, case: str) -> None:
    override, message = REFUSED[case]
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
    backend, parameters = f"{ROLLOUT}.checkpoint_engine.backend", "{param_dtype: fp16}"
    content = composed(
        *("+nvfp4=off", *COMMAND[1:], f"{ROLLOUT}.load_format=auto", f"{ROLLOUT}.dtype=float16"),
        *(f"{backend}=mooncake", f"{QAT}.mode=w4a4"),
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={parameters}",
    )
    complete(content)
