"""What a fake-quantized weight is to each operator: a matrix of the model, or plain memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.training.forward_calls import in_backward

aten = torch.ops.aten

# Operators that read a weight as a matrix of the model. Those of other namespaces than the plain
# ones (custom kernels) do too.
COMPUTE = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot),
    *(aten.linear, aten.matmul, aten._grouped_mm, aten.index, aten.index_select, aten.embedding),
    *(aten.gather, aten._cdist_forward, aten._euclidean_dist),
    *(aten._sparse_mm, aten._sparse_addmm, aten.hspmm, aten._addmm_activation),
    *(aten._int_mm, aten._scaled_mm, aten._trilinear, aten.outer, aten.ger, aten.vdot),
    *(aten.convolution, aten._convolution, aten._embedding_bag, aten._embedding_bag_forward_only),
    # Fast paths of PyTorch's own layers, which take the weights of many products at once.
    *(aten._transformer_encoder_layer_fwd, aten._native_multi_head_attention),
}
COLLECTIVES = {"c10d", "_c10d_functional", "fsdp", "_dtensor"}
PLAIN_NAMESPACES = {"aten", "prim", "prims", "nvfp4"} | COLLECTIVES

# Results of these keep the class; those of all other operators are plain tensors, and other views
# are refused.
DETACH = aten.detach.default
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
SELECTS = {aten.select.int, aten.unbind.int}
PRESERVING = {
    *(*TRANSPOSES, *SELECTS, DETACH, aten.alias.default, aten.slice.Tensor),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.expand.default),
    *(aten.view.default, aten._unsafe_view.default),
    *(aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default),
    *(aten.new_zeros.default, aten.as_strided.default),
}
KEPT = PRESERVING | {aten.clone.default}  # see `is_copied_to_compute`


def is_compute(func: Any) -> bool:
    """Whether the operator reads a weight as a matrix of the model."""
    return func.overloadpacket in COMPUTE or func.namespace not in PLAIN_NAMESPACES


def is_for_compute(cls: type[Any], func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the result may be multiplied: a copy for backward, or what a forward pass makes.

    The same operators outside of a forward pass serve penalties, averages of models and files.
    Adding to a frozen weight is how PEFT's DoRA takes norms, of full precision when it starts.
    """
    if func is aten.copy_.default and _in_saved_tensor_hook():
        return True
    if func.namespace != "aten" or func.is_view or func in KEPT or not _returns_tensors(func):
        return False
    weights = [value for value in operands(args) if isinstance(value, cls)]
    if not weights or not all(state.is_computing() for state in {w.state for w in weights}):
        return False
    return func.overloadpacket is not aten.add or any(w.state.trains(w) for w in weights)


def attached_weight(cls: type[Any], func: Any, args: tuple[Any, ...]) -> Any:
    """A weight, itself or through views, of which the operator makes new values; None if detached.

    Detached weights serve whoever wants full precision, and backward passes are the trainer's own.
    """
    makes_values = func.namespace == "aten" and not func.is_view and _returns_tensors(func)
    if not makes_values or _is_factory(func) or in_backward():
        return None
    for value in operands(args):
        if isinstance(value, cls) and (isinstance(value, nn.Parameter) or not value.is_detached):
            return value
    return None


def is_copied_to_compute(weight: Any) -> bool:
    """Whether a copy is for a product: made in a forward pass, or of a transpose, or an expert.

    Elsewhere a copy of the whole weight or of some rows, as a shard is, serves an optimizer or
    a file.
    """
    whole = weight.state.shapes[weight.weight_name]
    is_part = weight.is_transposed or (weight.ndim >= 2 and weight.shape[1:] != whole[1:])
    return bool(is_part or (weight.ndim >= 2 and weight.state.is_computing()))


def read_all(cls: type, read: Callable[..., Tensor], values: Any) -> list[Any]:
    """`values` with those of type `cls`, also inside lists, replaced by read(them)."""
    return [
        read(value)
        if isinstance(value, cls)
        else read_all(cls, read, value)
        if isinstance(value, list | tuple)
        else value
        for value in values
    ]


def read_dict(cls: type, read: Callable[..., Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """As `read_all`, for keyword arguments."""
    return dict(zip(values, read_all(cls, read, values.values()), strict=True)) if values else {}


def operands(values: Iterable[Any]) -> list[Any]:
    """The tensors among the values, those of lists and tuples one by one."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += operands(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _is_factory(func: Any) -> bool:
    """Whether the result has the shape of a weight, but not its values."""
    name = func._schema.name.removeprefix("aten::")
    return bool(name.startswith("new_") or name.endswith("_like"))


def _returns_tensors(func: Any) -> bool:
    """Not `record_stream` or `is_pinned`, which are about the memory."""
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _in_saved_tensor_hook() -> bool:
    """Whether what runs may be a pack hook of autograd, such as `save_on_cpu` copies with.

    The backward pass then multiplies with the copy: it needs the values of the forward pass.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not torch.is_grad_enabled()


def as_list(out: Any) -> list[Tensor]:
    """The results of an operator that returns one tensor or several."""
    return out if isinstance(out, list) else [out]


def written(cls: type, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of type `cls` that `func` writes."""
    found: list[Any] = []
    if not func._schema.is_mutable:
        return found
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = value if isinstance(value, list | tuple) else (value,)
        found += [tensor for tensor in tensors if isinstance(tensor, cls)]
    return found


def swaps_matrix_dims(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a transpose or permute exchanges the last two dimensions; other moves are refused."""
    weight, ndim = args[0], args[0].ndim
    if func is aten.t.default:  # of each linear layer, at each use
        return bool(ndim == 2)
    order = list(range(ndim))
    if func is aten.permute.default:
        order = [dim % ndim for dim in args[1]]
    else:
        first, second = (dim % ndim for dim in args[1:])
        order[first], order[second] = order[second], order[first]
    if order not in (list(range(ndim)), [*range(ndim - 2), ndim - 1, ndim - 2]):
        raise ValueError(f"{weight.weight_name}: quantized, cannot be permuted to {order}")
    return order != list(range(ndim))
