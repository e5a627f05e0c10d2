"""A sync that writes packed weights straight into the tensors that vLLM's kernels read.

vLLM's layer-wise reload calls a loader for each of three tensors a weight, twice, builds the layer
again and copies it, with several waits for the GPU. Here codes and scales of a layer are laid out
where its kernel reads them, without a wait (times: docs/performance.md). What is not packed goes
through vLLM's ordinary loaders.

`QAT_CORE_IN_PLACE_SYNC=0` asks for the reload. Models with anything that is not known here keep to
it, and the worker's log says why.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.in_place.targets import ATTENTION, NotInPlace, Target, find_targets
from qat_core.rollout.vllm.landing import landing
from qat_core.rollout.vllm.served_layers import quantized_layers
from qat_core.rollout.vllm.switches import is_in_place_allowed
from qat_core.weights.hub_names import HubNames, Weight

# Whose loaders stack weights and no more, tested on a GPU. Falcon's, for one, exchanges rows.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def targets_of(worker: Any, names: HubNames) -> dict[str, Target]:
    """Where packed weights can be written without a reload; none if unknown, or if 0 forbids it.

    Says once which way syncs go: both give the same weights, in other times.
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


@contextmanager
def writing(
    model: Any, targets: Mapping[str, Target], names: HubNames
) -> Iterator[Callable[[Iterable[tuple[str, Weight]]], None]]:
    """Inside, all weights are written by one or more calls of what it gives.

    Raises:
        ValueError: naming a parameter that got no new values, or a weight that went nowhere.
    """
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, Weight]]) -> None:
        tensors = landed.noted(write_packed(weights, targets, names))
        loaded.update(model.load_weights(tensors) or ())

    try:
        with landing(model) as landed:
            yield load
        require_written(model, targets, loaded)
        landed.require_all(model)
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
            raise passed_over(model, name)


def passed_over(model: nn.Module, name: str) -> ValueError:
    """The error of a parameter that got no new values."""
    return ValueError(
        f"weight sync: {name} got no new values in vLLM's {type(model).__name__}: its loader "
        "passes it over: serve its checkpoints, or train with the eager engine"
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
