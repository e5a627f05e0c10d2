"""A Triton kernel that is launched again and again with arguments of the same kinds."""

from typing import Any

import torch
import triton
from torch import Tensor

ALIGNMENT_BYTES = 16  # what Triton asks of a pointer, to load whole words

Grid = tuple[int, int, int]


class RepeatedKernel:
    """Launches a kernel without Triton's look at arguments of kinds that it has seen.

    That look takes most of the CPU's time for a launch, for which a step of small layers waits.
    Here the compiled kernel is kept by a key that is quicker to make, and launched as in Triton's
    tutorial of fused softmax.

    Args:
        kernel: its parameters are tensors, then numbers, then constants (`tl.constexpr`).
    """

    def __init__(self, kernel: "triton.JITFunction") -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def launch(
        self,
        grid: Grid,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Queue it on the current stream of the tensors' device; an empty grid is left out."""
        if not all(grid):
            return
        kinds = [(it.dtype, it.data_ptr() % ALIGNMENT_BYTES == 0) for it in tensors]
        key = (tensors[0].device, *kinds, numbers, constants, num_warps)
        compiled = self._compiled.get(key)
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            if compiled is not None:
                compiled[grid](*tensors, *numbers, *constants)
                return
            # Triton's interpreter compiles nothing: the kept value is None.
            self._compiled[key] = self._kernel[grid](
                *tensors, *numbers, *constants, num_warps=num_warps, enable_fp_fusion=False
            )
