"""What a vLLM worker holds, to compare two ways of loading the same weights."""

from typing import Any

import torch


def all_tensors(worker: Any) -> dict[str, torch.Tensor]:
    """The bytes of all that a worker's model holds, but for the KV cache."""
    return {
        f"{prefix}.{name}": tensor.data.flatten().clone().view(torch.uint8)
        for prefix, module in worker.model_runner.get_model().named_modules()
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(tensor, torch.Tensor) and name != "kv_cache" and tensor.numel()
    }
