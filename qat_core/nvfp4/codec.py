"""Public NVFP4 functions: check the arguments, then run the kernels (CUDA) or the oracle.

Where one is traced it is an opaque custom op. None is differentiable. NaN and infinity cannot be
refused here without waiting for the GPU: they turn their block into NaN, and `require_finite` names
the weight.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from qat_core.nvfp4 import custom_ops, reference
from qat_core.nvfp4.checks import Groups, check, check_option, checked, checked_groups
from qat_core.nvfp4.custom_ops import backend, is_traced
from qat_core.nvfp4.format import MAX_WEIGHT, UNREPRESENTABLE, PackedTensor, ShardLayout
from qat_core.options import BlockScaleMethod, ScalePolicy


def group_amax(groups: Groups) -> list[Tensor]:
    """Largest |bf16(w)| of each group, the weights of which share a global scale.

    On a GPU one launch serves all matrices of a size and dtype.

    Args:
        groups: for each group its members, BF16 or FP32 (..., N, K) with equal leading dimensions.

    Returns:
        For each group an FP32 tensor of the leading dimensions' shape (0-D for matrices), not
        finite where a member holds NaN or infinity: see `require_finite`.
    """
    if not groups:
        return []
    groups = checked_groups(groups)
    amax: list[Tensor] = backend(groups[0][0]).group_amax(groups)
    return amax


def measure_and_round(
    groups: Groups,
    last_scales: Sequence[Tensor],
    policy: ScalePolicy = "pow2",
    method: BlockScaleMethod = "max",
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """`group_amax`, and all weights rounded with the global scales that follow from it.

    On a GPU each weight is read once, and not twice, where the scale of its group is the last one,
    as with "pow2" it is at nearly each optimizer step. What comes does not depend on the last ones.
    Not for torch.compile.

    Returns:
        The amax of each group, and for each group its weights, equal to `fake_quantize` in every
        bit, in their dtypes. They share memory, which lives as long as one of them does.
    """
    if not groups:
        return [], []
    check_option("scale policy", policy, get_args(ScalePolicy))
    groups = checked_groups(groups)
    for index, (members, last) in enumerate(zip(groups, last_scales, strict=True)):
        check(members[0], last, method, f"groups[{index}]")
    run = backend(groups[0][0]).measure_and_round
    found: tuple[list[Tensor], list[list[Tensor]]] = run(groups, last_scales, policy, method)
    return found


def is_representable(w: Tensor) -> Tensor:
    """Whether each value, or amax, is neither NaN nor infinite nor may round to infinity; bool."""
    return w.abs() <= MAX_WEIGHT  # False for NaN


def require_finite(amax: Sequence[Tensor], names: Sequence[str]) -> None:
    """ValueError naming the first weight that NVFP4 cannot represent in BF16.

    Waits for the GPU once. `amax` is that of each weight alone, of sharded ones over all ranks.
    """
    if not amax or bool(is_representable(torch.cat([a.flatten() for a in amax])).all()):
        return
    fit = (bool(is_representable(values).all()) for values in amax)
    culprit = next(name for name, is_fit in zip(names, fit, strict=True) if not is_fit)
    raise ValueError(
        f"{culprit}: holds {UNREPRESENTABLE} once rounded to BF16, which NVFP4 cannot represent"
    )


def global_scale(amax: Tensor, policy: ScalePolicy = "pow2") -> Tensor:
    """FP32 divisor that maps a group's amax to the top of the format's range.

    "amax" is (1 / amax) * 2688, the reciprocal rounded to FP32 before the product is: bit for bit
    what compressed-tensors computes, the last place off the nearest quotient for a fifth of all
    BF16 numbers. "pow2" is the largest power of two that is not above it, which makes every
    dequantized value exact in BF16. 1.0 where amax is 0, at most 2**94, NaN where amax is not
    finite. Elementwise, of any shape: stack the amax of many groups and call it once.
    """
    check_option("scale policy", policy, get_args(ScalePolicy))
    return reference.global_scale(amax.float(), policy)


def fake_quantize(
    w: Tensor, global_scale: Tensor, method: BlockScaleMethod = "max", *, name: str = "w"
) -> Tensor:
    """BF16 of w's shape: equal to `dequantize(quantize(w))` in every bit.

    Args:
        w: BF16 or FP32 (..., N, K), K a multiple of 16; FP32 is rounded to BF16 first.
        global_scale: FP32 of w's leading dimensions' shape (0-D for a matrix).
        method: "max" maps a block's largest value to 6, "four_over_six" to 6 or 4, "mse"
            searches the E4M3 scales around; the latter two take the least squared error.
        name: what to call w in an error.

    Raises:
        ValueError: wrong dtype, shape, device or option.
    """
    check(w, global_scale, method, name)
    w = w.detach()
    run = custom_ops.fake_quantize if is_traced(w) else backend(w).fake_quantize
    out: Tensor = run(w, global_scale, method)
    return out


def quantize(
    w: Tensor, global_scale: Tensor, method: BlockScaleMethod = "max", *, name: str = "w"
) -> PackedTensor:
    """Pack w into 0.5625 bytes a weight; arguments and errors as for `fake_quantize`."""
    check(w, global_scale, method, name)
    w = w.detach()
    run = custom_ops.quantize if is_traced(w) else backend(w).quantize
    codes, block_scale = run(w, global_scale, method)
    return PackedTensor(codes, block_scale.view(torch.float8_e4m3fn), global_scale)


def quantize_all(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    method: BlockScaleMethod = "max",
    *,
    names: Sequence[str],
) -> list[PackedTensor]:
    """As `quantize` of each weight, all on one device, on a GPU in a launch for a size of matrix.

    Not for torch.compile. The results share memory, which lives as long as one of them does.
    """
    weights = checked(weights, global_scales, method, names)
    if not weights:
        return []
    packed = backend(weights[0]).quantize_all(weights, global_scales, method)
    return [
        PackedTensor(codes, scale, global_scale)
        for (codes, scale), global_scale in zip(packed, global_scales, strict=True)
    ]


def dequantize(packed: PackedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight (..., N, K) that `packed` stands for; `dtype` is BF16 or FP32."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype: needs bfloat16 or float32, got {dtype}")
    codes, scale, global_scale = packed.codes, packed.block_scale, packed.global_scale
    if is_traced(codes):
        out: Tensor = custom_ops.dequantize(codes, scale.view(torch.uint8), global_scale, dtype)
    else:
        out = backend(codes).dequantize(codes, scale, global_scale, dtype)
    return out


def dequantize_into(packed: PackedTensor, out: Tensor) -> None:
    """As `dequantize`, into contiguous memory of packed.shape, BF16 or FP32. Not for torch.compile.

    Spares a second pass over memory that is there already.
    """
    if out.shape != packed.shape or not out.is_contiguous():
        raise ValueError(f"out: needs contiguous {tuple(packed.shape)}, got {tuple(out.shape)}")
    if out.is_cuda:
        from qat_core.nvfp4 import launch

        launch.dequantize_into(packed.codes, packed.block_scale, packed.global_scale, out)
    else:
        out.copy_(dequantize(packed, out.dtype))


# Shards travel as one buffer each, and one kernel reads those of all ranks as they lie: FSDP2
# gathers a weight many times a step, which would otherwise wait for the CPU.


def pack_shards(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    method: BlockScaleMethod = "max",
    *,
    names: Sequence[str],
) -> list[Tensor]:
    """Codes and block scales of each shard, uint8 (layout.num_bytes,).

    A shard is this rank's rows (..., N, K) of a weight. On a GPU in a launch for a size of matrix.
    Not for torch.compile. The results share memory, which lives as long as one of them does.
    """
    weights = checked(weights, global_scales, method, names)
    if not weights:
        return []
    buffers: list[Tensor] = backend(weights[0]).pack_shards(weights, global_scales, layouts, method)
    return buffers


def unpack_shards(shards: Tensor, layout: ShardLayout, global_scale: Tensor, out: Tensor) -> None:
    """Write the whole weight that the shards stand for, rounded to BF16, into `out`.

    Not for torch.compile.

    Args:
        shards: the buffers of all shards, one behind the other, uint8 1-D.
        layout: of each of them.
        global_scale: FP32, 0-D, or (E,) for experts (E, N, K), which are sharded by expert.
        out: contiguous (N, K) or (E, N, K), BF16 or FP32.
    """
    assert out.is_contiguous()
    backend(out).unpack_shards(shards, layout, global_scale, out)
