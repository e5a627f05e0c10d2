"""Which of the trainer's weights the layers of a vLLM worker hold, and in which form."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

from qat_core.weights.hub_names import HubNames


def quantized_parameters(worker: Any, names: HubNames) -> list[str]:
    """Transformers' names of the parameters that vLLM takes packed, from its own load records."""
    return [name for _, held in quantized_layers(worker, names) for name in held]


def quantized_layers(worker: Any, names: HubNames) -> list[tuple[nn.Module, list[str]]]:
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


def require_biases(model: nn.Module, names: HubNames, source: str = "weight sync") -> None:
    """ValueError naming a bias of the trainer's that vLLM's layer lacks, as Qwen3's `o_proj`.

    vLLM's loaders skip a bias that they do not find. Layers that vLLM names in its own way, or
    fuses without saying so, are not looked at.
    """
    for piece in chain.from_iterable(names.pieces.values()):
        layer = _layer(model, piece.name) if piece.name.endswith(".bias") else None
        if layer is not None and getattr(layer, "bias", None) is None:
            raise ValueError(
                f"{source}: {piece.name}: vLLM's {type(layer).__name__} has no bias there, and "
                "its loader passes it over: train without it, or with the eager engine"
            )


def _layer(model: nn.Module, name: str) -> nn.Module | None:
    """Where vLLM has a parameter of the hub's, alone or fused with others; None if unknown."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    kept = mapper.apply_list([name]) if mapper is not None else [name]
    parent, _, leaf = "".join(kept).rpartition(".")[0].rpartition(".")
    mapping: Any = getattr(model, "packed_modules_mapping", {})
    fused = [whole for whole, parts in mapping.items() if leaf in parts]
    try:
        layer = model.get_submodule(".".join(filter(None, (parent, *(fused[:1] or [leaf])))))
    except AttributeError:
        return None
    # an Identity stands for a layer of another pipeline stage
    return None if layer is model or isinstance(layer, nn.Identity) else layer


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
