"""Global scales of a prepared model, computed once after its weights changed.

Any in-place change of a prepared weight (optimizer step, `load_state_dict`, a manual edit) marks
the scales stale; the next use computes the amax of all groups at once. Sharded weights need one
all-reduce of one FP32 value a group (and expert).
"""

from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from qat_core.nvfp4 import ShardLayout, global_scale, is_representable
from qat_core.nvfp4.format import UNREPRESENTABLE
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.training.forward_calls import in_backward, runs_forward
from qat_core.training.held_weights import HeldWeight, HeldWeights
from qat_core.training.later import Later
from qat_core.training.mesh import max_over_ranks, shard_rows
from qat_core.training.rounded_weights import Keep, RoundedWeights
from qat_core.training.uncounted_writes import watch


class Measured(NamedTuple):
    """What the last refresh found of groups that the same ranks share.

    Attributes:
        groups: names of their weights.
        finite: whether their weights are: a value a group, of experts one for each, in a row.
        all_finite: whether all are.
    """

    groups: list[tuple[str, ...]]
    finite: Tensor
    all_finite: Later


class Scales:
    """Keeps one global scale a group.

    Attributes:
        plan: what is quantized.
        recipe: how.
        values: FP32 divisor by weight name, 0-D, or (E,) for experts (E, N, K).
        shapes: of the whole weights.
        weights: the tensors that the model holds.
        packed_shards: what this rank sends of each weight, and its layout, until one changes.
        rounded: the rounded weights, some of which it keeps.
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
        self.rounded = RoundedWeights(self.weights, self.shapes, self.method, keep)
        self.num_refreshes = 0
        self._was_updated = False  # by the call of the whole model that runs
        self.packed_shards: dict[str, tuple[Tensor, ShardLayout]] = {}
        self._groups = tuple(plan.groups.values())
        self._group_of = {name: group for group in self._groups for name in group}
        self._measured: list[Measured] = []
        self._ready: torch.cuda.Event | None = None

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
        measured, self._measured = self._measured, []
        if all(it.all_finite for it in measured):
            return
        bad = [n for it in measured for n in self._not_finite(it)]
        now = [n for n in bad if not bool(is_representable(self.weights.weight(n).plain()).all())]
        culprits = ", ".join(now or bad)
        raise ValueError(f"{culprits}: holds {UNREPRESENTABLE}, which NVFP4 cannot represent")

    def _not_finite(self, measured: Measured) -> list[str]:
        sizes = [self.shapes[names[0]][:-2].numel() for names in measured.groups]
        of_groups = zip(measured.groups, torch.split(measured.finite, sizes), strict=True)
        return [name for names, finite in of_groups if not bool(finite.all()) for name in names]

    def release_weights(self) -> None:
        """Let go of the weights, see `HeldWeights.release`."""
        self.weights.release()
        self._measured = []

    def copied_with(self, name: str, memo: dict[int, Any]) -> "Scales | None":
        """The copy of these scales, with the copy of weight `name`; None outside its module."""
        module, leaf = self.weights.owner(name)
        if id(module) not in memo:
            return None
        copied = deepcopy(self, memo)
        copied.weights.add(name, memo[id(module)], leaf)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scales":
        """Scales without weights; `copied_with` adds those of the model or layers copied."""
        copied = memo[id(self)] = copy(self)
        copied.values = {name: value.clone() for name, value in self.values.items()}
        copied.packed_shards, copied._measured = {}, []
        copied.weights = self.weights.without_weights()
        copied.rounded = self.rounded.of_copy(copied.weights)
        watch(copied.weights)
        copied._was_updated = False
        return copied

    def wait_until_ready(self) -> None:
        """Let the current CUDA stream wait for the last refresh, which ran in another one."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)

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
        (amax,) = self.rounded.measure([group], self.policy, rounds=False)
        for name in names:
            self.weights.weight(name).global_scale.copy_(global_scale(amax, self.policy))
            self.rounded.forget(name)

    def _held_group(self, name: str) -> list[str]:
        """The weights that share a scale with this one; of a copied layer, those in it."""
        held = self.weights.names
        return [other for other in self._group_of[name] if other in held]

    @torch.no_grad()
    def _refresh(self) -> None:
        self.require_finite()
        self._require_dtypes()
        self.rounded.clear()
        self.packed_shards.clear()
        for mesh, groups in self._groups_by_mesh().items():
            self._measure(groups, mesh)
        if not any(it.finite.is_cuda for it in self._measured):
            self.require_finite()
        self.num_refreshes += 1
        self.weights.mark_measured()

    def _measure(self, groups: list[tuple[str, ...]], mesh: DeviceMesh | None) -> None:
        """New global scales of groups that the same ranks share."""
        # In prepare(), the first time, a model may yet be moved or sharded; shards take the maximum
        # over all ranks before they are rounded.
        rounds = self.num_refreshes > 0 and mesh is None
        measured = self.rounded.measure(groups, self.policy, rounds=rounds)
        amax = [
            self._of_all_rows(names[0], local_amax, mesh)
            for names, local_amax in zip(groups, measured, strict=True)
        ]
        flat = torch.cat(amax)
        sizes = [values.numel() for values in amax]
        if mesh is not None:
            flat = max_over_ranks(flat.to(mesh.device_type), mesh.get_group())
        self._store(groups, torch.split(global_scale(flat, self.policy), sizes), mesh)
        finite = is_representable(flat)
        self._measured.append(Measured(groups, finite, Later(finite.all())))
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
