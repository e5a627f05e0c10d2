"""What is asked of Triton: kept kernels are those that it would choose, one launch for each size.

Kernels are compiled for Hopper where there is no GPU, and what would be launched is noted. What
they compute is tested in tests/kernels; Triton's interpreter, which runs those tests without a GPU,
takes more than its compiler.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qat_core.nvfp4 import kernels, launch
from qat_core.nvfp4.repeated_kernel import RepeatedKernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GRID = (1, 1, 1)


class HopperWithoutDevice:
    """What Triton asks a driver for; launches note their arguments."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *arguments: self.launched.append(arguments)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> HopperWithoutDevice:
    """In place of Triton's driver; not used where there is a GPU."""
    without_device = HopperWithoutDevice()
    if not ON_GPU:
        monkeypatch.setattr(driver, "_active", without_device)
    return without_device


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


SHAPES = [(64, 128), (3, 64, 128), (5, 48), (0, 16)]


@pytest.mark.skipif(ON_GPU, reason="launches are noted only without a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matrices_of_a_size_are_one_launch(dtype: torch.dtype, hopper: HopperWithoutDevice) -> None:
    weights = [torch.ones(shape, dtype=dtype) for shape in SHAPES]
    scales = [torch.ones(w.shape[:-2]) for w in weights]
    groups = [[w] for w in weights]
    launch.group_amax(groups)
    launch.quantize_all(weights, scales, "max")
    launch.measure_and_round(groups, scales, "pow2", "max")
    grids = [launched[:3] for launched in hopper.launched]
    sizes = [(1, 4, 1), (1, 1, 1)]
    tiles_of_rounding = [(8, 4, 1), (1, 1, 1)]
    assert grids == [*sizes, *sizes, *tiles_of_rounding, *sizes]
