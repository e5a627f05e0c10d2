"""Kernels of NVFP4 are asked for by name, and others are refused; needs no vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qat_core.rollout.vllm.kernel_choice import require_asked, settings_by_name
from qat_core.rollout.vllm.switches import EXPERTS_VARIABLE, LINEAR_VARIABLE


@pytest.mark.parametrize(
    ("experts", "packed", "named"),
    [
        ("", "q", {"linear_backend": "marlin"}),
        ("e", "q e", {"linear_backend": "marlin", "moe_backend": "marlin"}),
        ("e", "q", {"linear_backend": "marlin", "moe_backend": "triton"}),
        ("e", "e", {"moe_backend": "marlin"}),
        ("e f", "e", {}),
        ("e", "", {"moe_backend": "triton"}),
        ("", "", {}),
    ],
)
def test_kernels_are_named_for_what_is_packed(
    experts: str, packed: str, named: dict[str, str]
) -> None:
    assert settings_by_name(experts.split(), packed.split()) == named


def served(linear: str, experts: str) -> torch.nn.Module:
    """A model whose two layers are multiplied by kernels of these names."""
    model = torch.nn.ModuleDict({"qkv": torch.nn.Module(), "experts": torch.nn.Module()})
    found: Any = model["qkv"]
    found.scheme = SimpleNamespace(use_a16=True, kernel=type(linear, (), {})())
    found = model["experts"]
    found.quant_method = SimpleNamespace(nvfp4_backend="", experts_cls=type(experts, (), {}))
    return model


@pytest.mark.parametrize(
    ("asked", "linear", "experts", "refused"),
    [
        ({}, "MarlinNvFp4LinearKernel", "MarlinExperts", ""),
        ({}, "_NoKernel", "MarlinExperts", ""),
        ({}, "HummingNvFp4LinearKernel", "MarlinExperts", "qkv by HummingNvFp4LinearKernel"),
        ({}, "MarlinNvFp4LinearKernel", "HummingIndexedExperts", "experts by HummingIndexed"),
        ({LINEAR_VARIABLE: "humming"}, "HummingLinearKernel", "MarlinExperts", ""),
        ({EXPERTS_VARIABLE: "humming"}, "MarlinNvFp4LinearKernel", "MarlinExperts", "experts by"),
    ],
)
def test_another_kernel_than_was_asked_for_is_refused_by_its_layer(
    asked: dict[str, str],
    linear: str,
    experts: str,
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, name in asked.items():
        monkeypatch.setenv(variable, name)
    model = served(linear, experts)
    if not refused:
        require_asked(model)
        return
    with pytest.raises(ValueError, match=f"^vLLM multiplies {refused}"):
        require_asked(model)
