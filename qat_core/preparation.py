"""Put a recipe onto a model: from then on its quantized weights train fake-quantized."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.parameter import FakeQuantizedTensor
from qat_core.plan import QuantPlan, plan
from qat_core.recipe import Recipe
from qat_core.scales import Scales


def prepare(model: nn.Module, recipe: Recipe, *, allow_meta: bool = False) -> QuantPlan:
    """Make the weights that `recipe` quantizes read as NVFP4 in every matrix product, in place.

    The Parameter objects, their names, module classes and state dicts stay as they were, so that
    optimizers and checkpoints, made before or after, need to know nothing. Call it before
    `fully_shard`.

    Args:
        model: BF16 or FP32 weights on one device.
        recipe: what to quantize and how.
        allow_meta: take weights on the meta device, to be loaded (without `assign`) before the
            first forward pass.

    Raises:
        ValueError: see `plan`; or a weight is on the meta device or another one than the rest,
            prepared, sharded, of another dtype, or holds NaN or infinity. The model is then
            unchanged.
    """
    checked = plan(model, recipe)
    weights = {name: model.get_parameter(name) for name in checked.quantized}
    for name, weight in weights.items():
        _refuse_unfit(name, weight, allow_meta)
    first = checked.quantized[0]
    for name, weight in weights.items():
        if weight.device != weights[first].device:
            raise ValueError(
                f"{name}: is on {weight.device}, {first} on {weights[first].device}; quantized "
                "weights need to be on one device: move the model before prepare()"
            )
    scales = Scales(model, checked, recipe)
    swapped = [(weight, _fake_quantized(name, weight, scales)) for name, weight in weights.items()]
    _swap(swapped)
    if not any(weight.is_meta for weight in weights.values()):
        try:
            scales.refresh_if_stale()
            scales.require_finite()
        except ValueError:
            _swap(swapped)
            raise
        scales.release_weights()
    model.register_forward_pre_hook(scales.before_forward)
    for name in checked.quantized:
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_state_dict_post_hook(_plain_entries)  # type: ignore[no-untyped-call]
    return checked


def is_prepared(model: nn.Module) -> bool:
    """Whether `prepare` was called on the model, sharded since or not."""
    return scales_of(model) is not None


def scales_of(model: nn.Module) -> Scales | None:
    """The global scales of a prepared model."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Scales):
            return owner
    return None


def _refuse_unfit(name: str, weight: Tensor, allow_meta: bool) -> None:
    if isinstance(weight, FakeQuantizedTensor):
        raise ValueError(f"{name}: already prepared; prepare() is called once on a model")
    if isinstance(weight, DTensor):
        raise ValueError(f"{name}: already sharded; call prepare() before fully_shard()")
    if weight.is_meta and not allow_meta:
        raise ValueError(
            f"{name}: is on the meta device; load the weights first, or pass allow_meta=True and "
            "load them before the first forward pass"
        )
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: needs bfloat16 or float32, got {weight.dtype}")


def _fake_quantized(name: str, weight: nn.Parameter, scales: Scales) -> nn.Parameter:
    tensor = FakeQuantizedTensor(weight.detach(), scales.values[name], name, scales)
    parameter = nn.Parameter(tensor, requires_grad=weight.requires_grad)
    parameter.grad = weight.grad
    return parameter


def _swap(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Exchange contents, not objects: optimizers and tied modules keep the objects."""
    for first, second in pairs:
        torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]


def _plain_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """State dict hook: plain tensors for all to save; Parameters (keep_vars) stay what they are."""
    for leaf, parameter in module._parameters.items():
        entry = state_dict.get(prefix + leaf)
        if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter):
            state_dict[prefix + leaf] = _plain(entry, parameter)


def _plain(entry: Tensor, parameter: Any) -> Tensor:
    """Shares memory and version counters with the parameter, so that `Scales` sees writes to it."""
    if isinstance(entry, FakeQuantizedTensor):
        plain: Tensor = parameter.plain().detach()
        return plain
    if isinstance(entry, DTensor) and isinstance(entry._local_tensor, FakeQuantizedTensor):
        entry._local_tensor = parameter._local_tensor.plain().detach()
    return entry
