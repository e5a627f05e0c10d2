"""verl's offload to the host in ordinary memory, for hosts with little room.

PyTorch 2.11 rounds every block of pinned memory up to a power of two. What Qwen3-8B's shape has in
FP32, weights and Adam's moments, takes 122 GiB there and 92 GiB in ordinary memory, at a slower
copy. verl's processes import this (`VERL_USE_EXTERNAL_MODULES`).
"""

from typing import Any

import torch
from torch import Tensor
from verl.utils import fsdp_utils


@torch.no_grad()
def _offload_model(model: Any, empty_cache: bool = True) -> None:
    model.to("cpu")
    if empty_cache:
        torch.cuda.empty_cache()


@torch.no_grad()
def _offload_optimizer(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to("cpu")


fsdp_utils.offload_fsdp2_model_to_cpu = _offload_model
fsdp_utils.offload_fsdp_optimizer = _offload_optimizer
