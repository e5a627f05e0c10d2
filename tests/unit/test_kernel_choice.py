"""Which kernel of vLLM multiplies NVFP4: asked for by name, else refused."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qat_core.rollout.vllm import plugin
from qat_core.rollout.vllm.kernel_choice import require_asked, settings_by_name
from qat_core.rollout.vllm.plugin import asked_for
from qat_core.rollout.vllm.switches import EXACT_VARIABLE, EXPERTS_VARIABLE, LINEAR_VARIABLE


@pytest.mark.parametrize("variable", [LINEAR_VARIABLE, EXPERTS_VARIABLE])
def test_an_unknown_kernel_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "cutlass")
    with pytest.raises(
        ValueError,
        match=f"{variable}=cutlass: use vllm-humming-invariant, vllm-humming, humming, .*or marlin",
    ):
        asked_for(variable)


def test_another_kernel_than_that_of_the_first_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "_chosen", {LINEAR_VARIABLE: "humming"})
    monkeypatch.delenv(LINEAR_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"{LINEAR_VARIABLE}=marlin: .* has chosen humming before"):
        asked_for(LINEAR_VARIABLE)
    assert asked_for(EXPERTS_VARIABLE) == "marlin"
    assert plugin._chosen[EXPERTS_VARIABLE] == "marlin"


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


def test_experts_of_which_some_are_packed_are_named_where_that_leaves_the_others() -> None:
    assert settings_by_name(["e", "f"], ["e"], takes_mixed=True) == {"moe_backend": "marlin"}
    assert settings_by_name(["e"], [], takes_mixed=True) == {"moe_backend": "triton"}


def test_marlin_that_adds_in_no_fixed_order_is_refused() -> None:
    for variable, packed in ((LINEAR_VARIABLE, ["q"]), (EXPERTS_VARIABLE, ["e"])):
        environment = {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}
        with pytest.raises(ValueError, match=r"^VLLM_MARLIN_USE_ATOMIC_ADD: .*; unset it$"):
            settings_by_name(["e"], packed, environment)
        settings_by_name(["e"], packed, environment | {variable: "vllm-humming"})
        settings_by_name(["e"], packed, {"VLLM_MARLIN_USE_ATOMIC_ADD": "0"})


def test_vllms_own_humming_is_named_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINEAR_VARIABLE, "vllm-humming")
    both = {"linear_backend": "humming", "moe_backend": "marlin"}
    assert settings_by_name(["e"], ["q", "e"]) == both
    monkeypatch.setenv(EXPERTS_VARIABLE, "vllm-humming")
    assert settings_by_name(["e"], ["q", "e"]) == both | {"moe_backend": "humming"}
    assert settings_by_name(["e"], []) == {"moe_backend": "triton"}


KERNELS_OF_OTHERS = [
    *(
        ({variable: kernel}, version)
        for version in ("0.29.0", "0.33.0")
        for variable, kernel in (
            (LINEAR_VARIABLE, "humming"),
            (LINEAR_VARIABLE, "marlin-unpack"),
            (EXPERTS_VARIABLE, "humming"),
            (EXACT_VARIABLE, "1"),
        )
    ),
    *(
        ({variable: name}, version)
        for version in ("0.24.0", "0.29.0")
        for variable in (LINEAR_VARIABLE, EXPERTS_VARIABLE)
        for name in ("vllm-humming", "vllm-humming-invariant")
    ),
]
FIXES = {  # others: unset it
    ("humming", "0.33.0"): "unset it, or use vllm-humming, or use vllm-humming-invariant$",
    ("vllm-humming", "0.24.0"): "unset it, or use humming$",
    ("1", "0.33.0"): "install vLLM 0.24, or serve without the exact mode$",
}


@pytest.mark.parametrize(("asked", "version"), KERNELS_OF_OTHERS)
def test_kernels_of_other_versions_are_refused_before_an_engine_starts(
    asked: dict[str, str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(plugin, "_chosen", {})
    ((variable, name),) = asked.items()
    monkeypatch.setenv(variable, name)
    made_for = "0.33" if name.startswith("vllm-humming") else "0.24"
    who = "exact rollouts" if variable == EXACT_VARIABLE else f"{variable}={name}"
    message = rf"^{who}: made for vLLM {made_for}, not {version}: {FIXES.get((name, version), '')}"
    with pytest.raises(ValueError, match=message):
        plugin.register()


def test_an_exact_engine_that_is_refused_leaves_the_next_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    from qat_core.rollout.vllm.start import patched_vllm

    monkeypatch.setattr(plugin, "require_no_kernels", refuse)
    monkeypatch.setattr(plugin, "_chosen", {})
    with pytest.raises(ValueError, match="refused"):
        patched_vllm(exact=True)
    patched_vllm(exact=False)
    assert plugin._chosen[EXACT_VARIABLE] == "False"


def refuse(_: object) -> None:
    raise ValueError("refused")


OWN_HUMMING = {LINEAR_VARIABLE: "vllm-humming", EXPERTS_VARIABLE: "vllm-humming"}
INVARIANT = dict.fromkeys(OWN_HUMMING, "vllm-humming-invariant")


def kernel(name: str) -> Any:
    """An object of a class of that name; behind a plus, as in Humming's batch-invariant mode."""
    made: Any = type(name.removesuffix("+"), (), {})()
    if name.startswith("Humming"):
        made.compute_config = {"use_batch_invariant": name.endswith("+")}
    return made


