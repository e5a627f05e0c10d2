"""What runs inside vLLM's worker, called with it through `LLM.collective_rpc`."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from qat_core.checkpoint.architecture import meta_copy
from qat_core.rollout.vllm import compat
from qat_core.rollout.vllm.experts import load_experts, loading_experts_whole
from qat_core.rollout.vllm.in_place import (
    ARCHITECTURES,
    ATTENTION,
    VARIABLE,
    Target,
    find_targets,
    writing,
)
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.layouts import LAYOUTS, stored_tensors
from qat_core.weights.transfer import ExpectedWeights

LAYOUT = LAYOUTS["compressed-tensors"]

Load = Callable[[Iterable[tuple[str, Weight]]], None]


def reload(
    worker: Any,
    names: HubNames,
    weights: Iterable[tuple[str, Weight]],
    expected: Mapping[str, Weight],
) -> None:
    """Rewrite all weights in place, layer by layer as they come.

    Raises:
        ValueError: what comes is not what was expected; some layers have been replaced.
    """
    missing = ExpectedWeights(expected)
    with reloading(worker, names) as load:
        load(missing.checked(weights))
        missing.require_none()


def worker_names(worker: Any) -> HubNames:
    """The hub's names of the worker's model, asked of transformers once."""
    if not hasattr(worker, "qat_core_names"):
        worker.qat_core_names = HubNames(meta_copy(worker.model_config.hf_config))
    names: HubNames = worker.qat_core_names
    return names


@contextmanager
def reloading(worker: Any, names: HubNames, *, fused_experts: bool = True) -> Iterator[Load]:
    """Inside, all weights are rewritten in place by one or more calls of what it gives.

    A layer's tensors are kept until its last one has come: they must not be overwritten until then.
    Packed weights of models that are known there bypass vLLM's reload: see `in_place.py`.

    Args:
        worker: vLLM's.
        names: the hub's, as vLLM reads them.
        fused_experts: they come as the trainer's two 3-D weights, not a matrix each.

    Raises:
        ValueError: vLLM's loader of this model writes some weights past the reload, or none to
            a parameter.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.model_runner.get_model()
    compat.require_reloadable(type(model).__name__)
    if targets := _targets(worker, names):
        with set_current_vllm_config(worker.vllm_config), writing(model, targets, names) as write:
            yield write
        return
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, Weight]]) -> None:
        loaded.update(model.load_weights(_loading_experts(weights, experts, names)) or ())

    whole: AbstractContextManager[dict[str, nn.Module]] = (
        loading_experts_whole(model, names) if fused_experts else nullcontext({})
    )
    with set_current_vllm_config(worker.vllm_config), compat.repacking(), whole as experts:
        compat.before_reload(model)
        initialize_layerwise_reload(model)
        compat.load_embeddings_in_place(model)
        try:
            yield load
            # configs of models that are never tied lack the key
            is_tied = getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False)
            _require_reloaded(model, loaded, is_tied=is_tied)
        finally:  # also if the stream failed: else the next reload would find half of one
            finalize_layerwise_reload(model, worker.model_config)
        compat.after_reload(model)


def _require_reloaded(model: nn.Module, loaded: Collection[str], *, is_tied: bool) -> None:
    """ValueError naming a parameter that vLLM's loader wrote past the reload, or left as it was.

    vLLM's `Attention` keeps scales of the KV cache as parameters; no checkpoint of ours has any.
    A tied output head has the embedding's parameter, which comes once.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load():  # complete
            continue
        seen = {leaf for leaf, _ in info.loaded_weights}
        for leaf in info.restore_metadata[0].keys() - seen:
            path = f"{name}.{leaf}"
            if path in loaded:
                raise compat.not_reloadable(type(model).__name__, path)
            is_tied_head = is_tied and isinstance(module, ParallelLMHead)
            if type(module).__name__ != ATTENTION and not is_tied_head:
                raise ValueError(
                    f"weight sync: {path} got no new values in vLLM's {type(model).__name__}: its "
                    "loader passes it over: serve its checkpoints, or train with the eager engine"
                )


def _loading_experts(
    weights: Iterable[tuple[str, Weight]], experts: dict[str, nn.Module], names: HubNames
) -> Iterator[tuple[str, Tensor]]:
    """Loads fused experts on the way and passes on the tensors of all other weights."""
    for name, weight in weights:
        prefix = names.expert_prefix(name)
        if prefix is not None:
            load_experts(experts[prefix], name.rpartition(".")[2], weight, LAYOUT)
            compat.rebind_block_scales(experts[prefix])
        else:
            yield from stored_tensors([(names.renamed(name), weight)], LAYOUT)


def quantized_parameters(worker: Any, names: HubNames) -> list[str]:
    """Transformers' names of the parameters that vLLM takes packed, from its own load records."""
    return [name for _, held in _quantized_layers(worker, names) for name in held]


