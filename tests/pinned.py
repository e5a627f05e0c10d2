"""Tests of kernels that are made for the vLLM that verl pins, on a GPU with another one."""

import pytest
import torch
import vllm

from qat_core.rollout.vllm.compat import PINNED, is_one_of

OF_PINNED = pytest.mark.skipif(
    torch.cuda.is_available() and not is_one_of(vllm.__version__, PINNED),
    reason=f"on a GPU these kernels are refused but with vLLM {', '.join(PINNED)}",
)
