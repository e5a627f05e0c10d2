"""A kept kernel is the one that Triton itself would choose; without a GPU its launches are noted.

Kernels are compiled for Hopper either way. What they compute is tested in tests/kernels.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from qat_core.nvfp4 import kernels
from qat_core.nvfp4.repeated_kernel import RepeatedKernel
from tests.hopper_without_device import ON_GPU, HopperWithoutDevice, hopper_without_device

DEVICE = "cuda" if ON_GPU else "cpu"
GRID = (1, 1, 1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> HopperWithoutDevice:
    return hopper_without_device(monkeypatch)


def tensors_of(dtype: torch.dtype, offset: int) -> tuple[Tensor, ...]:
    """Weight, global scale so many elements behind an aligned address, and result."""
    weight = torch.ones(64, 64, dtype=dtype, device=DEVICE)
    scale = torch.ones(8, device=DEVICE)[offset]
    return weight, scale, torch.empty_like(weight, dtype=torch.bfloat16)


@pytest.mark.skipif(ON_GPU, reason="launches are noted only without a GPU")
def test_a_launch_passes_what_triton_passes(hopper: HopperWithoutDevice) -> None:
    kernel = RepeatedKernel(kernels.fake_quantize_kernel)
    tensors = tensors_of(torch.bfloat16, 0)
    for _ in range(2):
        kernel.launch(GRID, tensors, (8,), ("max", False, 128), 4)
    # what is launched, and after Triton's data and hooks for profilers the arguments
    of_triton, ours = (launched[:6] + launched[9:] for launched in hopper.launched)
    assert len(kernel._compiled) == 1 and of_triton == ours


def test_a_kept_kernel_is_the_one_that_triton_chooses(hopper: HopperWithoutDevice) -> None:
    kernel = RepeatedKernel(kernels.fake_quantize_kernel)
    kinds = list(
        product(
            (torch.bfloat16, torch.float32),
            (0, 1),  # aligned to 16 bytes, and to 4
            ((1,), (8,), (16,)),  # a constant, a number, a multiple of 16
            (("max", False, 128), ("four_over_six", False, 128)),
        )
    )
    for dtype, offset, numbers, constants in kinds:
        tensors = tensors_of(dtype, offset)
        kernel.launch(GRID, tensors, numbers, constants, 4)
        chosen = kernels.fake_quantize_kernel[GRID](
            *tensors, *numbers, *constants, num_warps=4, enable_fp_fusion=False
        )
        assert list(kernel._compiled.values())[-1] is chosen
    assert len(kernel._compiled) == len(kinds)


def test_an_empty_grid_launches_nothing(hopper: HopperWithoutDevice) -> None:
    kernel = RepeatedKernel(kernels.fake_quantize_kernel)
    kernel.launch((0, 1, 1), tensors_of(torch.bfloat16, 0), (0,), ("max", False, 128), 4)
    assert not kernel._compiled and not hopper.launched
