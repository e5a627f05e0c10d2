"""Routed experts from vLLM's CPU kernels, which vLLM 0.28 and 0.29 refuse to ask for them.

Its kernels for a CPU choose the experts in Python, right before the kernel: to report them is one
call. Unneeded from 0.30 on, whose router for a CPU chooses, and reports.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

_ON_LAYER = "_qat_core_capture"

Note = Callable[[Tensor], None]


def let_cpu_experts_report(version: str) -> None:
    """Make `enable_return_routed_experts` of vLLM 0.28 and 0.29 work on a CPU; once a process."""
    if not version.startswith(("0.28.", "0.29.")):
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts as Experts,
    )

    if getattr(Experts, "reports_routes", False):
        return
    select, process = Experts._select_experts, Experts.process_weights_after_loading

    def select_and_report(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = select(self, *args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(ids)
        return weights, ids

    def process_and_bind(self: Any, layer: Any) -> None:
        """A reload makes new kernels, to which vLLM does not bind what takes their routes."""
        process(self, layer)
        self.layer = layer
        self.routing_replay_capture_fn = vars(layer).get(_ON_LAYER)

    def set_capture_fn(self: Any, note: Note | None) -> None:
        self.routing_replay_capture_fn = vars(self.layer)[_ON_LAYER] = note

    Experts.reports_routes = True
    Experts.supports_routing_replay_capture = lambda _: True
    Experts._select_experts = select_and_report
    Experts.process_weights_after_loading = process_and_bind
    Experts.set_capture_fn = set_capture_fn
