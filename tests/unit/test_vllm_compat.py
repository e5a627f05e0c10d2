"""Versions of vLLM, and what differs between them; needs no vLLM."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qat_core.rollout.vllm.compat import _hold, keep_process_groups, require_supported


@pytest.mark.parametrize("version", ["0.28.0", "0.28.1", "0.29.0", "0.30.0", "0.31.0", "0.32.1"])
def test_versions_of_a_cpu_pass_there_alone(version: str) -> None:
    require_supported(version, on_cpu=True)
    with pytest.raises(ValueError, match=rf"vllm {version} is not supported on CUDA: .*0\.24;"):
        require_supported(version, on_cpu=False)


def test_the_version_of_cuda_passes_there_alone() -> None:
    require_supported("0.24.0", on_cpu=False)
    with pytest.raises(ValueError, match=r"0\.24\.0 is not supported on CPU: .* 0\.28, 0\.29"):
        require_supported("0.24.0", on_cpu=True)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("version", ["0.23.9", "0.25.0", "0.33.0", "0.2.4", "0.240.0", "1.0"])
def test_another_version_is_named(version: str, on_cpu: bool) -> None:
    with pytest.raises(ValueError, match=rf"vllm {version} is not supported on"):
        require_supported(version, on_cpu=on_cpu)


class Method:
    """Makes its layer's attributes again, as vLLM 0.24 does after every reload."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.workspace = torch.zeros(4)
        layer.scale = torch.tensor([layer.weight_scale])


def test_held_attributes_take_new_values_in_their_old_memory() -> None:
    _hold(Method, ("workspace", "scale"))
    _hold(Method, ("workspace", "scale"))  # a second engine in the process changes nothing
    layer, method = torch.nn.Module(), Method()
    layer.weight_scale = 2.0
    method.process_weights_after_loading(layer)
    held = layer.workspace, layer.scale
    layer.workspace.fill_(7.0)  # locks left behind
    layer.weight_scale = 3.0
    method.process_weights_after_loading(layer)
    assert layer.workspace is held[0] and layer.scale is held[1]
    assert layer.workspace.eq(0).all() and layer.scale.item() == 3.0


class Client:
    """vLLM's `InprocClient`."""

    _finalizer: Any


def test_an_engine_leaves_the_process_groups_to_the_others() -> None:
    """vLLM from 0.31 ends them with any engine that Python frees; before, there is no finalizer."""
    ended: list[str] = []
    client = Client()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    keep_process_groups(llm)
    client._finalizer = weakref.finalize(client, ended.append, "groups")
    keep_process_groups(llm)
    del llm, client
    gc.collect()
    assert not ended