def served(linear: str, experts: str) -> torch.nn.Module:
    """A model whose two layers are multiplied by kernels of these names."""
    model = torch.nn.ModuleDict({"qkv": torch.nn.Module(), "experts": torch.nn.Module()})
    found: Any = model["qkv"]
    found.scheme = SimpleNamespace(use_a16=True, kernel=kernel(linear))
    if linear.startswith("Humming"):
        found.scheme.kernel.compute_config = json.dumps(found.scheme.kernel.compute_config)
    found = model["experts"]
    fused = kernel(experts)
    made = SimpleNamespace(fused_experts=fused)
    found.quant_method = SimpleNamespace(nvfp4_backend="", experts_cls=type(fused), moe_kernel=made)
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
        (OWN_HUMMING, "HummingNvFp4LinearKernel", "HummingIndexedExperts", ""),
        (OWN_HUMMING, "MarlinNvFp4LinearKernel", "HummingIndexedExperts", "qkv by Marlin"),
        (INVARIANT, "HummingNvFp4LinearKernel+", "HummingIndexedExperts+", ""),
        (INVARIANT, "HummingNvFp4LinearKernel", "HummingIndexedExperts+", "qkv by Humming"),
        (INVARIANT, "HummingNvFp4LinearKernel+", "HummingIndexedExperts", "experts by Humming"),
        (OWN_HUMMING, "HummingNvFp4LinearKernel+", "HummingIndexedExperts", "qkv by .*, batch-inv"),
    ],
)
def test_another_kernel_than_was_asked_for_is_refused_by_its_layer(
    asked: dict[str, str], linear: str, experts: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in asked.items():
        monkeypatch.setenv(variable, name)
    model = served(linear, experts)
    if not refused:
        require_asked(model)
        return
    with pytest.raises(ValueError, match=f"^vLLM multiplies {refused}"):
        require_asked(model)


@pytest.mark.parametrize(
    ("asked", "found", "refused"),
    [
        ({}, "MarlinNvFp4LinearKernel", False),
        ({}, "HummingNvFp4LinearKernel", True),
        ({LINEAR_VARIABLE: "humming"}, "MarlinNvFp4LinearKernel", False),  # of the other form alone
        (OWN_HUMMING, "HummingNvFp4LinearKernel", False),
    ],
)
def test_layers_of_modelopts_form_are_compared_too(
    asked: dict[str, str], found: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in asked.items():
        monkeypatch.setenv(variable, name)
    layer: Any = torch.nn.Module()
    layer.quant_method = SimpleNamespace(kernel=kernel(found))
    model = torch.nn.ModuleDict({"qkv": layer})
    if not refused:
        require_asked(model)
        return
    with pytest.raises(ValueError, match=f"^vLLM multiplies qkv by {found}"):
        require_asked(model)
