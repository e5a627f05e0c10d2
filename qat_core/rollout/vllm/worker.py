"""What runs inside vLLM's worker, called with it through `LLM.collective_rpc`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from qat_core.checkpoint.architecture import meta_copy
from qat_core.rollout.vllm import compat, own_humming
from qat_core.rollout.vllm.experts import load_experts, loading_experts_whole
from qat_core.rollout.vllm.in_place.sync import passed_over, targets_of, writing
from qat_core.rollout.vllm.in_place.targets import ATTENTION
from qat_core.rollout.vllm.kernel_choice import require_asked
from qat_core.rollout.vllm.landing import landing
from qat_core.rollout.vllm.plugin import require_loaded
from qat_core.rollout.vllm.served_layers import require_biases
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
    """Replaces all weights, layer by layer as they come.

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
    """Inside, all weights are replaced by one or more calls of what it gives.

    A layer's tensors are kept until its last one has come: they must not be overwritten until then.
    Where a model is known, its packed weights bypass vLLM's reload: see `in_place/sync.py`. Without
    `fused_experts` they come as a matrix each.

    Raises:
        ValueError: vLLM has no place for a bias, its loader of this model writes weights past the
            reload or nowhere, or it serves other kernels than asked for, or some that cannot be
            reloaded.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    require_loaded()
    model = worker.model_runner.get_model()
    require_asked(model)
    compat.require_reloadable(type(model).__name__)
    own_humming.require_reloadable(model)
    require_biases(model, names)
    if targets := targets_of(worker, names):
        with set_current_vllm_config(worker.vllm_config), writing(model, targets, names) as write:
            yield write
        return
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, Weight]]) -> None:
        tensors = landed.noted(_loading_experts(weights, experts, names))
        loaded.update(model.load_weights(tensors) or ())

    whole: AbstractContextManager[dict[str, nn.Module]] = (
        loading_experts_whole(model, names) if fused_experts else nullcontext({})
    )
    with set_current_vllm_config(worker.vllm_config), compat.repacking(), whole as experts:
        compat.before_reload(model)
        initialize_layerwise_reload(model)
        compat.load_embeddings_in_place(model)
        try:
            with landing(model) as landed:
                yield load
            _require_reloaded(model, loaded, worker.model_config.hf_text_config)
            landed.require_all(model)
        finally:  # also if the stream failed: else the next reload would find half of one
            finalize_layerwise_reload(model, worker.model_config)
        compat.after_reload(model)


def _require_reloaded(model: nn.Module, loaded: Collection[str], config: Any) -> None:
    """ValueError naming a parameter that vLLM's loader wrote past the reload, or left as it was.

    vLLM's `Attention` keeps scales of the KV cache as parameters; no checkpoint of ours has any.
    A tied output head has the embedding's parameter, which comes once.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # configs of models that are never tied lack the key
    is_tied = getattr(config, "tie_word_embeddings", False)
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
                raise passed_over(model, path)


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
