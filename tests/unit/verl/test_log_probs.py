"""Log-probs of blocks of tokens are those that verl computes token by token."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from verl.utils import torch_functional

from experiments.study.verl_settings import known_variants, load_recipe
from qat_core.verl import log_probs
from qat_core.verl.log_probs import log_probs_in_blocks, verls_own
from tests.verl_configurations import composed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# packed tokens of a small vocabulary, in two blocks; of a large one, in blocks of 6; padded ones
SHAPES = [(60_000, 18), (20, 151_936), (16, 30, 18)]
MODULE = "actor_rollout_ref.model.external_lib"
ROW = pytest.mark.verl_table(
    "`+attention=sdpa` without flash-attn: log-probs of BF16 logits, of many tokens at once",
    "equal to verl's to the bit",
)


def values_and_gradient(
    function: Any, device: str, dtype: torch.dtype, *shape: int
) -> list[Tensor]:
    """Of random logits and tokens, under autocast as in verl's engine."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator).to(device)
    weights = torch.randn(shape[:-1], generator=generator).to(device)
    with torch.autocast(device, torch.bfloat16):
        values = function(logits, labels)
    (values * weights).sum().backward()
    return [values.detach(), logits.grad]


@ROW
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_verls_to_the_bit(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "BLOCK", 2**20)
    own = values_and_gradient(verls_own, device, dtype, *shape)
    ours = values_and_gradient(log_probs_in_blocks, device, dtype, *shape)
    for expected, found in zip(own, ours, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_row_larger_than_a_block_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "BLOCK", 17)
    logits = torch.zeros(2, 1, 18, dtype=torch.bfloat16)
    assert log_probs_in_blocks(logits, torch.zeros(2, 1, dtype=torch.long)).shape == (2, 1)


@ROW
def test_verls_engine_calls_it_once_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    logits, labels = torch.randn(50, 18, dtype=torch.bfloat16), torch.zeros(50, dtype=torch.long)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch_functional.logprobs_from_logits(logits, labels)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_log_softmax"] == 1


@ROW
def test_attention_without_flash_attn_names_it() -> None:
    content = composed("+nvfp4=off", "+attention=sdpa")
    assert content.actor_rollout_ref.model.external_lib == log_probs.__name__


@pytest.mark.parametrize("variant", known_variants())
def test_modules_that_a_variant_has_verl_import_exist(variant: str) -> None:
    setting = load_recipe("nano", [variant]).get(MODULE)
    for module in [] if setting is None else setting.value:
        assert find_spec(module) is not None


def test_a_variant_with_modules_of_its_own_names_it_too() -> None:
    assert log_probs.__name__ in load_recipe("nano", ["smoke"])[MODULE].value
