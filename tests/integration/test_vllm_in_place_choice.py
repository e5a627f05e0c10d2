"""Whether a worker writes packed weights in place, or keeps to vLLM's reload, and says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

import vllm

from qat_core.rollout.vllm import worker
from qat_core.rollout.vllm.engine import ONE_WORKER
from qat_core.rollout.vllm.in_place import VARIABLE


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(type(vllm.platforms.current_platform), "is_cpu", lambda _: False)


def worker_of(architecture: str, shared_out: str | None = None) -> Any:
    """One that holds a model of this class, or a part of it."""
    sizes = dict.fromkeys(ONE_WORKER, 1) | ({shared_out: 2} if shared_out else {})
    world_size = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]
    config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes, world_size=world_size))
    model = type(architecture, (nn.Linear,), {})(1, 1)
    return SimpleNamespace(
        vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: model)
    )


@pytest.mark.parametrize("shared_out", [None, *ONE_WORKER])
def test_only_a_worker_that_holds_a_part_of_all_weights_is_written_in_place(
    shared_out: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of data parallel ranks: they share out the experts."""
    monkeypatch.setattr(worker, "_quantized_layers", lambda *_: [])
    monkeypatch.setattr(worker, "find_targets", lambda *_: {"weight": "target"})
    held = worker_of("Qwen3ForCausalLM", shared_out)
    is_written = shared_out in {None, "tensor_parallel_size"}
    assert bool(worker._targets(held, None)) == is_written
    way = "in place, 1 weights" if is_written else "through vLLM's reload: a worker does not"
    assert f"qat_core: weight syncs {way}" in capsys.readouterr().out


def test_a_model_whose_loader_may_change_weights_keeps_to_the_reload() -> None:
    """Falcon's fused projection comes in another order of rows than vLLM holds it in."""
    assert worker._targets(worker_of("FalconForCausalLM"), None) == {}


def test_0_asks_for_the_reload_and_another_value_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = SimpleNamespace(qat_core_targets={"weight": "target"})
    for value, targets in (("1", held.qat_core_targets), ("0", {})):
        monkeypatch.setenv(VARIABLE, value)
        assert worker._targets(held, None) == targets
    monkeypatch.setenv(VARIABLE, "true")
    with pytest.raises(ValueError, match=f"{VARIABLE}=true: use 0 for vLLM's reload, or unset it"):
        worker._targets(held, None)