def _targets(worker: Any, names: HubNames) -> dict[str, Target]:
    """Where packed weights can be written without a reload; none if unknown, or if 0 forbids it.

    Says once which way syncs go: both give the same weights, in other times.

    Raises:
        ValueError: the variable has another value than 1 or 0.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={asked}: use 0 for vLLM's reload, or unset it")
    if asked == "0":
        return {}
    if not hasattr(worker, "qat_core_targets"):
        reason = _reason_to_reload(worker)
        found = None if reason else _find_targets(worker, names)
        reason = reason or ("a layer is not known there" if found is None else "nothing is packed")
        how = f"in place, {len(found)} weights" if found else f"through vLLM's reload: {reason}"
        print(f"qat_core: weight syncs {how}", flush=True)
        worker.qat_core_targets = found or {}
    targets: dict[str, Target] = worker.qat_core_targets
    return targets


def _reason_to_reload(worker: Any) -> str | None:
    """Why no weight of this worker may be written in place."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "on a CPU"
    parallel = worker.vllm_config.parallel_config
    if (parallel.pipeline_parallel_size, parallel.data_parallel_size) != (1, 1):
        return "a worker does not hold a share of every layer, or shares experts with other engines"
    architecture = type(worker.model_runner.get_model()).__name__
    if architecture not in ARCHITECTURES:
        return f"{architecture}'s loader may change weights on their way"
    return None


def _find_targets(worker: Any, names: HubNames) -> dict[str, Target] | None:
    served = _quantized_layers(worker, names)
    held = {id(module) for module, _ in served}
    modules = worker.model_runner.get_model().modules()
    return find_targets(served, [module for module in modules if id(module) not in held])


def _quantized_layers(worker: Any, names: HubNames) -> list[tuple[nn.Module, list[str]]]:
    """vLLM's layers in NVFP4, each with transformers' names of what it holds."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.model_runner.get_model()
    owners = {piece.name: owner for owner, some in names.pieces.items() for piece in some}
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # gpt-oss has `attn` for `self_attn`
    owners = mapper.apply_dict(owners) if mapper is not None else owners
    found = []
    for module_name, module in model.named_modules():
        loaded_parameters, _ = get_layerwise_info(module).restore_metadata
        if any(name.endswith("weight_scale") for name in loaded_parameters):
            found.append((module, _parameter_names(model, module_name, names, owners)))
    return found


def require_not_block_fp8(worker: Any) -> None:
    """ValueError if vLLM holds weights in block FP8: BF16 would go into them in silence."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in worker.model_runner.get_model().named_modules():
        held, _ = get_layerwise_info(module).restore_metadata
        if any(parameter.endswith("weight_scale_inv") for parameter in held):
            raise ValueError(
                f"weight sync: comes in BF16, but {name} is served in block FP8: give a base "
                "checkpoint in BF16, without quantization_config, and no quantization of vLLM's"
            )


def weight_bytes(worker: Any) -> int:
    """What vLLM measured on CUDA; on a CPU its parameters, without those that oneDNN keeps."""
    measured = getattr(worker.model_runner, "model_memory_usage", None)
    if measured is not None:
        return int(measured)
    return sum(parameter.nbytes for parameter in worker.model_runner.get_model().parameters())


def parameter_bytes(worker: Any) -> int:
    """Size of the model's parameters, each storage counted once: the weights as vLLM holds them.

    Not its buffers, such as the rotary cache, nor what its kernels work in.
    """
    return _storage_bytes(worker.model_runner.get_model().parameters())


def tensor_bytes(worker: Any) -> int:
    """Size of the tensors that the model holds, each counted once, without the KV cache.

    Less than what vLLM measures: its figure has the gaps that PyTorch's allocator leaves.
    """
    return _storage_bytes(
        tensor
        for module in worker.model_runner.get_model().modules()
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(tensor, Tensor) and name != "kv_cache"
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _parameter_names(
    model: nn.Module, module_name: str, names: HubNames, owners: Mapping[str, str]
) -> list[str]:
    """A fused linear stands for several; experts are two fused parameters."""
    parent, _, leaf = module_name.rpartition(".")
    experts, found, _ = f"{module_name}.".partition(".experts.")
    if found:
        return names.experts_at(f"{experts}.experts")
    mapping: Any = getattr(model, "packed_modules_mapping", {})
    stored = [f"{parent}.{part}.weight" for part in mapping.get(leaf, [leaf])]
    return [owners.get(name, name) for name in stored]
