"""Which tensors a prepared model holds, and whether they were written since they were measured.

Writes by an operator on a weight mark it at once. Writes through a tensor that shares its memory,
such as an entry of a state dict, show in PyTorch's version counters, which are compared here.
"""

from copy import copy
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qat_core.mesh import shard_mesh

Version = tuple[int, int]


class TrackedWeight(Protocol):
    """A fake-quantized weight as scales and tracking see it.

    Attributes:
        weight_name: the parameter's name in the prepared model.
        global_scale: FP32 divisor, 0-D or (E,).
        measured: its version when its scale was last computed; None before.
    """

    weight_name: str
    global_scale: Tensor
    measured: Version | None

    def plain(self) -> Tensor:
        """The full-precision values, sharing memory."""


class HeldWeights:
    """The quantized parameters of one model, looked up through the modules that own them.

    Attributes:
        stale: a weight was written since `mark_measured`.
        mesh: the ranks that share the weights; None on one device.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.stale = True
        self.mesh: DeviceMesh | None = None
        self._owners = {name: _owner(model, name) for name in names}
        # Not their shards, which FSDP2 replaces and nobody else should keep in memory.
        self._parameters: dict[str, nn.Parameter] = {}

    def find(self) -> None:
        """Look up the parameters, which FSDP2 and `Module.to` replace after `prepare`.

        Raises:
            ValueError: naming a weight in whose place there is now another one.
        """
        for name, (module, leaf) in self._owners.items():
            parameter: Any = module._parameters[leaf]
            is_sharded = isinstance(parameter, DTensor)
            if getattr(_local(parameter), "held_by", None) is self:
                if is_sharded and parameter is not self._parameters.get(name):
                    self.mesh = shard_mesh(name, parameter)
                self._parameters[name] = parameter
            elif is_sharded or self.mesh is None:
                raise ValueError(
                    f"{name}: replaced after prepare(), perhaps by load_state_dict(assign=True): "
                    "load without assign, or call prepare() on the model again"
                )
            # else FSDP2 shows the gathered weight; the shard found before is still the one.

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights; of a copied layer its own."""
        return tuple(self._owners)

    def weight(self, name: str) -> TrackedWeight:
        """The tensor that the model holds: of a sharded one, this rank's shard."""
        held: TrackedWeight = _local(self._parameters[name])
        return held

    def all(self) -> list[TrackedWeight]:
        """`weight` of all names that were found."""
        return [self.weight(name) for name in self._parameters]

    def holds(self, weight: TrackedWeight) -> bool:
        """Whether this is the very tensor that the model holds, not a copy."""
        return weight is self.weight(weight.weight_name)

    def holds_memory_of(self, weight: TrackedWeight) -> bool:
        """Whether this tensor or view shows the memory that the model holds, not a copy."""
        held = self.weight(weight.weight_name).plain()
        return held.untyped_storage().data_ptr() == weight.plain().untyped_storage().data_ptr()

    def is_measured(self, name: str) -> bool:
        """Whether the weight is the one last measured, neither written nor moved since.

        On all ranks alike: each would otherwise wait for the others in the all-reduce.
        """
        parameter = self._parameters[name]
        return bool(_local(parameter).measured == _version(parameter))

    def all_measured(self) -> bool:
        """`is_measured` of all weights."""
        return all(map(self.is_measured, self._parameters))

    def mark_measured(self) -> None:
        """From now on, compare with the weights as they are."""
        self.stale = False
        for parameter in self._parameters.values():
            _local(parameter).measured = _version(parameter)

    def release(self) -> None:
        """Let go of the weights, to be looked up and measured again at the next use.

        FSDP2 replaces each by its shard, and whole ones would stay in memory until then.
        """
        self._parameters.clear()
        self.stale = True

    def without_weights(self) -> "HeldWeights":
        """For a copy of the model, or of some layers: `add` its weights."""
        copied = copy(self)
        copied._owners, copied._parameters, copied.stale = {}, {}, True
        return copied

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module of a weight, and its name there."""
        return self._owners[name]

    def add(self, name: str, module: nn.Module, leaf: str) -> None:
        """Track one more weight."""
        self._owners[name] = module, leaf


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def _local(parameter: Any) -> Any:
    # Asked of all weights at every forward; isinstance takes a tensor four times as long.
    return parameter._local_tensor if type(parameter) is DTensor else parameter


def _version(parameter: Any) -> Version:
    """Counts writes, also through state dicts, to the memory, and to a DTensor instead of to it."""
    own = parameter._version if type(parameter) is DTensor else 0
    return _local(parameter).plain()._version, own
