"""Metrics of a training step that are not about the mismatch, by verl's names."""

import resource

import torch
from torch import Tensor

from experiments.rl.metric_names import REWARD, TOTAL_TOKENS
from qat_core.rollout.engine import Rollouts
from qat_core.units import BYTES_PER_GIB


def score_metrics(scores_B: Tensor) -> dict[str, float]:
    """Rewards, and the share of right answers."""
    return {
        REWARD: scores_B.mean().item(),
        "critic/score/max": scores_B.max().item(),
        "critic/score/min": scores_B.min().item(),
        "critic/acc/mean": (scores_B == 1).float().mean().item(),
    }


def length_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Response lengths in tokens; clip_ratio is the share that ended by length."""
    lengths_B = rollouts.response_mask.sum(-1)
    return {
        "response_length/mean": lengths_B.mean().item(),
        "response_length/max": lengths_B.max().item(),
        "response_length/min": lengths_B.min().item(),
        "response_length/clip_ratio": rollouts.truncated.float().mean().item(),
    }


def performance_metrics(rollouts: Rollouts, timings_s: dict[str, float]) -> dict[str, float]:
    """Times, tokens a second (prompt and response) and the process's peak memory in GiB."""
    num_tokens = rollouts.attention_mask.sum().item()
    step_s = timings_s["step"]
    return {
        **{f"timing_s/{name}": seconds for name, seconds in timings_s.items()},
        TOTAL_TOKENS: num_tokens,
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / step_s,
        # verl's key says gb and means GiB
        "perf/max_memory_allocated_gb": _peak_bytes(rollouts.input_ids.device) / BYTES_PER_GIB,
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
