"""Whether a worker writes packed weights in place, or keeps to vLLM's reload, and says so."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

import vllm

from qat_core.rollout.vllm.engine import ONE_WORKER
from qat_core.rollout.vllm.in_place import sync as in_place
from qat_core.rollout.vllm.plugin import register
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IN_PLACE_VARIABLE, raising=False)
    monkeypatch.setattr(type(vllm.platforms.current_platform), "is_cpu", lambda _: False)


def worker_of(
    architecture: str, shared_out: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """One that holds a model of this class, or a part of it."""
    sizes = dict.fromkeys(ONE_WORKER, 1) | ({shared_out: 2} if shared_out else {})
    world_size = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]
    config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes, world_size=world_size))
    model = type(architecture, (nn.Linear,), {})(1, 1)
    return SimpleNamespace(
        vllm_config=config,
        model_config=SimpleNamespace(dtype=dtype),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


@pytest.mark.parametrize("shared_out", [None, *ONE_WORKER])
def test_only_a_worker_that_holds_a_part_of_all_weights_is_written_in_place(
    shared_out: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of data parallel ranks: they share out the experts."""
    monkeypatch.setattr(in_place, "quantized_layers", lambda *_: [])
    monkeypatch.setattr(in_place, "find_targets", lambda *_: {"weight": "target"})
    held = worker_of("Qwen3ForCausalLM", shared_out)
    is_written = shared_out in {None, "tensor_parallel_size"}
    assert bool(in_place.targets_of(held, None)) == is_written
    way = (
        "in place; packed weights: 1" if is_written else "through vLLM's reload: a worker does not"
    )
    assert f"qat_core: weight syncs {way}" in capsys.readouterr().out


def test_a_model_whose_loader_may_change_weights_keeps_to_the_reload() -> None:
    """Falcon's fused projection comes in another order of rows than vLLM holds it in."""
    assert in_place.targets_of(worker_of("FalconForCausalLM"), None) == {}


def test_an_engine_in_fp16_keeps_to_the_reload(capsys: pytest.CaptureFixture[str]) -> None:
    """Marlin's form of a global scale is another there."""
    held = worker_of("Qwen3ForCausalLM", dtype=torch.float16)
    assert in_place.targets_of(held, None) == {}
    assert "through vLLM's reload: vLLM computes in torch.float16, for" in capsys.readouterr().out


def test_a_layer_that_is_not_known_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_place, "quantized_layers", lambda *_: [(nn.Linear(1, 1), ["a.weight"])])
    assert in_place.targets_of(worker_of("Qwen3ForCausalLM"), None) == {}
    assert "through vLLM's reload: a.weight: Linear with a kernel" in capsys.readouterr().out


def test_0_asks_for_the_reload_and_another_value_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = SimpleNamespace(qat_core_targets={"weight": "target"})
    for value, targets in (("1", held.qat_core_targets), ("0", {})):
        monkeypatch.setenv(IN_PLACE_VARIABLE, value)
        assert in_place.targets_of(held, None) == targets
    monkeypatch.setenv(IN_PLACE_VARIABLE, "true")
    message = f"{IN_PLACE_VARIABLE}=true: use 1 or 0, or unset it for 1"
    for called in (register, partial(in_place.targets_of, held, None)):
        with pytest.raises(ValueError, match=message):
            called()
