"""Writes through memory that another library holds: NumPy, DLPack, storages, pointers.

Memory that a weight lends is followed; a write through a pointer, a storage or a state dict is seen
by the next stream alone.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qat_core import Recipe, weight_stream
from qat_core.planning.plan import plan
from tests.mlp import UP, assert_follows, used_mlp, x

Write = Callable[[nn.Module, Tensor], Any]


def bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def pointed_at(weight: Tensor) -> Any:
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(weight.shape)


def of_memory(storage: Any, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage).view_as(like)


LENT: dict[str, Write] = {
    "NumPy": lambda m, new: np.copyto(m.get_parameter(UP).detach().numpy(), new.numpy()),
    "NumPy of .data": lambda m, new: np.copyto(np.asarray(m.get_parameter(UP).data), new.numpy()),
    "memoryview": lambda m, new: bytes_of(m.get_parameter(UP).detach().numpy()).__setitem__(
        slice(None), bytes_of(new.numpy())
    ),
    "DLPack": lambda m, new: torch.from_dlpack(m.get_parameter(UP).detach()).copy_(new),
}


UNSEEN: dict[str, Write] = {
    "NumPy of a state dict": lambda m, new: np.copyto(m.state_dict()[UP].numpy(), new.numpy()),
    "DLPack of a state dict": lambda m, new: torch.from_dlpack(m.state_dict()[UP]).copy_(new),
    "storage of a state dict": lambda m, new: of_memory(
        m.state_dict()[UP].untyped_storage(), new
    ).copy_(new),
    "storage": lambda m, new: of_memory(m.get_parameter(UP).storage().untyped(), new).copy_(new),
    "pointer": lambda m, new: np.copyto(pointed_at(m.get_parameter(UP)), new.numpy()),
}


NO_MEMORY: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "to_dlpack": (torch.utils.dlpack.to_dlpack, "Cannot access data pointer"),
    "pointer": (lambda w: w.untyped_storage().data_ptr(), "Cannot access data pointer"),
    "tensor of it": (lambda w: of_memory(w.untyped_storage(), w), "invalid for input of size 0"),
    "of rows": (lambda w: of_memory(w[8:].untyped_storage(), w), "invalid for input of size 0"),
}


@pytest.fixture
def fp32_model() -> nn.Module:
    """NumPy knows no BF16."""
    return used_mlp(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("write", LENT.values(), ids=LENT)
def test_memory_lent_to_another_library_is_followed(write: Write, fp32_model: nn.Module) -> None:
    new = fp32_model.state_dict()[UP] * 4 + 0.1
    write(fp32_model, new)
    assert_follows(fp32_model, new)


@torch.no_grad()
@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
def test_an_unseen_write_lasts_until_the_next_stream(write: Write, fp32_model: nn.Module) -> None:
    new, old = fp32_model.state_dict()[UP] * 4 + 0.1, fp32_model(x(fp32_model))
    write(fp32_model, new)
    assert torch.equal(fp32_model(x(fp32_model)), old)
    weight_stream(fp32_model, plan(fp32_model, Recipe()), Recipe())
    assert_follows(fp32_model, new)


@pytest.mark.parametrize(("read", "message"), NO_MEMORY.values(), ids=NO_MEMORY)
def test_the_wrappers_own_memory_is_an_error(
    read: Callable[[Tensor], Any], message: str, fp32_model: nn.Module
) -> None:
    """Not a null pointer, which C code would read and write."""
    with pytest.raises(RuntimeError, match=message):
        read(fp32_model.get_parameter(UP).detach())
