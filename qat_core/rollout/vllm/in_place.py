"""A sync that writes packed weights straight into the tensors that vLLM's kernels read.

vLLM's layer-wise reload calls a loader for each of three tensors a weight, twice, builds the layer
again and copies it: for Qwen3-8B's 252 weights some thousand calls and 144 layers, each with
several waits for the GPU, 0.39 s on an H200 where a copy of the bytes takes 6 ms. Here codes and
scales of a layer are laid out where its kernel reads them, without a wait (times:
docs/performance.md). What is not packed goes through vLLM's ordinary loaders.

`QAT_CORE_IN_PLACE_SYNC=0` asks for the reload. Models with anything that is not known here keep to
it, and the worker's log says why.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.experts import FUSED
from qat_core.rollout.vllm.marlin import are_padded, is_padded
from qat_core.rollout.vllm.plugin import is_in_place_allowed
from qat_core.rollout.vllm.served_layers import quantized_layers
from qat_core.rollout.vllm.shares import own_experts, own_of_experts, own_of_linear
from qat_core.rollout.vllm.writers import (
    write_humming,
    write_humming_experts,
    write_marlin,
    write_marlin_experts,
)
from qat_core.weights.hub_names import HubNames, Weight

# Whose loaders stack weights and no more, tested on a GPU. Falcon's, for one, exchanges rows.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

PLAIN_METHODS = (
    "NoneType",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "CompressedTensorsKVCacheMethod",
)
ATTENTION = "Attention"  # vLLM's, which multiplies no weights
SKIPPED = "its loader passes it over: serve its checkpoints, or train with the eager engine"
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
        """Keeps a weight, and writes all once the last has come.

        Raises:
            ValueError: naming the weights, if they are not of the layer's size.
        """
        self.came[name] = weight.to(next(self.layer.parameters()).device)
        if len(self.came) == len(self.names):
            parts = [self.came.pop(part) for part in self.names]
            try:
                self.write(self.layer, self.share(self.layer, parts))
            except ValueError as error:
                raise ValueError(f"weight sync: {', '.join(self.names)}: {error}") from error


def targets_of(worker: Any, names: HubNames) -> dict[str, Target]:
    """Where packed weights can be written without a reload; none if unknown, or if 0 forbids it.

    Says once which way syncs go: both give the same weights, in other times.

    Raises:
        ValueError: the variable has another value than 1 or 0.
    """
    if not is_in_place_allowed():
        return {}
    if not hasattr(worker, "qat_core_targets"):
        worker.qat_core_targets, way = _chosen(worker, names)
        print(f"qat_core: weight syncs {way}", flush=True)
    targets: dict[str, Target] = worker.qat_core_targets
    return targets


def _chosen(worker: Any, names: HubNames) -> tuple[dict[str, Target], str]:
    """The targets, and the way that syncs go."""
    try:
        _require_known(worker)
        served = quantized_layers(worker, names)
        held = {id(module) for module, _ in served}
        modules = worker.model_runner.get_model().named_modules()
        other = {name: module for name, module in modules if id(module) not in held}
        targets = find_targets(served, other)
    except NotInPlace as reason:
        return {}, f"through vLLM's reload: {reason}"
    if not targets:
        return {}, "through vLLM's reload: nothing is packed"
    return targets, f"in place; packed weights: {len(targets)}"


def _require_known(worker: Any) -> None:
    """NotInPlace if no weight of this worker may be written in place."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise NotInPlace("on a CPU")
    parallel = worker.vllm_config.parallel_config
    if (parallel.pipeline_parallel_size, parallel.data_parallel_size) != (1, 1):
        raise NotInPlace(
            "a worker does not hold a share of every layer, or shares experts with other engines"
        )
    architecture = type(worker.model_runner.get_model()).__name__
    if architecture not in ARCHITECTURES:
        raise NotInPlace(f"{architecture}'s loader may change weights on their way")
    dtype = worker.model_config.dtype
    if dtype != torch.bfloat16:
        raise NotInPlace(f"vLLM computes in {dtype}, for which Marlin's scales differ")


def find_targets(
    served: Iterable[tuple[nn.Module, list[str]]], other: Mapping[str, nn.Module]
) -> dict[str, Target]:
    """Where each packed weight goes, by the trainer's name.

    Args:
        served: layers that vLLM serves in NVFP4, with the trainer's names of their weights.
        other: all other modules of the model, by name.

    Raises:
        NotInPlace: a layer is not known, or not in this form.
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


@contextmanager
def writing(
    model: Any, targets: Mapping[str, Target], names: HubNames
) -> Iterator[Callable[[Iterable[tuple[str, Weight]]], None]]:
    """Inside, all weights are written by one or more calls of what it gives.

    Raises:
        ValueError: naming a parameter that got no new values.
    """
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, Weight]]) -> None:
        loaded.update(model.load_weights(write_packed(weights, targets, names)) or ())

    try:
        yield load
        require_written(model, targets, loaded)
    finally:
        for target in targets.values():
            target.came.clear()  # of a stream that broke off


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
                f"weight sync: {name} got no new values in vLLM's {type(model).__name__}: "
                + SKIPPED
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
