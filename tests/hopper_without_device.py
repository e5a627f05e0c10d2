"""Kernels compiled for Hopper where there is no GPU; what would be launched is noted."""

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

ON_GPU = torch.cuda.is_available()


class HopperWithoutDevice:
    """What Triton asks a driver for; launches note their arguments."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *arguments: self.launched.append(arguments)


def hopper_without_device(monkeypatch: pytest.MonkeyPatch) -> HopperWithoutDevice:
    """In place of Triton's driver; not used where there is a GPU."""
    without_device = HopperWithoutDevice()
    if not ON_GPU:
        monkeypatch.setattr(driver, "_active", without_device)
    return without_device
