"""State dicts of prepared models: plain tensors go out, and what is assigned is quantized."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.state.weight_state import WeightState


def full_precision_state(model: nn.Module) -> dict[str, Tensor]:
    """As `model.state_dict()`, without a dispatch for each weight: a stream asks at every step."""
    state: dict[str, Tensor] = {}
    for name, held in model.state_dict(keep_vars=True).items():
        if isinstance(held, FakeQuantizedTensor):
            state[name] = held.plain().detach()
        elif isinstance(held, Tensor):
            state[name] = _plain(held.detach(), held)
        else:  # extra state, which is not a weight
            state[name] = held
    return state


def plain_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """State dict hook: plain tensors for all to save; Parameters (keep_vars) stay what they are."""
    for leaf, parameter in module._parameters.items():
        entry = state_dict.get(prefix + leaf)
        if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter):
            state_dict[prefix + leaf] = _plain(entry, parameter)


def adopt_assigned(state: WeightState, module: nn.Module, _keys: Any) -> None:
    """Load hook: quantize what `load_state_dict(assign=True)` put in the place of a weight."""
    for leaf, parameter in module._parameters.items():
        name = state.weights.name_of(module, leaf)
        if name is None or parameter is None:
            continue
        if not isinstance(parameter, DTensor):
            if not isinstance(parameter, FakeQuantizedTensor):
                module._parameters[leaf] = fake_quantized(name, parameter, state)
                state.weights.mark_written(name)
        elif not isinstance(parameter._local_tensor, FakeQuantizedTensor):
            local = nn.Parameter(parameter._local_tensor.detach(), requires_grad=False)
            parameter._local_tensor = fake_quantized(name, local, state).detach()
            parameter._local_tensor._data = local.detach()  # type: ignore[attr-defined]
            state.weights.mark_written(name)


def fake_quantized(name: str, weight: nn.Parameter, state: WeightState) -> nn.Parameter:
    """A new Parameter on the same memory, whose writes through other tensors are seen too."""
    # Of its own: views of what stood here before keep the scale that they were rounded with.
    scale = torch.ones(state.values[name].shape, dtype=torch.float32, device=weight.device)
    tensor = FakeQuantizedTensor(weight.detach(), scale, name, state)
    parameter = nn.Parameter(tensor, requires_grad=weight.requires_grad)
    # below dispatch, where a Parameter is made, `detach` gives a version counter of its own
    parameter._data = weight.detach()  # type: ignore[attr-defined]
    parameter.is_detached = False  # type: ignore[attr-defined]
    parameter.grad = weight.grad
    return parameter


def _plain(entry: Tensor, parameter: Any) -> Tensor:
    """Shares memory and version counters with the parameter, so that writes to it are seen."""
    if isinstance(entry, FakeQuantizedTensor):
        plain: Tensor = parameter.plain().detach()
        return plain
    if isinstance(entry, DTensor) and isinstance(entry._local_tensor, FakeQuantizedTensor):
        entry._local_tensor = parameter._local_tensor.plain().detach()
    return entry
