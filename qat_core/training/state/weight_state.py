"""The state of a prepared model's quantized weights: their scales, and what is kept of them.

Global scales are computed once after weights changed. Any in-place change of one (optimizer step,
`load_state_dict`, a manual edit) marks them stale; the next use computes the amax of all groups at
once. Sharded weights need one all-reduce of one FP32 value a group (and expert).
"""

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from qat_core.nvfp4 import global_scale
from qat_core.options import Keep
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.training.forward_calls import in_backward, runs_forward
from qat_core.training.mesh import max_over_ranks, shard_rows
from qat_core.training.state.finiteness import Finiteness
from qat_core.training.state.held_weights import HeldWeight, HeldWeights
from qat_core.training.state.packed_shards import PackedShard, pack_together
from qat_core.training.state.rounded_weights import RoundedWeights
from qat_core.training.state.uncounted_writes import watch


class WeightState:
    """One global scale a group, and whatever else depends on the values of the weights.

    Attributes:
        plan: what is quantized.
        recipe: how.
        values: FP32 divisor by weight name, 0-D, or (E,) for experts (E, N, K).
        shapes: of the whole weights.
        weights: the tensors that the model holds.
        packed_shards: what this rank sends of each weight, until one changes.
        kept: the rounded weights that are kept.
    """

    def __init__(
        self, model: nn.Module, plan: QuantPlan, recipe: Recipe, *, keep: Keep | None = None
    ) -> None:
        weights = {name: model.get_parameter(name) for name in plan.quantized}
        self.plan, self.recipe = plan, recipe
        self.policy = recipe.scale_policy
        self.method = recipe.block_scale_method
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.values = {
            name: torch.ones(weight.shape[:-2], dtype=torch.float32, device=weight.device)
            for name, weight in weights.items()
        }
        self.weights = HeldWeights(model, plan.quantized)
        self.kept = RoundedWeights(self.weights, self.shapes, self.method, keep)
        self.num_refreshes = 0
        self._was_updated = False  # by the call of the whole model that runs
        self.packed_shards: dict[str, PackedShard] = {}
        self._groups = tuple(plan.groups.values())
        self._group_of = {name: group for group in self._groups for name in group}
        self._finiteness = Finiteness()
        self._ready: torch.cuda.Event | None = None

    def rounded(self, weight: HeldWeight, data: Tensor, expert: int | None) -> Tensor:
        """`data` (..., N, K), a weight as it is now or one of its experts, rounded to NVFP4."""
        self.refresh_if_stale(weight)
        return self.kept.read(weight, data, expert)

    def packed_shard(self, shard: HeldWeight, mesh: DeviceMesh) -> PackedShard:
        """This rank's part of a weight as it is now, to be gathered by the ranks of `mesh`.

        All shards of a mesh are packed together, once after each change of the weights, for all
        micro-batches and passes: packed alone, each would keep the CPU busier than the GPU, which
        waits for the first.
        """
        self.refresh_if_stale(shard)
        if not self.weights.holds(shard):  # FSDP2 brought a copy from the CPU to the GPU
            return self._pack([shard], mesh)[shard.weight_name]
        if shard.weight_name not in self.packed_shards:
            self.packed_shards |= self._pack(self.weights.shared_by(mesh), mesh)
        return self.packed_shards[shard.weight_name]

    def refresh(self) -> None:
        """Recompute all global scales."""
        self.weights.find()
        self._refresh()

    def refresh_if_stale(self, weight: HeldWeight) -> None:
        """Recompute all global scales if a weight is about to be read with an old one.

        In a backward pass the old one is right, as in the forward pass, unless the weight itself
        was written: an optimizer that steps in the backward pass writes the weights one by one.
        """
        weights, name = self.weights, weight.weight_name
        if in_backward():
            if name in weights.written or not weights.is_measured(name):
                self._refresh_in_backward(weight)
        elif weights.written or not all(map(weights.is_measured, self._group_of[name])):
            self.refresh()
        elif not self._was_updated and weights.is_assigned(name) and name not in weights.meshes:
            group = self._held_group(name)
            self._measure_again(group, group)

    def may_be_stale(self) -> bool:
        """Whether to look for writes: a call of the whole model has, and then each takes long."""
        return bool(self.weights.written) or not self._was_updated

    def update(self) -> None:
        """Recompute all global scales if any weight was, or may have been, written."""
        self.weights.find()
        if self.weights.any_unmeasured():
            self._refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, model: nn.Module, *_: Any) -> None:
        """Forward pre-hook of the whole model; compiled layers look for no writes themselves."""
        before = self.num_refreshes
        self.update()
        if self.num_refreshes > before:  # once an optimizer step: it takes a look at all modules
            self.weights.require_inside(model)
        self._was_updated = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, *_: Any) -> None:
        """Forward hook of the whole model, called after an error too."""
        self._was_updated = False  # calls around this one, or in other threads, look again

    def is_computing(self) -> bool:
        """Whether this thread runs a forward pass of the model, or of some part of it."""
        return runs_forward(self._is_part)

    def _is_part(self, module: nn.Module) -> bool:
        """Whether it is in the model, not around it, as a wrapper is, or a module of penalties."""
        for each in module.modules():
            if self.before_forward in each._forward_pre_hooks.values():
                return each is module
            if self.weights.has_owner(each):
                return True
        return False

    def trains(self, weight: HeldWeight) -> bool:
        """Whether the parameter behind this tensor or view gets a gradient."""
        return self.weights.weight(weight.weight_name).requires_grad

    def require_finite(self) -> None:
        """Refuse weights that held NaN or infinity at the last refresh; waits for its end.

        On a GPU a refresh asks for the one before, which has long ended: the GPU would otherwise
        idle at every step. Until then a weight that is not finite reads as NaN.
        """
        self._finiteness.require(self.weights)

    def release_weights(self) -> None:
        """Let go of the weights, see `HeldWeights.release`."""
        self.weights.release()
        self._finiteness.clear()

    def copied_with(self, name: str, memo: dict[int, Any]) -> "WeightState | None":
        """The copy of this state, with the copy of weight `name`; None outside its module."""
        module, leaf = self.weights.owner(name)
        if id(module) not in memo:
            return None
        copied = deepcopy(self, memo)
        copied.weights.add(name, memo[id(module)], leaf)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightState":
        """A state without weights; `copied_with` adds those of the model or layers copied."""
        copied = memo[id(self)] = copy(self)
        copied.values = {name: value.clone() for name, value in self.values.items()}
        copied.packed_shards, copied._finiteness = {}, Finiteness()
        copied.weights = self.weights.without_weights()
        copied.kept = self.kept.of_copy(copied.weights)
        watch(copied.weights)
        copied._was_updated = False
        return copied

    def _pack(self, shards: list[HeldWeight], mesh: DeviceMesh) -> dict[str, PackedShard]:
        if self._ready is not None:  # the last refresh ran in another CUDA stream
            torch.cuda.current_stream().wait_event(self._ready)
        return pack_together(shards, self.shapes, self.values, self.method, mesh)

    @torch.no_grad()
    def _refresh_in_backward(self, weight: HeldWeight) -> None:
        """A new scale for a weight that was written since the forward pass, and for no other.

        It still counts as written: its group is measured together before the next forward pass.
        """
        self.weights.find()
        name = weight.weight_name
        if name in self.weights.meshes:  # its gathered group has been rounded
            self._refresh()
        elif self.weights.holds_memory_of(weight):  # else what was read in the forward pass
            self._measure_again(self._held_group(name), [name])

    @torch.no_grad()
    def _measure_again(self, group: list[str], names: list[str]) -> None:
        """The global scale of a group, for these weights of it."""
        (amax,) = self.kept.measure([group], self.policy, rounds=False)
        for name in names:
            self.weights.weight(name).global_scale.copy_(global_scale(amax, self.policy))
            self.kept.forget(name)

    def _held_group(self, name: str) -> list[str]:
        """The weights that share a scale with this one; of a copied layer, those in it."""
        held = self.weights.names
        return [other for other in self._group_of[name] if other in held]

    @torch.no_grad()
    def _refresh(self) -> None:
        self.require_finite()
        self._require_dtypes()
        self.kept.clear()
        self.packed_shards.clear()
        for mesh, groups in self._groups_by_mesh().items():
            self._measure(groups, mesh)
        if not self._finiteness.is_on_gpu:
            self.require_finite()
        self.num_refreshes += 1
        self.weights.mark_measured()

    def _measure(self, groups: list[tuple[str, ...]], mesh: DeviceMesh | None) -> None:
        """New global scales of groups that the same ranks share."""
        # In prepare(), the first time, a model may yet be moved or sharded; shards take the maximum
        # over all ranks before they are rounded.
        rounds = self.num_refreshes > 0 and mesh is None
        measured = self.kept.measure(groups, self.policy, rounds=rounds)
        amax = [
            self._of_all_rows(names[0], local_amax, mesh)
            for names, local_amax in zip(groups, measured, strict=True)
        ]
        flat = torch.cat(amax)
        sizes = [values.numel() for values in amax]
        if mesh is not None:
            flat = max_over_ranks(flat.to(mesh.device_type), mesh.get_group())
        self._store(groups, torch.split(global_scale(flat, self.policy), sizes), mesh)
        self._finiteness.add(groups, sizes, flat)
        if flat.is_cuda and mesh is not None:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def _groups_by_mesh(self) -> dict[DeviceMesh | None, list[tuple[str, ...]]]:
        """All groups, of a copied layer those of its weights, by the ranks that share them.

        Raises:
            ValueError: naming two weights of a group that different ranks share.
        """
        names, meshes = set(self.weights.names), self.weights.meshes
        found: dict[DeviceMesh | None, list[tuple[str, ...]]] = {}
        for group in self._groups:
            held = tuple(name for name in group if name in names)
            for name in held:
                if meshes.get(name) != meshes.get(held[0]):
                    raise ValueError(
                        f"{held[0]}, {name}: share a global scale but are sharded over different "
                        "meshes: call fully_shard with one mesh on a module that holds both"
                    )
            if held:
                found.setdefault(meshes.get(held[0]), []).append(held)
        return found

    def _require_dtypes(self) -> None:
        for weight in self.weights.all():
            if weight.plain().dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(
                    f"{weight.weight_name}: became {weight.plain().dtype} after prepare(): a "
                    "quantized weight needs bfloat16 or float32"
                )

    def _of_all_rows(self, name: str, amax: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """Amax of all experts, those of other ranks 0; 1-D also for a matrix."""
        if amax.ndim == 0 or mesh is None:
            return amax.reshape(-1)
        whole = amax.new_zeros(self.shapes[name][0])
        first = shard_rows(len(whole), mesh).start
        whole[first : first + len(amax)] = amax
        return whole

    def _store(
        self, groups: list[tuple[str, ...]], scales: tuple[Tensor, ...], mesh: DeviceMesh | None
    ) -> None:
        """Write in place: compiled layers and captured graphs read the same tensors."""
        fresh: dict[str, Tensor] = {}
        for names, flat in zip(groups, scales, strict=True):
            scale = flat.view(self.shapes[names[0]][:-2])
            for name in names:
                fresh[name] = scale
                if mesh is None:
                    self.values[name] = self.weights.weight(name).global_scale
                elif self.values[name].device != scale.device:
                    self.values[name] = torch.empty_like(scale)
        torch._foreach_copy_([self.values[name] for name in fresh], list(fresh.values()))
