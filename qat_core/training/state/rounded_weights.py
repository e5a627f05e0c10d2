"""Rounded weights that a model keeps, and for how long.

Each use of a weight rounds it, but that

* on a CPU, where memory is cheap and time is not, and on a GPU with `prepare(keep="rounded")`, the
  rounded weight is kept until a weight changes; with `prepare(keep="rounded")` all weights are
  rounded at once then, while they are measured, so that each is read once (but see `measure`);
* with `prepare(keep="packed")` the packed one is, and each use unpacks it;
* what gradient checkpointing computes again in a backward pass (recompute) is kept for the backward
  product of the same weight, which would round it once more, as autograd keeps the parameter.

The last lives as long as autograd needs it, without any bookkeeping: a product saves the view of
the weight that it read, such as `weight.t()`. Views made in a backward pass share one `Kept` a
weight, which goes with the last of them: after the backward product; at once if there will be none,
as for an input that needs no gradient; with the graph after an error. A product that reads the
parameter through no view may round again. What a backward pass derives from views of the forward
pass, as without checkpoints, keeps nothing.

Its cost is memory: in a backward pass the rounded weights of one checkpointed segment, in the
parameter's dtype, 2 bytes a weight in BF16. With `create_graph=True` they stay as long as the graph
of the gradient does.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor, dequantize, group_amax, measure_and_round, quantize
from qat_core.options import BlockScaleMethod, Keep, ScalePolicy
from qat_core.training.forward_calls import in_backward
from qat_core.training.state.held_weights import HeldWeight, HeldWeights
from qat_core.training.straight_through import as_dtype_of, round_to_nvfp4


class Kept:
    """The rounded values of one weight, or of one of its experts."""

    def __init__(self) -> None:
        self.rounded: Tensor | None = None
        self._stream: Any = None

    def read(self, device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
        """The rounded values, computed if there are none of this CUDA stream.

        Another stream might read them too early, or when their memory is used again.
        """
        if self.rounded is None or self._stream != _current_stream(device):
            self.keep(compute())
        assert self.rounded is not None
        return self.rounded

    def keep(self, rounded: Tensor) -> None:
        """Values that were computed in the current stream."""
        self.rounded, self._stream = rounded, _current_stream(rounded.device)


class RoundedWeights:
    """Rounds the weights of one model, and keeps what is worth it.

    Attributes:
        keep: round each weight once after a change, and keep it like this.
    """

    def __init__(
        self,
        weights: HeldWeights,
        shapes: Mapping[str, torch.Size],
        method: BlockScaleMethod,
        keep: Keep | None,
    ) -> None:
        self.keep = keep
        self._weights, self._shapes, self._method = weights, shapes, method
        self._whole: defaultdict[str, Kept] = defaultdict(Kept)
        self._packed: dict[str, PackedTensor] = {}
        self._recomputed: WeakValueDictionary[tuple[str, int | None], Kept] = WeakValueDictionary()

    @torch.inference_mode(False)  # training reads what is kept, too
    def measure(
        self, groups: Sequence[Sequence[str]], policy: ScalePolicy, *, rounds: bool
    ) -> list[Tensor]:
        """`group_amax` of groups of weights; with keep="rounded" it rounds them on the way.

        Not with the policy "amax", as nearly every scale is new at each step, so that each weight
        would be read twice all the same; nor in a graph that is being captured, which would outlive
        what is kept; nor where `rounds` forbids it. Each is rounded when it is first read then.
        """
        held = [[self._weights.weight(name) for name in names] for names in groups]
        weights = [[weight.plain() for weight in members] for members in held]
        is_captured = _in_capture(weights[0][0])
        if self.keep != "rounded" or policy != "pow2" or is_captured or not rounds:
            return group_amax(weights)
        last_scales = [members[0].global_scale for members in held]
        amax, rounded = measure_and_round(weights, last_scales, policy, self._method)
        for names, values in zip(groups, rounded, strict=True):
            for name, value in zip(names, values, strict=True):
                self._whole[name].keep(value)
        return amax

    def read(self, weight: HeldWeight, data: Tensor, expert: int | None) -> Tensor:
        """`data` (..., N, K), the whole weight or this one of its experts, rounded."""
        name = weight.weight_name
        kept = self._recomputed.get((name, expert)) if in_backward() else None
        is_kept = data.is_cpu or self.keep is not None or kept is not None
        is_kept = is_kept and data.shape == self._shapes[name][-data.ndim :]
        if not is_kept or not self._weights.holds_memory_of(weight):
            return self.round(weight, data)
        compute = partial(self._from_kept, weight, data, expert)
        return compute() if kept is None else kept.read(data.device, compute)

    def stays(self, data: Tensor) -> bool:
        """Whether a rounded weight is kept until one changes: not for a graph to outlive it."""
        is_kept = self.keep == "rounded" or (self.keep is None and data.is_cpu)
        return is_kept and not _in_capture(data)

    def round(self, weight: HeldWeight, data: Tensor) -> Tensor:
        """`data` (..., N, K) with the scale of `weight`, in its dtype."""
        return round_to_nvfp4(data, weight.global_scale, self._method, weight.weight_name)

    def packed(self, name: str, expert: int | None = None) -> PackedTensor:
        """The whole weight, or one of its experts, kept until a weight changes."""
        if name not in self._packed:
            weight = self._weights.weight(name)
            scale = weight.global_scale.clone()
            self._packed[name] = quantize(weight.plain(), scale, self._method, name=name)
        whole = self._packed[name]
        if expert is None:
            return whole
        return PackedTensor(
            whole.codes[expert], whole.block_scale[expert], whole.global_scale[expert]
        )

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept until a weight changes."""
        whole = (kept.rounded for kept in self._whole.values())
        rounded = sum(values.nbytes for values in whole if values is not None)
        return rounded + sum(packed.nbytes for packed in self._packed.values())

    def share(self, name: str, expert: int | None) -> Kept:
        """What a view that a backward pass makes of weight `name`, or its expert, is to hold."""
        return self._recomputed.setdefault((name, expert), Kept())

    def forget(self, name: str) -> None:
        """Let go of what is kept of a weight that moves: it would stay where the weight was."""
        self._whole.pop(name, None)
        self._packed.pop(name, None)
        for key in [key for key in self._recomputed if key[0] == name]:
            del self._recomputed[key]

    def clear(self) -> None:
        """Let go of everything: the scales are new."""
        self._whole.clear()
        self._packed.clear()
        self._recomputed.clear()

    def __reduce__(self) -> tuple[type["RoundedWeights"], tuple[Any, ...]]:
        """Pickles without what is kept."""
        return RoundedWeights, (self._weights, self._shapes, self._method, self.keep)

    def of_copy(self, weights: HeldWeights) -> "RoundedWeights":
        """For a copy of the model, with nothing kept yet."""
        return RoundedWeights(weights, self._shapes, self._method, self.keep)

    def _from_kept(self, weight: HeldWeight, data: Tensor, expert: int | None) -> Tensor:
        """From what is kept until a weight changes, if anything is."""
        name = weight.weight_name
        if self.keep == "packed" and not _in_capture(data):
            return as_dtype_of(data, dequantize(self.packed(name, expert)))
        if not self.stays(data):
            return self.round(weight, data)
        whole = self._whole[name].read(data.device, partial(self._round_whole, name))
        return whole if expert is None else whole[expert]

    @torch.inference_mode(False)
    def _round_whole(self, name: str) -> Tensor:
        held = self._weights.weight(name)
        return self.round(held, held.plain())


def _in_capture(data: Tensor) -> bool:
    """Whether what is launched for the tensor becomes part of a CUDA graph."""
    return data.is_cuda and torch.cuda.is_current_stream_capturing()


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
