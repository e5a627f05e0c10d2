"""The fake-quantized parameter: a weight that reads as NVFP4 in matrix products.

A parameter of this tensor subclass keeps its full-precision values. Optimizers, copies, collectives
and state dicts see those; matrix products and gathers of experts see the values rounded to NVFP4.
Rounding happens below autograd, hence

* the gradient reaches the parameter unchanged (straight-through estimator), and
* autograd keeps the parameter itself for the backward pass, which rounds once more, so that a
  prepared model needs no second copy of its weights.

The same class brings the all-gather of FSDP2: see qat_core/fsdp.py.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils._python_dispatch import return_and_correct_aliasing

from qat_core.fsdp import gather_packed, unpack_gathered
from qat_core.nvfp4 import BLOCK_SIZE, fake_quantize
from qat_core.scales import Scales

aten = torch.ops.aten

# Operators that read a weight as a matrix of the model. Those outside of ATen (custom kernels) do
# too, collectives excepted.
COMPUTE = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot),
    *(aten.linear, aten.matmul, aten._grouped_mm, aten.index, aten.index_select, aten.embedding),
}
OTHER_NAMESPACES = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "_dtensor"}

# Results of these keep the class; those of all other operators are plain tensors.
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
PRESERVING = {
    *(*TRANSPOSES, aten.detach.default, aten.alias.default, aten.select.int, aten.slice.Tensor),
    *(aten.split.Tensor, aten.view.default, aten._unsafe_view.default, aten.expand.default),
    *(aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default),
    aten.new_zeros.default,
}


class FakeQuantizedTensor(torch.Tensor):
    """Weight (..., N, K), BF16 or FP32, that matrix products read as NVFP4.

    Args:
        data: the full-precision values.
        global_scale: FP32 divisor of the whole parameter: 0-D, or (E,) for experts (E, N, K).
        weight_name: the parameter's name in the prepared model.
        scales: keeps `global_scale` up to date.
        transposed: blocks run along the second to last dimension of `data`.
        expert: `data` (N, K) is the weight of this expert alone.
    """

    global_scale: Tensor
    weight_name: str
    scales: Scales
    _data: Tensor
    _transposed: bool
    _expert: int | None

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        global_scale: Tensor,
        weight_name: str,
        scales: Scales,
        transposed: bool = False,
        expert: int | None = None,
    ) -> "FakeQuantizedTensor":
        """Wraps `data` without a copy."""
        self: FakeQuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
        )
        self._data, self.global_scale = data, global_scale
        self.weight_name, self.scales = weight_name, scales
        self._transposed, self._expert = transposed, expert
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    fsdp_pre_all_gather = gather_packed
    fsdp_post_all_gather = unpack_gathered

    def plain(self) -> Tensor:
        """The full-precision values as a plain tensor that shares their memory."""
        return self._data

    def rounded(self) -> Tensor:
        """The values rounded to NVFP4, in the parameter's dtype and shape."""
        data = self._data.mT if self._transposed else self._data
        if data.shape[:-2] != self.global_scale.shape or data.shape[-1] % BLOCK_SIZE:
            raise ValueError(
                f"{self.weight_name}: used in a matrix product through a view of shape "
                f"{tuple(self.shape)}, which has no blocks of {BLOCK_SIZE}: add it to ignore"
            )
        if type(data) is Tensor:  # else torch.compile is tracing
            self.scales.refresh_if_stale()
            if data.is_cpu and data.shape == self.scales.shapes[self.weight_name][-data.ndim :]:
                return self._kept_rounded()
        options = self.scales.block_scale
        rounded = fake_quantize(data, self.global_scale, options, name=self.weight_name)
        rounded = rounded.to(self.dtype)
        return rounded.mT if self._transposed else rounded

    def _kept_rounded(self) -> Tensor:
        """As `rounded`, from the copy that is kept on a CPU, where memory is cheap, time is not."""
        rounded = self.scales.rounded(self.weight_name).to(self.dtype)
        rounded = rounded if self._expert is None else rounded[self._expert]
        return rounded.mT if self._transposed else rounded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on rounded or plain values, whatever it asks for."""
        kwargs = kwargs or {}
        if func.overloadpacket in COMPUTE or func.namespace not in OTHER_NAMESPACES:
            return func(*_map(cls.rounded, args), **_map_dict(cls.rounded, kwargs))
        if func._schema.is_mutable:
            _mark_written(func, args, kwargs)
        out = func(*_map(cls.plain, args), **_map_dict(cls.plain, kwargs))
        if func not in PRESERVING:
            return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]
        if isinstance(out, list):
            return [args[0]._like(piece, func, args) for piece in out]
        return args[0]._like(out, func, args)

    def _like(self, data: Tensor, func: Any, args: tuple[Any, ...]) -> "FakeQuantizedTensor":
        """`data`, which came out of `func(self, ...)`, as part of the same weight."""
        global_scale, transposed, expert = self.global_scale, self._transposed, self._expert
        if func in TRANSPOSES:
            transposed ^= _swaps_matrix_dims(func, args, self.ndim)
        elif func is aten.select.int and args[1] == 0 and self._holds_all_experts():
            global_scale, expert = global_scale[args[2]], args[2]
        elif func is aten._to_copy.default:
            global_scale = global_scale.to(data.device)
        elif data.shape[-1] != self.shape[-1] and data.ndim == self.ndim and not transposed:
            raise ValueError(f"{self.weight_name}: cannot be cut along its blocks of {BLOCK_SIZE}")
        return FakeQuantizedTensor(
            data, global_scale, self.weight_name, self.scales, transposed, expert
        )

    def _holds_all_experts(self) -> bool:
        return self.ndim == 3 and self.shape[:1] == self.global_scale.shape

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Inner tensors and constants, for torch.compile."""
        return ["_data", "global_scale"], (
            self.weight_name,
            self.scales,
            self._transposed,
            self._expert,
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: Any, _outer_size: Any, _outer_stride: Any
    ) -> "FakeQuantizedTensor":
        """Inverse of `__tensor_flatten__`."""
        data, global_scale = inner_tensors["_data"], inner_tensors["global_scale"]
        return FakeQuantizedTensor(data, global_scale, *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeQuantizedTensor":
        """Copy with scales of its own, which follow the copy of the model."""
        if id(self) in memo:
            found: FakeQuantizedTensor = memo[id(self)]
            return found
        data, global_scale = self._data.detach().clone(), self.global_scale.clone()
        copied: Any = FakeQuantizedTensor(data, global_scale, self.weight_name, self.scales)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        copied.scales = deepcopy(self.scales, memo)
        copied.grad = deepcopy(self.grad, memo)
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain parameter, which anyone can read."""
        plain = self._data.detach()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeQuantizedTensor({self.weight_name}, {self._data!r})"


def _map(read: Any, values: Any) -> Any:
    """`values` with the fake-quantized tensors in it, also inside lists, replaced by read(them)."""
    return [
        read(value)
        if isinstance(value, FakeQuantizedTensor)
        else _map(read, value)
        if isinstance(value, list | tuple)
        else value
        for value in values
    ]


def _map_dict(read: Any, values: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(values, _map(read, values.values()), strict=True))


def _mark_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The scales of every weight that `func` writes are stale."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if isinstance(tensor, FakeQuantizedTensor):
                tensor.scales.stale = True


def _swaps_matrix_dims(func: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether a transpose or permute exchanges the last two dimensions; other moves are refused."""
    order = list(range(ndim))
    if func is aten.permute.default:
        order = [dim % ndim for dim in args[1]]
    else:
        first, second = (dim % ndim for dim in (args[1:] or (-2, -1)))
        order[first], order[second] = order[second], order[first]
    if order not in (list(range(ndim)), [*range(ndim - 2), ndim - 1, ndim - 2]):
        raise ValueError(f"a fake-quantized weight cannot be permuted to {order}")
    return order != list(range(ndim))


# As DTensor does: without it optimizers fall back to one kernel launch a parameter.
optimizer._foreach_supported_types.append(FakeQuantizedTensor)
