"""What the vLLM engine and its plugin refuse; all but one needs no vLLM."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat_core.rollout.engine import Rollouts
from qat_core.rollout.vllm import plugin
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.outputs import to_routes
from qat_core.rollout.vllm.plugin import asked_for
from qat_core.rollout.vllm.switches import EXPERTS_VARIABLE, LINEAR_VARIABLE


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    mask = torch.tensor([[0, 1, 1, 1]])
    rollouts = Rollouts(
        input_ids=mask,
        attention_mask=mask,
        response_mask=mask[:, 2:].float(),
        log_probs=torch.zeros(1, 2),
        truncated=torch.tensor([False]),
    )
    ids = np.zeros((3, 2, 2), dtype=np.int16)
    assert to_routes(rollouts, [SimpleNamespace(routed_experts=ids[:2])], [0, 1]).shape[1] == 3
    with pytest.raises(ValueError, match="vLLM: 3 routes for 3 tokens; one less is expected"):
        to_routes(rollouts, [SimpleNamespace(routed_experts=ids)], [0, 1])


def test_an_engine_that_serves_other_weights_in_nvfp4_is_refused() -> None:
    engine = object.__new__(VllmEngine)
    engine.served, engine.plan = ["a", "b"], SimpleNamespace(quantized=("a", "c"))
    with pytest.raises(ValueError, match=r"differ in what is NVFP4: \['b', 'c'\]"):
        engine._require_coverage()


def test_overrides_of_a_model_whose_weights_are_to_come_are_refused(tmp_path: Path) -> None:
    packed = SimpleNamespace(quantized=("a",))
    with pytest.raises(ValueError, match=r"hf_overrides: .*; change .*config\.json instead"):
        VllmEngine(tmp_path, packed, hf_overrides={"rope_theta": 1e6})


def test_files_that_vllm_alone_would_read_are_refused(nano_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs requirements/engines.txt")
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / "consolidated.safetensors").symlink_to(nano_dir / "model.safetensors")
    with pytest.raises(ValueError, match=r"model/consolidated\.safetensors: vLLM would read it"):
        VllmEngine(folder)


@pytest.mark.parametrize("variable", [LINEAR_VARIABLE, EXPERTS_VARIABLE])
def test_an_unknown_kernel_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "cutlass")
    with pytest.raises(ValueError, match=f"{variable}=cutlass: use humming, .*or marlin"):
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
