"""AdamW on FP32 master weights of a model that computes in BF16."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW:
    """Keeps an FP32 master of every parameter and writes its BF16 rounding back after each step.

    Gradients are summed in FP32 over micro-batches (`accumulate`), clipped by their global norm,
    and applied to the masters: an update of 1e-6 would be lost in a BF16 weight.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().clone().float() for p in self.parameters]
        is_cuda = all(master.is_cuda for master in self.masters)
        self.adamw = torch.optim.AdamW(
            self.masters, lr=lr, weight_decay=weight_decay, fused=True if is_cuda else None
        )

    def accumulate(self) -> None:
        """Moves the parameters' gradients into the masters', summing in FP32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> float:
        """Updates masters and parameters; returns the gradient norm before clipping.

        A norm of infinity or NaN says that this step was skipped: as in verl, the gradient is
        dropped, and masters, parameters and AdamW's state stay as they were.
        """
        grad_norm = float(nn.utils.clip_grad_norm_(self.masters, max_grad_norm))
        if math.isfinite(grad_norm):
            self.adamw.step()
            self.write_back()
        self.adamw.zero_grad()
        return grad_norm

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Masters and AdamW's own state."""
        return {"masters": self.masters, "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores masters, optimizer and, from the masters, the parameters."""
        saved: list[Tensor] = state["masters"]
        for master, value in zip(self.masters, saved, strict=True):
            master.copy_(value)
        self.adamw.load_state_dict(state["adamw"])
        self.write_back()
