"""The codec as opaque custom ops, which torch.compile keeps whole.

Each call of an op takes 10 us of CPU longer than what it runs (measured on an AMD EPYC), which
weights of small models on a GPU would wait for: where nobody traces, ops are left out.
"""

from types import ModuleType

import torch
from torch import Tensor

from qat_core.nvfp4 import reference
from qat_core.options import BLOCK_SIZE


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler or a dispatch mode is to see an op, or there is nothing to compute."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or tensor.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
    )


def backend(tensor: Tensor) -> ModuleType:
    """Kernels for a tensor on a GPU, elsewhere the reference."""
    if tensor.is_cuda:
        from qat_core.nvfp4 import launch

        return launch
    return reference


# FP8 travels through the ops as bytes: not every compiler pass knows float8_e4m3fn.
@torch.library.custom_op("nvfp4::fake_quantize", mutates_args=())
def fake_quantize(w: Tensor, global_scale: Tensor, method: str) -> Tensor:
    """As `reference.fake_quantize`."""
    out: Tensor = backend(w).fake_quantize(w, global_scale, method)
    return out


@torch.library.custom_op("nvfp4::quantize", mutates_args=())
def quantize(w: Tensor, global_scale: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    codes, scale = backend(w).quantize(w, global_scale, method)
    return codes, scale.view(torch.uint8)


@torch.library.custom_op("nvfp4::dequantize", mutates_args=())
def dequantize(
    codes: Tensor, scale_bytes: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `reference.dequantize`."""
    scale = scale_bytes.view(torch.float8_e4m3fn)
    out: Tensor = backend(codes).dequantize(codes, scale, global_scale, dtype)
    return out


@fake_quantize.register_fake
def _(w: Tensor, global_scale: Tensor, method: str) -> Tensor:
    return torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)


@quantize.register_fake
def _(w: Tensor, global_scale: Tensor, method: str) -> tuple[Tensor, Tensor]:
    *lead, columns = w.shape
    codes = w.new_empty((*lead, columns // 2), dtype=torch.uint8)
    return codes, w.new_empty((*lead, columns // BLOCK_SIZE), dtype=torch.uint8)


@dequantize.register_fake
def _(codes: Tensor, scale_bytes: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
