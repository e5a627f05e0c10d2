"""The fake-quantized parameter: a weight that reads as NVFP4 in matrix products.

A parameter of this tensor subclass keeps its full-precision values. Optimizers, copies, collectives
and state dicts see those; matrix products, gathers of experts, and whatever else a forward pass (a
call of the model, or of a module of it) computes with see the values rounded to NVFP4, also through
views and copies of views. What is computed outside of one: `unrounded.py`.
Rounding happens below autograd, so

* the gradient reaches the parameter unchanged (straight-through estimator), and
* autograd keeps the parameter itself for the backward pass, which rounds once more, so that a
  prepared model needs no second copy of its weights. Where gradient checkpointing repeats a layer,
  the repetition rounds, and what it rounded stays for the backward product of the same layer.

What a backward pass computes with a weight other than products, as after a norm or a factor in the
forward pass, reads full precision: autograd keeps the same tensor for a penalty, which is meant to
be of full precision, and does not say which of the two it works for.
"""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils._python_dispatch import return_and_correct_aliasing

from qat_core.options import BLOCK_SIZE
from qat_core.training.forward_calls import in_backward
from qat_core.training.fsdp import PreAllGather, unpack_gathered
from qat_core.training.full_precision import FullPrecisionMemory
from qat_core.training.operators import (
    DETACH,
    PRESERVING,
    SELECTS,
    TRANSPOSES,
    as_list,
    attached_weight,
    is_compute,
    is_copied_to_compute,
    is_for_compute,
    read_all,
    read_dict,
    swaps_matrix_dims,
    written,
)
from qat_core.training.state.held_weights import HeldWeights, Version
from qat_core.training.state.rounded_weights import Kept
from qat_core.training.state.weight_state import WeightState
from qat_core.training.straight_through import round_to_nvfp4, straight_through
from qat_core.training.unrounded import unrounded

aten = torch.ops.aten


