"""What the codec refuses, by the name of the argument."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE, BlockScaleMethod

Groups = Sequence[Sequence[Tensor]]

MAX_MATRIX = 2**31  # the kernels count the elements of a matrix in int32


def checked_groups(groups: Groups) -> list[list[Tensor]]:
    """Their weights without gradients; errors as `group_amax`."""
    for index, members in enumerate(groups):
        _check_group(members, f"groups[{index}]")
    _check_one_device(
        [w for members in groups for w in members],
        lambda: [
            f"groups[{i}][{j}]" for i, members in enumerate(groups) for j in range(len(members))
        ],
    )
    return [[_without_gradient(w) for w in members] for members in groups]


def _check_group(members: Sequence[Tensor], name: str) -> None:
    if not members:
        raise ValueError(f"{name} is empty: a group needs at least one weight")
    for w in members:
        _check_weight(w, name)
        if w.shape[:-2] != members[0].shape[:-2]:
            shapes = [tuple(member.shape) for member in members]
            raise ValueError(f"{name}: leading dimensions differ: {shapes}")


def _check_one_device(weights: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> None:
    """A launch gets addresses, which mean nothing on another device."""
    for index, w in enumerate(weights):
        if w.device != weights[0].device:
            first, name = names()[0], names()[index]
            raise ValueError(f"{first} is on {weights[0].device}, {name} on {w.device}")


def _without_gradient(w: Tensor) -> Tensor:
    return w.detach() if w.requires_grad else w


def checked(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    method: BlockScaleMethod,
    names: Sequence[str],
) -> list[Tensor]:
    """The weights for launches of all at once, without gradients; errors as `quantize_all`."""
    for w, global_scale, name in zip(weights, global_scales, names, strict=True):
        check(w, global_scale, method, name)
    _check_one_device(weights, lambda: names)
    return [_without_gradient(w) for w in weights]


def check(w: Tensor, global_scale: Tensor, method: str, name: str) -> None:
    """ValueError naming a weight that does not fit the format, its scale, or the method."""
    _check_weight(w, name)
    check_option("block scale method", method, get_args(BlockScaleMethod))
    if global_scale.dtype != torch.float32 or global_scale.shape != w.shape[:-2]:
        raise ValueError(
            f"{name}: its global scale needs to be float32 {tuple(w.shape[:-2])}, "
            f"got {global_scale.dtype} {tuple(global_scale.shape)}"
        )
    if global_scale.device != w.device:
        raise ValueError(f"{name} is on {w.device}, its global scale on {global_scale.device}")


def _check_weight(w: Tensor, name: str) -> None:
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: needs bfloat16 or float32, got {w.dtype}")
    if w.ndim >= 2 and w.shape[-2:].numel() >= MAX_MATRIX:
        raise ValueError(f"{name}: matrices of 2**31 elements or more are not supported")
    if w.ndim < 2 or w.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"{name}: needs shape (..., N, K) with K a multiple of {BLOCK_SIZE}, "
            f"got {tuple(w.shape)}"
        )


def check_option(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError if an option has no such value."""
    if value not in allowed:
        raise ValueError(f"{what} {value!r}: use one of {', '.join(allowed)}")
