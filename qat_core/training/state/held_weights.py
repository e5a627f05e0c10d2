"""Which tensors a prepared model holds, and whether they were written since they were measured.

Writes by an operator on a weight mark it at once, as do collectives and steps of optimizers
(`uncounted_writes.py`). Writes through a tensor that shares its memory show in PyTorch's version
counters. A weight whose memory was assigned from outside (`weight.data = tensor`) or given to
another library or process (`numpy()`, `__dlpack__`, `share_memory_`) counts as written at every
call of the model, and at every read outside of one. Not seen are other writes through pointers and
storages, and through NumPy arrays or DLPack of an entry of a state dict; after a weight stream all
weights are measured again.
"""

from collections import Counter
from copy import copy
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qat_core.training.mesh import shard_mesh

Version = tuple[int, int, int]


class HeldWeight(Protocol):
    """A fake-quantized weight as scales and tracking see it.

    Attributes:
        weight_name: the parameter's name in the prepared model.
        global_scale: FP32 divisor, 0-D or (E,).
        measured: when its scale was last computed, and its version then; None before.
    """

    weight_name: str
    global_scale: Tensor
    measured: Version | None
    requires_grad: bool

    def plain(self) -> Tensor:
        """The full-precision values, sharing memory."""


class HeldWeights:
    """The quantized parameters of one model, looked up through the modules that own them.

    Attributes:
        written: names of those that were written, or replaced, since `mark_measured`.
        num_writes: by name, how often, other than by memory that was assigned.
        meshes: by name, the ranks that share a weight; none on one device.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.written = set(names)
        self.num_writes = Counter[str]()
        self.meshes: dict[str, DeviceMesh] = {}
        self._assigned: set[str] = set()
        self._addresses: dict[int, str] = {}
        self._round = 0
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._names: dict[tuple[int, str], str] = {}
        for name in names:
            self.add(name, *_owner(model, name))
        self._ties = _ties(model, self._owners)
        # Not their shards, which FSDP2 replaces and nobody else should keep in memory.
        self._parameters: dict[str, nn.Parameter] = {}

    def find(self) -> None:
        """Look up the parameters, which FSDP2 and `Module.to` replace after `prepare`.

        Raises:
            ValueError: naming a weight in whose place there is now another one, or none.
        """
        for name, (module, leaf) in self._owners.items():
            parameter: Any = module._parameters.get(leaf)
            is_sharded, local = isinstance(parameter, DTensor), _local(parameter)
            if getattr(local, "held_by", None) is self and local.weight_name == name:
                if is_sharded and parameter is not self._parameters.get(name):
                    self.meshes[name] = shard_mesh(name, parameter)
                self._parameters[name] = parameter
            elif parameter is None or is_sharded or name not in self.meshes:
                raise ValueError(
                    f"{name}: replaced after prepare(), so that it would train unrounded: write "
                    "values into it (copy_, load_state_dict), or call prepare() after what "
                    "replaces weights, and on an unpickled model once more"
                )
            # else FSDP2 shows the gathered weight; the shard found before is still the one.
        for name, module, leaf in self._ties:
            owner, first_leaf = self._owners[name]
            if module._parameters.get(leaf) is not owner._parameters[first_leaf]:
                raise ValueError(
                    f"{name}: a module that shared it holds another weight since prepare(), which "
                    "would train unrounded: tie them again"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights; of a copied layer its own."""
        return tuple(self._owners)

    @property
    def modules(self) -> list[nn.Module]:
        """Where they stand, each module once: those that share a weight too."""
        places = [*self._owners.values(), *((module, leaf) for _, module, leaf in self._ties)]
        return list({id(module): module for module, _ in places}.values())

    def weight(self, name: str) -> HeldWeight:
        """The tensor that the model holds: of a sharded one, this rank's shard."""
        held: HeldWeight = _local(self._parameters[name])
        return held

    def all(self) -> list[HeldWeight]:
        """`weight` of all names that were found."""
        return [self.weight(name) for name in self._parameters]

    def shared_by(self, mesh: DeviceMesh) -> list[HeldWeight]:
        """`weight` of those that the ranks of `mesh` share."""
        return [self.weight(name) for name, own in self.meshes.items() if own == mesh]

    def holds(self, weight: HeldWeight) -> bool:
        """Whether this is the very tensor that the model holds, not a copy."""
        return weight is self.weight(weight.weight_name)

    def holds_memory_of(self, weight: HeldWeight) -> bool:
        """Whether this tensor or view shows the memory that the model holds, with its scale.

        Neither a copy nor, where `.data` moved to other rows of a buffer, the rows of before.
        """
        held, plain = self.weight(weight.weight_name), weight.plain()
        if held.plain().untyped_storage().data_ptr() != plain.untyped_storage().data_ptr():
            return False
        if not self.is_assigned(weight.weight_name):
            return True
        return _address(held.global_scale) == _address(weight.global_scale)

    def is_measured(self, name: str) -> bool:
        """Whether the weight is the one last measured, neither written nor moved since.

        On all ranks alike: each would otherwise wait for the others in the all-reduce.
        """
        parameter = self._parameters.get(name)
        if parameter is None:  # of a copied layer, a weight of the group that stayed behind
            return True
        return bool(_local(parameter).measured == self._version(parameter))

    def is_assigned(self, name: str) -> bool:
        """Whether the weight's memory is another's, who may write it unseen."""
        return name in self._assigned

    def any_unmeasured(self) -> bool:
        """Whether a weight was, or may have been, written since `mark_measured`."""
        if self.written or self._assigned:
            return True
        return not all(map(self.is_measured, self._parameters))

    def require_inside(self, model: nn.Module) -> None:
        """ValueError naming a weight whose layer is no longer a part of the model."""
        inside = set(map(id, model.modules()))
        for name, (module, _) in self._owners.items():
            if id(module) not in inside:
                raise ValueError(
                    f"{name}: its layer left the model after prepare(), and what took its place "
                    "would train unrounded: call prepare() after what replaces layers"
                )

    def mark_measured(self) -> None:
        """From now on, compare with the weights as they are."""
        self._round += 1
        self.written.clear()
        self._addresses.clear()
        for name, parameter in self._parameters.items():
            weight = _local(parameter)
            weight.measured = self._version(parameter)
            self._addresses[_address(weight.plain())] = name

    def _version(self, parameter: Any) -> Version:
        """Differs after each write, through state dicts too, and for what was not measured last.

        Writes to a DTensor count there instead of in its memory. Tensors that took a weight's place
        for a while, as in `torch.func.functional_call`, have been measured in another round.
        """
        own = parameter._version if type(parameter) is DTensor else 0
        return _local(parameter).plain()._version, own, self._round

    def mark_written(self, name: str, *, assigned: bool = False) -> None:
        """Weight `name` was written; `assigned`: its memory is another's, see above."""
        self.written.add(name)
        if assigned:
            self._assigned.add(name)
        else:
            self.num_writes[name] += 1

    def mark_all_written(self) -> None:
        """Each weight may have been written unseen."""
        self.written = set(self._owners)

    def mark_memory_written(self, tensor: Tensor) -> None:
        """As `mark_written` of the weight, if any, whose memory `tensor` shows."""
        plain = getattr(tensor, "plain", lambda: tensor)()
        address = _address(plain)
        name = self._addresses.get(address) if address else None
        # An offloaded weight has left its memory to others, such as what gathers it for a stream.
        if name and _address(self.weight(name).plain()) == address:
            self.mark_written(name)

    def release(self) -> None:
        """Let go of the weights, to be looked up and measured again at the next use.

        FSDP2 replaces each by its shard, and whole ones would stay in memory until then.
        """
        self._parameters.clear()
        self._addresses.clear()
        self.mark_all_written()

    def without_weights(self) -> "HeldWeights":
        """For a copy of the model, or of some layers: `add` its weights."""
        copied = copy(self)
        copied._owners, copied._names, copied._ties = {}, {}, []
        copied._parameters, copied._addresses = {}, {}
        copied.written, copied.meshes, copied._assigned = set(), dict(self.meshes), set()
        copied.num_writes = Counter()
        return copied

    def name_of(self, module: nn.Module, leaf: str) -> str | None:
        """The weight that stands there; None if it is not tracked."""
        return self._names.get((id(module), leaf))

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module of a weight, and its name there."""
        return self._owners[name]

    def has_owner(self, module: nn.Module) -> bool:
        """Whether a weight stands in this very module."""
        return any((id(module), leaf) in self._names for leaf in module._parameters)

    def add(self, name: str, module: nn.Module, leaf: str) -> None:
        """Track one more weight."""
        self._owners[name] = module, leaf
        self._names[id(module), leaf] = name
        self.written.add(name)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def _ties(
    model: nn.Module, owners: dict[str, tuple[nn.Module, str]]
) -> list[tuple[str, nn.Module, str]]:
    """Further places of weights that several modules share."""
    names = {id(module._parameters[leaf]): name for name, (module, leaf) in owners.items()}
    return [
        (names[id(parameter)], module, leaf)
        for module in model.modules()
        for leaf, parameter in module._parameters.items()
        if id(parameter) in names and owners[names[id(parameter)]] != (module, leaf)
    ]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _local(parameter: Any) -> Any:
    # Asked of all weights at every forward; isinstance takes a tensor four times as long.
    return parameter._local_tensor if type(parameter) is DTensor else parameter
