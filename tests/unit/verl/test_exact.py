"""`+exact=on` in verl: what it implies, what it refuses, and the count at every step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.verl_configurations import ROLLOUT, composed

from omegaconf import OmegaConf  # isort: skip  after the skip of verl

from qat_core.verl.configuration import complete
from qat_core.verl.exact_configuration import ENVIRONMENT

EXACT = ["+exact=on", f"{ROLLOUT}.name=vllm"]


def _completed(*overrides: str) -> Any:
    content = composed(*EXACT, *overrides)
    complete(content)
    return content


@pytest.mark.parametrize("precision", ["w4a16", "off"])
def test_one_key_sets_all_that_exact_runs_need(precision: str) -> None:
    config = _completed(f"+nvfp4={precision}")
    variables = OmegaConf.select(config, ENVIRONMENT)
    assert variables.QAT_CORE_EXACT == "1"
    assert variables.VERL_USE_EXTERNAL_MODULES == "qat_core.verl.exact_count"
    asked = OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm")
    assert asked.compilation_config == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert asked.attention_config == {"backend": "FLASH_ATTN", "flash_attn_version": 3}
    assert "qat_core.verl.exact" in config.actor_rollout_ref.model.external_lib


def test_modules_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    variables = OmegaConf.select(_completed("+nvfp4=off"), ENVIRONMENT)
    assert variables.VERL_USE_EXTERNAL_MODULES == "mine,qat_core.verl.exact_count"


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.temperature=0.7",
        f"{ROLLOUT}.calculate_log_probs=false",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.model.use_liger=true",
        "actor_rollout_ref.actor.fsdp_config.qat.scale_policy=amax",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.mode=3",
        f"+{ROLLOUT}.engine_kwargs.vllm.attention_config.flash_attn_version=2",
    ],
)
def test_what_is_not_exact_is_refused_by_its_key(override: str) -> None:
    key = override.partition("=")[0].lstrip("+")
    with pytest.raises(ValueError, match=key):
        _completed("+nvfp4=w4a16", override)


def test_exact_alone_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\+nvfp4=w4a16"):
        complete(composed(*EXACT))


def _data(theirs: list[list[float]]) -> Any:
    batch = {
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]),
        "rollout_log_probs": torch.tensor(theirs),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "responses": torch.zeros(2, 2, dtype=torch.long),
    }
    return SimpleNamespace(batch=batch)


def test_equal_log_probs_count_zero_and_padding_does_not_count() -> None:
    from qat_core.exact.count import COUNT
    from qat_core.verl.exact_count import with_count

    assert with_count(_data([[-1.0, -2.0], [-3.0, 9.0]]))[COUNT] == 0


def test_a_log_prob_with_other_bits_ends_the_run_with_its_place() -> None:
    from qat_core.verl.exact_count import with_count

    one_bit_off = float(torch.nextafter(torch.tensor(-2.0), torch.tensor(0.0)))
    with pytest.raises(ValueError, match="1 of 3 log-probs differ, first of response 0 at token 1"):
        with_count(_data([[-1.0, one_bit_off], [-3.0, 9.0]]))
