"""How much of a GPU vLLM takes where it is not alone on it."""

from pathlib import Path

import pytest
import torch

from experiments.support.subprocess_call import call_in_subprocess
from qat_core.rollout.start import memory_settings, start_engine
from qat_core.units import BYTES_PER_GIB
from tests.nano_models import write_nano


@pytest.mark.parametrize(
    ("device", "beside_trainer", "gpu_memory_gib", "cache_gib"),
    [
        pytest.param("cpu", True, None, None, id="on a CPU its own setting"),
        pytest.param("cuda", False, None, None, id="alone its default of 90 %"),
        pytest.param("cuda", True, None, 16, id="beside a trainer"),
        pytest.param("cuda", True, 8.0, 2, id="beside a trainer, on a shared GPU"),
        pytest.param("cuda", False, 8.0, 2, id="evaluating, on a shared GPU"),
    ],
)
def test_size_of_the_cache(
    device: str, beside_trainer: bool, gpu_memory_gib: float | None, cache_gib: int | None
) -> None:
    settings = memory_settings(device, beside_trainer, gpu_memory_gib)
    if cache_gib is None:
        assert settings == {}
    else:
        assert settings["kv_cache_memory_bytes"] == cache_gib * BYTES_PER_GIB
        assert settings["gpu_memory_utilization"] == 0.01  # what has to be free when it starts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_takes_no_more_than_its_share(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    write_nano("nano-dense", tmp_path / "model", num_layers=2)
    assert call_in_subprocess(_bytes_taken, str(tmp_path / "model")) < 6 * BYTES_PER_GIB


def _bytes_taken(model_dir: str) -> int:
    engine = start_engine("vllm", Path(model_dir), "cuda", None, 64, gpu_memory_gib=4.0)
    engine.generate([[2, 3, 4]] * 8, 8, 1.0, 0)
    return torch.cuda.memory_reserved()  # of this process: others use the GPU meanwhile
