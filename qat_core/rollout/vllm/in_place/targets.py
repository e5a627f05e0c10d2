"""Where the kernels of a vLLM model have packed weights, and how these are written there."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.experts import FUSED
from qat_core.rollout.vllm.marlin.layout import are_padded, is_padded
from qat_core.rollout.vllm.shares import own_experts, own_of_experts, own_of_linear
from qat_core.rollout.vllm.tile_layout import lay_out_for_humming, lay_out_for_marlin

PLAIN_METHODS = (
    "NoneType",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "CompressedTensorsKVCacheMethod",
)
ATTENTION = "Attention"  # vLLM's, which multiplies no weights
MARLIN_KERNELS = ("MarlinNvFp4LinearKernel", "MarlinUnpackKernel")

Share = Callable[[Any, list[PackedTensor]], PackedTensor]
Write = Callable[[Any, PackedTensor], None]


class NotInPlace(Exception):
    """Why weights are not written in place."""


@dataclass
class Target:
    """A layer of vLLM's and the trainer's weights that are written there, one above the other.

    Attributes:
        share: what the worker serves of them.
    """

    names: list[str]
    layer: nn.Module
    share: Share
    write: Write
    came: dict[str, PackedTensor] = field(default_factory=dict)

    def take(self, name: str, weight: PackedTensor) -> None:
        """Keeps a weight, and writes all once the last has come; ValueError for a wrong size."""
        self.came[name] = weight.to(next(self.layer.parameters()).device)
        if len(self.came) == len(self.names):
            parts = [self.came.pop(part) for part in self.names]
            try:
                self.write(self.layer, self.share(self.layer, parts))
            except ValueError as error:
                raise ValueError(f"weight sync: {', '.join(self.names)}: {error}") from error


def find_targets(
    served: Iterable[tuple[nn.Module, list[str]]], other: Mapping[str, nn.Module]
) -> dict[str, Target]:
    """Where each packed weight goes, by the trainer's name; NotInPlace if a layer is not known.

    Args:
        served: layers that vLLM serves in NVFP4, with the trainer's names of their weights.
        other: all other modules of the model, by name.
    """
    served = list(served)
    methods = {id(module.quant_method) for module, _ in served if hasattr(module, "quant_method")}
    for name, module in other.items():
        if not _is_plain(module, methods):
            raise NotInPlace(f"{name or 'model'}: {type(module).__name__} is not known")
    targets: dict[str, Target] = {}
    for module, names in served:
        try:
            found = _targets_in(module, names)
        except NotInPlace as reason:
            where = ", ".join(names)
            raise NotInPlace(f"{where}: {reason}" if where else reason) from None
        targets |= {name: target for target in found for name in target.names}
    return targets


def _is_plain(module: nn.Module, served_methods: set[int]) -> bool:
    """Whether vLLM serves a module's weights as its loaders write them."""
    method = getattr(module, "quant_method", None)
    is_known = id(method) in served_methods or type(method).__name__ in PLAIN_METHODS
    makes_own = hasattr(type(module), "process_weights_after_loading")
    return is_known and (not makes_own or type(module).__name__ == ATTENTION)


def _targets_in(module: Any, names: list[str]) -> list[Target]:
    """NotInPlace if the layer's kernel or sizes are not known here, or the trainer's weights."""
    if not names:
        raise NotInPlace(f"{type(module).__name__} holds none of the trainer's weights")
    kernel = type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__
    if kernel == "HummingLinearKernel":
        return [Target(names, module, own_of_linear, write_humming)]
    if kernel in MARLIN_KERNELS:
        if getattr(module, "bias", None) is not None:
            raise NotInPlace("Marlin has its bias in another order")
        if is_padded(module):
            raise NotInPlace("padded for Marlin")
        return [Target(names, module, own_of_linear, write_marlin)]
    return _expert_targets(module, names)


def _expert_targets(module: Any, names: list[str]) -> list[Target]:
    backend = getattr(getattr(module, "quant_method", None), "nvfp4_backend", None)
    leaves = [name.rpartition(".")[2] for name in names]
    if getattr(backend, "name", "") != "MARLIN" or not FUSED.keys() >= set(leaves):
        raise NotInPlace(f"{type(module).__name__} with a kernel that is not known")
    if are_padded(module):
        raise NotInPlace("padded for Marlin")
    experts = getattr(module.quant_method, "experts_cls", None)
    is_humming = getattr(experts, "__name__", "") == "HummingExperts"
    write = write_humming_experts if is_humming else write_marlin_experts
    own = own_experts(module, module.moe_config.num_experts)
    return [
        Target([name], module, partial(own_of_experts, matrix, own), partial(write, matrix=matrix))
        for name, matrix in zip(names, map(FUSED.__getitem__, leaves), strict=True)
    ]


def write_humming(layer: Any, packed: PackedTensor) -> None:
    """Into a layer of `HummingLinearKernel`."""
    written = layer.weight.data, layer.weight_scale.data
    lay_out_for_humming(packed.codes, packed.block_scale, *written)
    layer.weight_global_scale.data.copy_(packed.global_scale.reciprocal().reshape(1))
    layer.humming_locks.zero_()


def write_humming_experts(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """Into w13 or w2 of experts that `HummingExperts` multiplies."""
    written = _weight_and_scale(layer, matrix)
    lay_out_for_humming(packed.codes, packed.block_scale, *written)
    getattr(layer, f"{matrix}_weight_scale_2").copy_(packed.global_scale.reciprocal())
    _keep_loaded_scale(layer, packed, matrix)


def write_marlin(layer: Any, packed: PackedTensor) -> None:
    """Into a linear layer of vLLM's Marlin kernel."""
    written = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data
    lay_out_for_marlin(packed, *written)
    _free_locks(layer)


def write_marlin_experts(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """Into w13 or w2 of vLLM's Marlin experts."""
    multiplier = getattr(layer, f"{matrix}_weight_scale_2")
    lay_out_for_marlin(packed, *_weight_and_scale(layer, matrix), multiplier)
    _keep_loaded_scale(layer, packed, matrix)
    _free_locks(layer)


def _free_locks(layer: Any) -> None:
    """Marlin's, of each layer up to vLLM 0.29; since then one array serves all layers."""
    if hasattr(layer, "workspace"):
        layer.workspace.zero_()


def _weight_and_scale(layer: Any, matrix: str) -> tuple[Tensor, Tensor]:
    return getattr(layer, f"{matrix}_weight").data, getattr(layer, f"{matrix}_weight_scale").data


def _keep_loaded_scale(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """As after a reload: what experts have loaded stays beside what their kernel reads of it.

    Only compressed-tensors' form has it: (E, 2) of gate and up, (E,) of down.
    """
    loaded = getattr(layer, f"{matrix}_weight_global_scale", None)
    if loaded is not None:
        loaded.data.copy_(packed.global_scale.view(-1, *[1] * (loaded.ndim - 1)))
