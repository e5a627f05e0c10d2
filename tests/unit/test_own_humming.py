"""vLLM's own Humming keeps its locks and, after a start without weights, its layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qat_core.rollout.vllm import plugin
from qat_core.rollout.vllm.own_humming import hold_locks, require_reloadable, share_dummy_scales
from qat_core.rollout.vllm.switches import LINEAR_VARIABLE


class Kernel:
    """Makes its locks again, as vLLM's own Humming does after every reload."""

    locks: torch.Tensor

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.locks = torch.zeros(4)


class Experts:
    """Makes its kernel again, with locks; or one of Marlin's, without."""

    def __init__(self, made: type) -> None:
        self.made = made
        self.moe_kernel: Any = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.moe_kernel = SimpleNamespace(fused_experts=self.made())
        if isinstance(self.moe_kernel.fused_experts, Kernel):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def test_locks_of_vllms_humming_stay_where_captured_graphs_have_them() -> None:
    kernel, experts, marlins = Kernel(), Experts(Kernel), Experts(object)
    for _ in range(2):  # a second engine in the process changes nothing
        hold_locks(Kernel, lambda it: it)
        hold_locks(Experts, lambda it: getattr(it.moe_kernel, "fused_experts", None))
    layer = torch.nn.Module()
    kernel.process_weights_after_loading(layer)
    experts.process_weights_after_loading(layer)
    held = kernel.locks, experts.moe_kernel.fused_experts.locks
    for locks in held:
        locks.fill_(7.0)  # left by a sleep
    for owner in (kernel, experts, marlins, marlins):
        owner.process_weights_after_loading(layer)
    assert kernel.locks is held[0] and experts.moe_kernel.fused_experts.locks is held[1]
    assert not any(locks.any() for locks in held)
    assert not hasattr(marlins.moe_kernel.fused_experts, "locks")


class Scaled(Experts):
    """Whose global scales of gate and up decide how they are laid out."""

    apart: list[bool]

    def process_weights_after_loading(self, layer: Any) -> None:
        gate, up = layer.w13_weight_global_scale.T
        self.apart = [*getattr(self, "apart", []), not torch.equal(gate, up)]
        super().process_weights_after_loading(layer)


@pytest.mark.parametrize(("load_format", "apart"), [("dummy", [False, True]), ("auto", [True] * 2)])
def test_gate_and_up_share_a_scale_at_a_start_without_weights_alone(
    load_format: str, apart: list[bool]
) -> None:
    config = pytest.importorskip("vllm.config", reason="needs requirements/engines.txt")
    for _ in range(2):
        share_dummy_scales(Scaled)
    experts = Scaled(object)
    layer: Any = torch.nn.Module()
    layer.w13_weight_global_scale = torch.nn.Parameter(torch.rand(8, 2))
    with config.set_current_vllm_config(
        config.VllmConfig(load_config=config.LoadConfig(load_format=load_format))
    ):
        experts.process_weights_after_loading(layer)
        layer.w13_weight_global_scale.data = torch.rand(8, 2)  # of weights, as they were sent
        experts.process_weights_after_loading(layer)
    assert experts.apart == apart


def model(*, bias: bool = False, scales: int = 1) -> torch.nn.Module:
    """A linear layer and experts as vLLM's Humming serves them."""
    linear, experts = layers = torch.nn.Linear(4, 4, bias=bias), torch.nn.Module()
    of_linear: Any = linear
    of_linear.scheme = SimpleNamespace(kernel=type("HummingNvFp4LinearKernel", (), {})())
    of_experts: Any = experts
    of_experts.quant_method = SimpleNamespace(experts_cls=type("HummingIndexedExperts", (), {}))
    of_experts.w13_weight_scale_2 = torch.ones(8, 16)[:, 0] if scales == 1 else torch.ones(8, 16)
    return torch.nn.ModuleDict(dict(zip(("qkv", "experts"), layers, strict=True)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"bias": True}, "qkv: a bias, which"), ({"scales": 2}, "experts: gate and up .* two global")],
)
def test_a_layer_that_no_sync_can_replace_is_named(changed: dict[str, Any], said: str) -> None:
    require_reloadable(model())
    with pytest.raises(ValueError, match=f"^{said}"):
        require_reloadable(model(**changed))


def test_vllms_variables_for_its_humming_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    monkeypatch.setattr(plugin, "_chosen", {})
    monkeypatch.setenv(LINEAR_VARIABLE, "vllm-humming")
    for variable in ("VLLM_HUMMING_MOE_GEMM_TYPE", "VLLM_BATCH_INVARIANT"):
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            with pytest.raises(ValueError, match=f"^{variable}: .* without it; unset it"):
                plugin.asked_for(LINEAR_VARIABLE)
