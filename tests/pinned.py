"""Tests of kernels that are made for the vLLM that verl pins, on a GPU with another one."""

import pytest
import torch
import vllm

from qat_core.rollout.vllm.compat import PINNED

OF_PINNED = pytest.mark.skipif(
    torch.cuda.is_available() and vllm.__version__.rpartition(".")[0] not in PINNED,
    reason=f"on a GPU these kernels are refused but with vLLM {', '.join(PINNED)}",
)
