"""A truth value read later is the one that was computed; what came after it is not waited for."""

import pickle

import pytest
import torch

from qat_core.training.state.finiteness import Later

HAS_GPU = torch.cuda.is_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
CYCLES = 2_000_000_000  # about a second of a GPU


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expected", [True, False])
def test_it_is_the_value_that_the_tensor_had(expected: bool, device: str) -> None:
    value = torch.tensor(expected, device=device)
    later = Later(value)
    assert bool(later) is bool(later) is expected
    assert bool(pickle.loads(pickle.dumps(later))) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here")
def test_work_that_came_after_it_is_not_waited_for() -> None:
    value = torch.tensor(False, device="cuda")
    later = Later(value)
    value.fill_(True)
    torch.cuda._sleep(CYCLES)
    ended = torch.cuda.current_stream().record_event()
    assert not later and not ended.query()
