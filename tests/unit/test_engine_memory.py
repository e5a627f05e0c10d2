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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_starts_where_others_hold_most_of_the_memory(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    write_nano("nano-dense", tmp_path / "model", num_layers=2)
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(free - 8 * BYTES_PER_GIB, dtype=torch.uint8, device="cuda")
    assert held.nbytes > total / 2
    assert call_in_subprocess(_bytes_taken, str(tmp_path / "model")) < 6 * BYTES_PER_GIB


def _bytes_taken(model_dir: str) -> int:
    before, _ = torch.cuda.mem_get_info()
    engine = start_engine("vllm", Path(model_dir), "cuda", None, 64, gpu_memory_gib=4.0)
    engine.generate([[2, 3, 4]] * 8, 8, 1.0, 0)
    after, _ = torch.cuda.mem_get_info()
    return before - after
