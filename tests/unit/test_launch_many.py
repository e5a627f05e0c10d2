"""What launches for many weights ask of Triton: kernels compile for Hopper, one for each size.

What they compute is tested in tests/kernels; Triton's interpreter, which runs those tests without a
GPU, takes more than its compiler.
"""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from qat_core.nvfp4 import launch
from tests.hopper_without_device import ON_GPU, hopper_without_device

pytestmark = pytest.mark.skipif(ON_GPU, reason="launches are noted only without a GPU")

SHAPES = [(64, 128), (3, 64, 128), (5, 48), (0, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matrices_of_a_size_are_one_launch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = hopper_without_device(monkeypatch)
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
