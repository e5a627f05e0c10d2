"""Global scales of a prepared model, refreshed once after its weights changed.

Any in-place change of a prepared weight (optimizer step, `load_state_dict`, a manual edit) marks
the scales stale; the next use computes the amax of all groups at once. Sharded weights need one
all-reduce of one FP32 value a group (and expert).
"""

from copy import copy, deepcopy
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qat_core.fsdp import max_over_ranks, shard_mesh
from qat_core.nvfp4 import fake_quantize, global_scale, group_amax
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe

if TYPE_CHECKING:
    from qat_core.parameter import FakeQuantizedTensor


class Scales:
    """Keeps one global scale a group: `values[name]` is FP32, 0-D or (E,) for experts (E, N, K)."""

    def __init__(self, model: nn.Module, plan: QuantPlan, recipe: Recipe) -> None:
        weights = {name: model.get_parameter(name) for name in plan.quantized}
        self.policy = recipe.scale
        self.block_scale = recipe.block_scale
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.values = {
            name: torch.ones(weight.shape[:-2], dtype=torch.float32, device=weight.device)
            for name, weight in weights.items()
        }
        self.stale = True
        self.num_refreshes = 0
        self.packed_shards: dict[str, tuple[Tensor, ...]] = {}
        self._groups = tuple(plan.groups.values())
        self._owners = {name: _owner(model, name) for name in weights}
        # Not their shards, which FSDP2 replaces and nobody else should keep in memory.
        self._parameters: dict[str, nn.Parameter] = {}
        self._rounded: dict[str, Tensor] = {}
        self._mesh: DeviceMesh | None = None
        self._finite: tuple[Tensor, ...] = ()
        self._ready: torch.cuda.Event | None = None

    def refresh_if_stale(self) -> None:
        """Recompute all global scales if a weight changed since the last time."""
        if self.stale:
            self._find_weights()
            self._refresh()

    def refresh_if_written(self, name: str) -> None:
        """As `refresh_if_stale`, but sees any change of weight `name`, as `before_forward` does.

        FSDP2 gathers the weights of its root before that hook.
        """
        if not self.stale:
            self.stale = not self._is_measured(name)
        self.refresh_if_stale()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, *_: Any) -> None:
        """Forward pre-hook of the whole model.

        Sees also the changes that no parameter notices, made through a tensor of the state dict,
        and refreshes on behalf of compiled layers, which do not look.
        """
        self._find_weights()
        if self.stale or not all(map(self._is_measured, self._parameters)):
            self._refresh()

    def rounded(self, name: str) -> Tensor:
        """The whole weight rounded to NVFP4 in BF16, kept until a weight changes."""
        if name not in self._rounded:
            weight = self.weight(name)
            self._rounded[name] = fake_quantize(
                weight.plain(), weight.global_scale, self.block_scale, name=name
            )
        return self._rounded[name]

    def weight(self, name: str) -> "FakeQuantizedTensor":
        """The tensor that the model holds: of a sharded one, this rank's shard."""
        held: FakeQuantizedTensor = _local(self._parameters[name])
        return held

    def current_weights(self) -> list["FakeQuantizedTensor"]:
        """`weight` of all names."""
        return [self.weight(name) for name in self._parameters]

    def is_current(self, weight: "FakeQuantizedTensor") -> bool:
        """Whether this is the very tensor that the model holds, not a copy."""
        return weight is self.weight(weight.weight_name)

    def is_memory_of(self, weight: "FakeQuantizedTensor") -> bool:
        """Whether this tensor or view shows the memory that the model holds, not a copy."""
        held = self.weight(weight.weight_name).plain()
        return held.untyped_storage().data_ptr() == weight.plain().untyped_storage().data_ptr()

    def shard_range(self, name: str, mesh: DeviceMesh) -> tuple[int, int]:
        """First row and number of rows of each rank's shard, padding included (as FSDP2 cuts)."""
        num_rows = ceil(self.shapes[name][0] / mesh.size())
        return mesh.get_local_rank() * num_rows, num_rows

    def require_finite(self) -> None:
        """Refuse weights that held NaN or infinity at the last refresh; waits for the GPU.

        On a GPU a refresh asks for the one before, as it would otherwise idle at every step. Until
        then a weight that is not finite reads as NaN.
        """
        if not self._finite or bool(torch.cat(self._finite).all()):
            return
        groups = zip(self._groups, self._finite, strict=True)
        bad = [name for names, finite in groups if not bool(finite.all()) for name in names]
        self._finite = ()
        now = [name for name in bad if not bool(self.weight(name).plain().isfinite().all())]
        culprits = ", ".join(now or bad)
        raise ValueError(f"{culprits}: holds NaN or infinity, which NVFP4 cannot represent")

    def release_weights(self) -> None:
        """Let go of the weights, to be looked up and measured again at the next use.

        FSDP2 replaces each by its shard, and whole ones would stay in memory until then.
        """
        self._parameters.clear()
        self._finite = ()
        self.stale = True

    def copied_with(self, name: str, memo: dict[int, Any]) -> "Scales | None":
        """The copy of these scales, told of the copy of weight `name`; None outside its module."""
        module, leaf = self._owners[name]
        if id(module) not in memo:
            return None
        copied = deepcopy(self, memo)
        copied._owners[name] = memo[id(module)], leaf
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scales":
        """Scales without weights; `copied_with` adds those of the model or layers copied."""
        copied = memo[id(self)] = copy(self)
        copied.values, copied.packed_shards, copied._owners = dict(self.values), {}, {}
        copied._parameters, copied._rounded = {}, {}
        copied.release_weights()
        return copied

    def wait_until_ready(self) -> None:
        """Let the current CUDA stream wait for the last refresh, which ran in another one."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)

    @torch.no_grad()
    def _refresh(self) -> None:
        self.require_finite()
        groups = [[self.weight(name).plain() for name in names] for names in self._groups]
        amax = [
            self._unsharded(names[0], local_amax)
            for names, local_amax in zip(self._groups, group_amax(groups), strict=True)
        ]
        flat = torch.cat(amax)
        sizes = [len(values) for values in amax]
        if self._mesh is not None:
            flat = max_over_ranks(flat.to(self._mesh.device_type), self._mesh.get_group())
        self._store(torch.split(global_scale(flat, self.policy), sizes))
        self._finite = torch.split(flat.isfinite(), sizes)
        if flat.is_cuda and self._mesh is not None:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()
        if not flat.is_cuda:
            self.require_finite()
        self._rounded.clear()
        self.packed_shards.clear()
        self.stale = False
        self.num_refreshes += 1
        for parameter in self._parameters.values():
            _local(parameter).measured = _version(parameter)

    def _find_weights(self) -> None:
        """Look up the parameters, which FSDP2 and `Module.to` replace after `prepare`."""
        if not self._parameters:  # else a copy of some layers would look for those of the others
            groups = (tuple(n for n in names if n in self._owners) for names in self._groups)
            self._groups = tuple(names for names in groups if names)
        for name, (module, leaf) in self._owners.items():
            parameter: Any = module._parameters[leaf]
            is_sharded = isinstance(parameter, DTensor)
            if getattr(_local(parameter), "scales", None) is self:
                if is_sharded and parameter is not self._parameters.get(name):
                    self._mesh = shard_mesh(name, parameter)
                self._parameters[name] = parameter
            elif is_sharded or self._mesh is None:
                raise ValueError(
                    f"{name}: replaced after prepare(), perhaps by load_state_dict(assign=True): "
                    "load without assign, or call prepare() on the model again"
                )
            # else FSDP2 shows the gathered weight; the shard found before is still the one.

    def _is_measured(self, name: str) -> bool:
        """Whether the weight is the one that the last refresh saw, neither written nor moved since.

        On all ranks alike: each would otherwise wait for the others in the all-reduce.
        """
        parameter = self._parameters[name]
        return bool(_local(parameter).measured == _version(parameter))

    def _unsharded(self, name: str, amax: Tensor) -> Tensor:
        """Amax of all experts, those of other ranks 0; 1-D also for a matrix."""
        if amax.ndim == 0 or self._mesh is None:
            return amax.reshape(-1)
        whole = amax.new_zeros(self.shapes[name][0])
        start, _ = self.shard_range(name, self._mesh)
        whole[start : start + len(amax)] = amax
        return whole

    def _store(self, scales: tuple[Tensor, ...]) -> None:
        """Write in place: compiled layers and captured graphs read the same tensors."""
        fresh = {
            name: scale.view(self.shapes[name][:-2])
            for names, scale in zip(self._groups, scales, strict=True)
            for name in names
        }
        for name, scale in fresh.items():
            if self._mesh is None:
                self.values[name] = self.weight(name).global_scale
            elif self.values[name].device != scale.device:
                self.values[name] = torch.empty_like(scale)
        torch._foreach_copy_([self.values[name] for name in fresh], list(fresh.values()))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def _local(parameter: Any) -> Any:
    # Asked of all weights at every forward; isinstance takes a tensor four times as long.
    return parameter._local_tensor if type(parameter) is DTensor else parameter


def _version(parameter: Any) -> tuple[int, int]:
    """Counts writes, also through state dicts, to the memory, and to a DTensor instead of to it."""
    own = parameter._version if type(parameter) is DTensor else 0
    return _local(parameter).plain()._version, own