class FakeQuantizedTensor(FullPrecisionMemory):
    """Weight (..., N, K), BF16 or FP32, that matrix products read as NVFP4.

    Args:
        data: the full-precision values.
        global_scale: FP32 divisor of the whole parameter: 0-D, or (E,) for experts (E, N, K).
        weight_name: the parameter's name in the prepared model.
        state: keeps `global_scale` up to date, and what is rounded.
        transposed: blocks run along the second to last dimension of `data`.
        expert: `data` (N, K) is the weight of this expert alone.
    """

    global_scale: Tensor
    state: WeightState
    measured: Version | None = None
    is_transposed: bool
    _expert: int | None
    is_detached: bool = False  # from autograd, as code does that wants full precision
    _kept: Kept | None = None  # of views that a backward pass made, see state/rounded_weights.py

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        global_scale: Tensor,
        weight_name: str,
        state: WeightState,
        transposed: bool = False,
        expert: int | None = None,
    ) -> "FakeQuantizedTensor":
        """Wraps `data` without a copy."""
        self: FakeQuantizedTensor = cls._wrap(data)
        self.global_scale, self.weight_name, self.state = global_scale, weight_name, state
        self.is_transposed, self._expert = transposed, expert
        return self

    fsdp_pre_all_gather = property(PreAllGather)
    fsdp_post_all_gather = unpack_gathered

    def _assign(self, value: Tensor) -> None:
        """As PyTorch's assignment to `.data`, which would change the wrapper alone.

        Raises:
            ValueError: another shape than the weight's, as DeepSpeed assigns, or another layout.
        """
        plain = (value._data if isinstance(value, FullPrecisionMemory) else value).detach()
        if plain.shape != self.shape or plain.layout != self.layout:
            raise ValueError(
                f"{self.weight_name}: assigned .data of shape {tuple(plain.shape)}, needs "
                f"{tuple(self.shape)}, dense: quantized weights keep their shape"
            )
        own = self._data
        is_own = (plain.data_ptr(), plain.dtype) == (own.data_ptr(), own.dtype)
        if is_own and plain.stride() == own.stride():  # as `weight.data += delta` ends
            self.state.weights.mark_written(self.weight_name)
            return
        shell = self._like(plain, aten.alias.default, (self,), 0)
        torch.Tensor.data.__set__(self, shell)  # type: ignore[attr-defined]
        # What views of the old memory were rounded with stays theirs, for a backward pass.
        self._data, self.global_scale = plain, shell.global_scale.clone()
        self._mark_assigned()

    def _mark_assigned(self) -> None:
        self.state.weights.mark_written(self.weight_name, assigned=True)

    @property
    def stays_rounded(self) -> bool:
        """Whether `rounded` is kept in memory until a weight changes."""
        return self.state.kept.stays(self._data)

    @property
    def held_by(self) -> HeldWeights:
        """The weights of the model, this one among them."""
        return self.state.weights

    def rounded(self) -> Tensor:
        """The values rounded to NVFP4, in the parameter's dtype and shape."""
        data = self._data.mT if self.is_transposed else self._data
        is_matrix = data.ndim >= 2 and data.shape[:-2] == self.global_scale.shape
        if not is_matrix or data.shape[-1] % BLOCK_SIZE:
            raise ValueError(
                f"{self.weight_name}: computed with through a view of shape {tuple(self.shape)}, "
                f"which is not a whole matrix or expert in blocks of {BLOCK_SIZE}: add it to ignore"
            )
        if type(data) is Tensor:
            rounded = self.state.rounded(self, data, self._expert)
        elif self.state.kept.keep is None:  # torch.compile is tracing
            rounded = round_to_nvfp4(data, self.global_scale, self.state.method, self.weight_name)
        else:
            raise ValueError(
                "keep: layers compiled by torch.compile round weights again each time; "
                "leave it out of prepare()"
            )
        return rounded.mT if self.is_transposed else rounded

    @classmethod
    # Else Dynamo would compile what runs between two of its graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on rounded or plain values, whatever it asks for."""
        kwargs = kwargs or {}
        changed = written(cls, func, args, kwargs)  # by an optimizer, be it a custom kernel
        if not changed and (is_compute(func) or is_for_compute(cls, func, args)):
            return straight_through(func, args, kwargs, cls, cls.rounded)
        if func.is_view and func not in PRESERVING:
            raise ValueError(
                f"{args[0].weight_name}: used through {func}, which may not keep its blocks of "
                f"{BLOCK_SIZE}: add it to ignore"
            )
        for tensor in changed:
            tensor.state.weights.mark_written(tensor.weight_name)
        out = func(*read_all(cls, cls.plain, args), **read_dict(cls, cls.plain, kwargs))
        if func in PRESERVING or (func is aten.clone.default and is_copied_to_compute(args[0])):
            non_blocking = kwargs.get("non_blocking", False)
            with _normal_tensors():  # views of a normal tensor are normal everywhere
                pieces = [
                    args[0]._like(piece, func, args, index, non_blocking)
                    for index, piece in enumerate(as_list(out))
                ]
            out = pieces if isinstance(out, list) else pieces[0]
        elif not changed and (weight := attached_weight(cls, func, args)) is not None:
            out = unrounded(out, weight.weight_name, str(func))
        return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]

    def _like(
        self, data: Tensor, func: Any, args: tuple[Any, ...], index: int, non_blocking: bool = False
    ) -> "FakeQuantizedTensor":
        """`data`, result number `index` of `func(self, ...)`, as part of the same weight.

        non_blocking: as `data` was copied to another device. The CPU would otherwise wait for each
        weight in turn when verl offloads a model.
        """
        global_scale, transposed, expert = self.global_scale, self.is_transposed, self._expert
        axis = -2 if transposed else -1
        if func in TRANSPOSES:
            transposed ^= swaps_matrix_dims(func, args)
        elif func in SELECTS and (*args, 0)[1] == 0 and self._holds_all_experts():
            expert = args[2] if func is aten.select.int else index
            global_scale = global_scale[expert]
        elif func is aten.as_strided.default:  # how torch.compile makes a view again
            transposed = bool(data.stride(-1) != 1)
        elif data.ndim == self.ndim and data.shape[axis] != self.shape[axis]:
            raise ValueError(f"{self.weight_name}: cannot be cut along its blocks of {BLOCK_SIZE}")
        if global_scale.device != data.device:
            self.state.kept.forget(self.weight_name)  # `model.to("cpu")` is to free memory
            if global_scale.is_meta:  # there is nothing to copy
                global_scale = torch.ones(global_scale.shape, device=data.device)
            else:
                global_scale = global_scale.to(data.device, non_blocking=non_blocking)
        like = FakeQuantizedTensor(
            data, global_scale, self.weight_name, self.state, transposed, expert
        )
        if func is DETACH or (self.is_detached and not isinstance(self, nn.Parameter)):
            like.is_detached = True
        is_plain = type(data) is Tensor  # what torch.compile traces, it holds forever
        if is_plain and in_backward() and (self._kept or isinstance(self, nn.Parameter)):
            like._kept = self.state.kept.share(self.weight_name, expert)
        return like

    def _holds_all_experts(self) -> bool:
        return self.ndim == 3 and self.shape[:1] == self.global_scale.shape

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Inner tensors and constants, for torch.compile, which copies the constants deeply.

        Compiled code asks for them at each call, and looks for no writes itself.
        """
        if type(self._data) is Tensor and self.state.may_be_stale():
            self.state.refresh_if_stale(self)
        return ["_data", "global_scale"], (
            self.weight_name,
            ref(self.state),
            self.is_transposed,
            self._expert,
            self.state.method,
        )

    @classmethod
    def __metadata_guard__(cls, traced: Any, current: Any) -> bool:
        """Layers share compiled code: names and state are not part of it."""
        return bool(traced[2:] == current[2:])

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: Any, _outer_size: Any, _outer_stride: Any
    ) -> "FakeQuantizedTensor":
        """Inverse of `__tensor_flatten__`."""
        weight_name, state, transposed, expert, _ = context
        data, global_scale = inner_tensors["_data"], inner_tensors["global_scale"]
        return FakeQuantizedTensor(data, global_scale, weight_name, state(), transposed, expert)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy with the state of the copy of its model, or layer; plain if copied without."""
        if id(self) in memo:
            found: Tensor = memo[id(self)]
            return found
        state, name = self.state.copied_with(self.weight_name, memo), self.weight_name
        copied = self._data.detach().clone()
        if state is not None:
            global_scale = self.global_scale.clone()
            kind = self.is_transposed, self._expert
            copied = FakeQuantizedTensor(copied, global_scale, name, state, *kind)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        copied.grad = deepcopy(self.grad, memo)
        return copied


def _normal_tensors() -> AbstractContextManager[Any]:
    """Where inference mode is on, off; a switch costs more than to ask."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


# As DTensor does: without it optimizers fall back to one kernel launch a parameter.
optimizer._foreach_supported_types.append(FakeQuantizedTensor)
