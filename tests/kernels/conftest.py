"""The Triton kernels, on the GPU where there is one and in Triton's interpreter elsewhere.

The interpreter must be chosen before Triton is first imported, and then holds for the whole
process: `test_interpreter.py` runs these tests in one of their own.
"""

import os
from types import ModuleType

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not ON_GPU and not INTERPRETED:
    collect_ignore_glob = ["test_*_equal_reference.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def launch() -> ModuleType:
    """`qat_core.nvfp4.launch`."""
    from qat_core.nvfp4 import launch

    if not ON_GPU:
        _make_interpreter_exact()
    return launch


def _make_interpreter_exact() -> None:
    """Give the interpreter the GPU's arithmetic.

    It computes `fma` with two roundings and casts FP32 to BF16 by cutting bits off.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def fma(builder, x, y, z):  # exact product of FP32 numbers in FP64
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    def cast(builder, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.uint16)
            return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            bits = source.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
        return original_cast(builder, source, target)

    builder = interpreter.InterpreterBuilder
    original_cast = builder.cast_impl
    builder.create_fma = fma
    builder.create_fp_ext = builder.create_fp_trunc = cast
    builder.create_fp_to_fp = lambda self, source, target, _rounding: cast(self, source, target)


POLICIES = ["pow2", "amax"]
BLOCK_SCALES = ["max", "four_over_six", "mse"]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    as_int = torch.int32 if actual.dtype == torch.float32 else torch.int16
    as_int = torch.uint8 if actual.element_size() == 1 else as_int
    different = actual.cpu().view(as_int) != expected.view(as_int)
    assert not different.any(), f"{different.sum()} of {different.numel()} differ"
