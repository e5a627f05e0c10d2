"""What the weights of a vLLM worker take; called with it through `LLM.collective_rpc`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


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
