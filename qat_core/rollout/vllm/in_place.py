"""A sync that writes packed weights straight into the tensors that vLLM's kernels read.

vLLM's layer-wise reload calls a loader for each of three tensors a weight, twice, builds the layer
again and copies it: for Qwen3-8B's 252 weights some thousand calls and 144 layers, each with
several waits for the GPU, 0.39 s on an H200 where a copy of the bytes takes 6 ms. Here codes and
scales of a layer are laid out where its kernel reads them, without a wait (times:
docs/performance.md). What is not packed goes through vLLM's ordinary loaders.

`QAT_CORE_IN_PLACE_SYNC=0` asks for the reload. Models with anything that is not known here keep to
it, and the worker's log says so.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.experts import FUSED
from qat_core.rollout.vllm.marlin import TILE, is_padded
from qat_core.rollout.vllm.shares import own_experts, own_of_experts, own_of_linear
from qat_core.rollout.vllm.tile_layout import lay_out_for_humming, lay_out_for_marlin
from qat_core.weights.hub_names import HubNames, Weight

VARIABLE = "QAT_CORE_IN_PLACE_SYNC"
# Whose loaders stack weights and no more, tested on a GPU. Falcon's, for one, exchanges rows.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

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
        """Keeps a weight, and writes all once the last has come."""
        self.came[name] = weight
        if len(self.came) == len(self.names):
            parts = [self.came.pop(part) for part in self.names]
            self.write(self.layer, self.share(self.layer, parts))


def find_targets(
    served: Iterable[tuple[nn.Module, list[str]]], other: Iterable[nn.Module]
) -> dict[str, Target] | None:
    """Where each packed weight goes, by the trainer's name; None if a layer is not known here.

    Args:
        served: layers that vLLM serves in NVFP4, with the trainer's names of their weights.
        other: all other modules of the model.
    """
    served = list(served)
    methods = {id(module.quant_method) for module, _ in served if hasattr(module, "quant_method")}
    if not all(_is_plain(module, methods) for module in other):
        return None
    targets: dict[str, Target] = {}
    for module, names in served:
        found = _targets_of(module, names)
        if not found:
            return None
        targets |= {name: target for target in found for name in target.names}
    return targets


@contextmanager
def writing(
    model: Any, targets: Mapping[str, Target], names: HubNames
) -> Iterator[Callable[[Iterable[tuple[str, Weight]]], None]]:
    """Inside, all weights are written by one or more calls of what it gives.

    Raises:
        ValueError: naming a parameter that got no new values.
    """
    for target in targets.values():
        target.came.clear()  # of a stream that broke off
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, Weight]]) -> None:
        loaded.update(model.load_weights(write_packed(weights, targets, names)) or ())

    yield load
    require_written(model, targets, loaded)


def require_written(
    model: nn.Module, targets: Mapping[str, Target], loaded: Collection[str]
) -> None:
    """ValueError naming a parameter that no target wrote and vLLM's loader has not loaded.

    What else a target's layer holds its kernel works in, but for a bias. vLLM 0.24 keeps the scales
    of the KV cache as parameters of its `Attention`; no checkpoint of ours has any.
    """
    layers = [target.layer for target in targets.values()]
    layers += [module for module in model.modules() if type(module).__name__ == ATTENTION]
    written = {
        id(parameter)
        for layer in layers
        for leaf, parameter in layer.named_parameters(recurse=False)
        if leaf != "bias"
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in written and name not in loaded:
            raise ValueError(
                f"weight sync: {name} got no new values in vLLM's {type(model).__name__}: set "
                f"{VARIABLE}=0 and start again"
            )


def write_packed(
    weights: Iterable[tuple[str, Weight]], targets: Mapping[str, Target], names: HubNames
) -> Iterator[tuple[str, Tensor]]:
    """Writes packed weights on the way and passes on the others under the hub's names."""
    for name, weight in weights:
        if isinstance(weight, PackedTensor):
            targets[name].take(name, weight)
        else:
            yield names.renamed(name), weight


def _is_plain(module: nn.Module, served_methods: set[int]) -> bool:
    """Whether vLLM serves a module's weights as its loaders write them."""
    method = getattr(module, "quant_method", None)
    is_known = id(method) in served_methods or type(method).__name__ in PLAIN_METHODS
    makes_own = hasattr(type(module), "process_weights_after_loading")
    return is_known and (not makes_own or type(module).__name__ == ATTENTION)


def _targets_of(module: Any, names: list[str]) -> list[Target]:
    """Empty if the layer's kernel or sizes are not known here."""
    kernel = type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__
    if kernel == "HummingLinearKernel":
        return [Target(names, module, own_of_linear, write_humming)]
    if kernel in MARLIN_KERNELS:
        is_known = getattr(module, "bias", None) is None and not is_padded(module)
        return [Target(names, module, own_of_linear, write_marlin)] if is_known else []
    backend = getattr(getattr(module, "quant_method", None), "nvfp4_backend", None)
    if getattr(backend, "name", "") != "MARLIN":
        return []
    are_padded = module.hidden_size % TILE or module.intermediate_size_per_partition % TILE
    leaves = [name.rpartition(".")[2] for name in names]
    if are_padded or not FUSED.keys() >= set(leaves):
        return []
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
    layer.workspace.zero_()


def write_marlin_experts(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """Into w13 or w2 of vLLM's Marlin experts."""
    multiplier = getattr(layer, f"{matrix}_weight_scale_2")
    lay_out_for_marlin(packed, *_weight_and_scale(layer, matrix), multiplier)
    _keep_loaded_scale(layer, packed, matrix)
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
