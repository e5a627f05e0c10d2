"""verl's own FSDP2 engine on a CPU, for BF16 and reference policies.

verl registers it for GPUs and NPUs alone, and keeps a reference policy in pinned memory, which
needs one. Apart from `cpu.py`, which verl imports before it has engines.
"""

from torch.distributed.fsdp import OffloadPolicy
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

EngineRegistry.register("language_model", "fsdp2", "cpu")(transformer_impl.FSDPEngineWithLMHead)


class _NoOffload(OffloadPolicy):
    """There is nowhere to offload to."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__()


transformer_impl.CPUOffloadPolicy = _NoOffload
