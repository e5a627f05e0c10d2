"""Global scales of a prepared model, computed once after its weights changed.

Any in-place change of a prepared weight (optimizer step, `load_state_dict`, a manual edit) marks
the scales stale; the next use computes the amax of all groups at once. Sharded weights need one
all-reduce of one FP32 value a group (and expert).
"""

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.mesh import max_over_ranks, shard_rows
from qat_core.nvfp4 import fake_quantize, global_scale, group_amax
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe
from qat_core.tracking import HeldWeights


class Scales:
    """Keeps one global scale a group.

    Attributes:
        values: FP32 divisor by weight name, 0-D, or (E,) for experts (E, N, K).
        shapes: of the whole weights.
        weights: the tensors that the model holds.
        packed_shards: what this rank sends of each weight, until one changes.
    """

    def __init__(self, model: nn.Module, plan: QuantPlan, recipe: Recipe) -> None:
        weights = {name: model.get_parameter(name) for name in plan.quantized}
        self.policy = recipe.scale_policy
        self.method = recipe.block_scale_method
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.values = {
            name: torch.ones(weight.shape[:-2], dtype=torch.float32, device=weight.device)
            for name, weight in weights.items()
        }
        self.weights = HeldWeights(model, plan.quantized)
        self.num_refreshes = 0
        self.packed_shards: dict[str, tuple[Tensor, ...]] = {}
        self._groups = tuple(plan.groups.values())
        self._rounded: dict[str, Tensor] = {}
        self._finite: tuple[Tensor, ...] = ()
        self._ready: torch.cuda.Event | None = None

    def refresh_if_stale(self) -> None:
        """Recompute all global scales if a weight changed since the last time."""
        if self.weights.stale:
            self.weights.find()
            self._refresh()

    def refresh_if_written(self, name: str) -> None:
        """As `refresh_if_stale`, but sees any change of weight `name`, as `before_forward` does.

        FSDP2 gathers the weights of its root before that hook.
        """
        if not self.weights.stale:
            self.weights.stale = not self.weights.is_measured(name)
        self.refresh_if_stale()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, *_: Any) -> None:
        """Forward pre-hook of the whole model.

        Sees also the changes that no parameter notices, made through a tensor of the state dict,
        and refreshes on behalf of compiled layers, which do not look.
        """
        self.weights.find()
        if self.weights.stale or not self.weights.all_measured():
            self._refresh()

    def rounded(self, name: str) -> Tensor:
        """The whole weight rounded to NVFP4 in BF16, kept until a weight changes."""
        if name not in self._rounded:
            weight = self.weights.weight(name)
            self._rounded[name] = fake_quantize(
                weight.plain(), weight.global_scale, self.method, name=name
            )
        return self._rounded[name]

    def require_finite(self) -> None:
        """Refuse weights that held NaN or infinity at the last refresh; waits for the GPU.

        On a GPU a refresh asks for the one before, as it would otherwise idle at every step. Until
        then a weight that is not finite reads as NaN.
        """
        if not self._finite or bool(torch.cat(self._finite).all()):
            return
        groups = zip(self._held_groups(), self._finite, strict=True)
        bad = [name for names, finite in groups if not bool(finite.all()) for name in names]
        self._finite = ()
        now = [n for n in bad if not bool(self.weights.weight(n).plain().isfinite().all())]
        culprits = ", ".join(now or bad)
        raise ValueError(f"{culprits}: holds NaN or infinity, which NVFP4 cannot represent")

    def release_weights(self) -> None:
        """Let go of the weights, see `HeldWeights.release`."""
        self.weights.release()
        self._finite = ()

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
        copied.values, copied.packed_shards, copied._rounded = dict(self.values), {}, {}
        copied.weights, copied._finite = self.weights.without_weights(), ()
        return copied

    def wait_until_ready(self) -> None:
        """Let the current CUDA stream wait for the last refresh, which ran in another one."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)

    @torch.no_grad()
    def _refresh(self) -> None:
        self.require_finite()
        mesh, held = self.weights.mesh, self._held_groups()
        groups = [[self.weights.weight(name).plain() for name in names] for names in held]
        amax = [
            self._of_all_rows(names[0], local_amax)
            for names, local_amax in zip(held, group_amax(groups), strict=True)
        ]
        flat = torch.cat(amax)
        sizes = [len(values) for values in amax]
        if mesh is not None:
            flat = max_over_ranks(flat.to(mesh.device_type), mesh.get_group())
        self._store(held, torch.split(global_scale(flat, self.policy), sizes))
        self._finite = torch.split(flat.isfinite(), sizes)
        if flat.is_cuda and mesh is not None:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()
        if not flat.is_cuda:
            self.require_finite()
        self._rounded.clear()
        self.packed_shards.clear()
        self.num_refreshes += 1
        self.weights.mark_measured()

    def _held_groups(self) -> list[tuple[str, ...]]:
        """All groups; of a copied layer those of its weights."""
        names = set(self.weights.names)
        groups = (tuple(name for name in group if name in names) for group in self._groups)
        return [group for group in groups if group]

    def _of_all_rows(self, name: str, amax: Tensor) -> Tensor:
        """Amax of all experts, those of other ranks 0; 1-D also for a matrix."""
        if amax.ndim == 0 or self.weights.mesh is None:
            return amax.reshape(-1)
        whole = amax.new_zeros(self.shapes[name][0])
        first = shard_rows(len(whole), self.weights.mesh).start
        whole[first : first + len(amax)] = amax
        return whole

    def _store(self, groups: list[tuple[str, ...]], scales: tuple[Tensor, ...]) -> None:
        """Write in place: compiled layers and captured graphs read the same tensors."""
        fresh = {
            name: scale.view(self.shapes[name][:-2])
            for names, scale in zip(groups, scales, strict=True)
            for name in names
        }
        for name, scale in fresh.items():
            if self.weights.mesh is None:
                self.values[name] = self.weights.weight(name).global_scale
            elif self.values[name].device != scale.device:
                self.values[name] = torch.empty_like(scale)
        torch._foreach_copy_([self.values[name] for name in fresh], list(fresh.values()))
