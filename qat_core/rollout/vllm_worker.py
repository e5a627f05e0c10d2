"""What runs inside vLLM's worker, called with it through `LLM.collective_rpc`."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qat_core.rollout import vllm_seam


def reload(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Rewrite all weights in place from tensors under a checkpoint's names."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        vllm_seam.before_reload(model)
        initialize_layerwise_reload(model)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, worker.model_config)
        vllm_seam.after_reload(model)


def quantized_parameters(worker: Any) -> list[str]:
    """Transformers' names of the parameters that vLLM takes packed, from its own load records."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.model_runner.get_model()
    names: list[str] = []
    for module_name, module in model.named_modules():
        loaded_parameters, _ = get_layerwise_info(module).restore_metadata
        if any(name.endswith("weight_packed") for name in loaded_parameters):
            names += _parameter_names(model, module_name)
    return names


def weight_bytes(worker: Any) -> int:
    """What vLLM measured on CUDA; on a CPU the size of all parameters."""
    measured = getattr(worker.model_runner, "model_memory_usage", None)
    if measured is not None:
        return int(measured)
    return sum(parameter.nbytes for parameter in worker.model_runner.get_model().parameters())


def _parameter_names(model: nn.Module, module_name: str) -> list[str]:
    """A fused linear stands for several; experts are two fused parameters."""
    parent, _, leaf = module_name.rpartition(".")
    experts, found, _ = f"{module_name}.".partition(".experts.")
    if found:
        return [f"{experts}.experts.{fused}" for fused in ("gate_up_proj", "down_proj")]
    mapping: Any = getattr(model, "packed_modules_mapping", {})
    return [f"{parent}.{part}.weight" for part in mapping.get(leaf, [leaf])]
